"""Drafting from other models and layers than the memory's tables, loaded only where they are used."""
