"""The statements of test schemas, one `.sql` file each."""
