"""The command line: one click group, and one module per noun."""
