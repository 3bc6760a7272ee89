"""Inner loops of the adaptive method, in C++; plain decoding and the paper's method call none.

The functions of this package declare those of `lade/native`, which have their names. `tests/reference` has the same
ones in Python, and tests compare the two bit for bit.

    layout.py     memory layout of entries, contexts and tables
    work.py       a struct of arrays: a growing tree with its text; prior weights of copies
    tables.py     hash tables of the context memory, and its weights
    growth.py     best-first growth of trees, and learning of the weights that mix a node's features
"""
