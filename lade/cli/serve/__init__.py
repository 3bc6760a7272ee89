"""`lade serve`."""
