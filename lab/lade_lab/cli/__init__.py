"""`lade bench` and `lade plan`."""
