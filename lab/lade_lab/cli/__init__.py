"""`lade bench`."""
