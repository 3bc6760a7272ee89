"""Inner loops of the adaptive method, in C++; plain decoding and the paper's method call none.

The functions of this package are the reference implementations: they run where the library of `lade.native` is missing,
slower, and draft the same bit for bit. The C++ files of the same names are in `lade/native`.

    layout.py     memory layout of entries, contexts and tables
    work.py       structs of arrays: a growing tree, the context memory; prior weights of a tree's features
    tables.py     hash tables of the context memory
    mixing.py     mixing of a node's features into probabilities, and learning of the weights
    growth.py     best-first growth of trees
    reading.py    top-k entries of logits
"""
