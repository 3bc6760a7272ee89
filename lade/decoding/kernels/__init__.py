"""Inner loops of the adaptive method, in C++; plain decoding and the paper's method call none.

The functions of this package declare those of `lade/native`, which have their names. `tests/reference` has the same
ones in Python, and tests compare the two bit for bit.

    layout.py         memory layout of entries, contexts and tables; the build hands its constants to C++
    tables.py         hash tables of the context memory, and its weights
    native_tree.py    a growing tree with its text, which C++ owns, and batches of them
"""
