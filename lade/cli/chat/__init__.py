"""`lade chat`."""
