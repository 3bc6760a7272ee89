"""`lade generate --batch-size` and `lade batch`."""
