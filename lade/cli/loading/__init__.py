"""Models for the shell: where they are, and how they are loaded."""
