"""`attn_implementation="lade_tree"`: a Triton kernel that takes compact tree masks."""
