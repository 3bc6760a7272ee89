"""Inner loops of the adaptive method, compiled by numba: a *package of kernels*, see `lade.compilation`.

Each kernel is compiled on its first call on a machine, some seconds for all of them; plain decoding and the paper's
method call none. numba caches the machine code in this folder, or in the user's cache folder if this one is read-only,
until a file of this folder changes. Therefore compiled code calls functions and reads constants of this folder only.

    layout.py     memory layout of entries, contexts and tables; types of kernel arguments
    tables.py     hash tables of the context memory
    work.py       arrays of a growing tree, and the prior weights of its features
    mixing.py     mixing of a node's features into probabilities, and learning of the weights
    growth.py     best-first growth of trees
    reading.py    top-k entries of logits
"""
