"""Training of the embedded model; not part of the wheel."""
