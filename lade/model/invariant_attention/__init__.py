"""`attn_implementation="lade_invariant"`: attention whose rounding is the same whatever else is in a pass."""
