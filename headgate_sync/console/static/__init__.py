"""Files that browsers load."""
