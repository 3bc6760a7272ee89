"""`python -m lade_lab soak`: a server under mixed requests for hours, and whether it stays as it was."""
