"""How the embedded model was trained; not part of the wheel."""
