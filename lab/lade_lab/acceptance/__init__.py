"""`python -m lade_lab acceptance`: what a user tries first on a new model, at a server, as one table."""
