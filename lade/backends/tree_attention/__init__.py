"""`attn_implementation="lade_tree"`: a Triton kernel that reads compact tree masks."""
