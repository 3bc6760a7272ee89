"""`lade batch`."""
