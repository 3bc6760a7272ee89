"""`lade generate --batch-size`."""
