"""`lade bench` and its subcommands."""
