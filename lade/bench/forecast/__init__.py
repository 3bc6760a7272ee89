"""What to expect of hardware by its peaks."""
