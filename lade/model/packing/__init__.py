"""Linear layers prepacked for the CPU."""
