"""`lade demo`."""
