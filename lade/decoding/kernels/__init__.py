"""The adaptive method's inner loops, compiled: a *package of kernels*, see `lade.compilation`.

Each is compiled when it is first called on a machine (`compilation`), some seconds all together; plain decoding and the
paper's method call none. numba keeps the machine code in this folder, or in the user's cache folder where that cannot
be written, as long as no file of this folder changes. So whatever is compiled calls, and takes constants from, files of
this folder alone.

    layout.py         how entries, contexts and tables are laid out, and their numbers
    array_types.py    types of numbers and arrays; inlined.py: functions compiled as part of others
    tables.py         the memory's tables
    work.py           a tree while it grows, in arrays; told_weights.py: with which weights it begins
    mixing.py         what is known of a node, mixed
    growth.py         the growth of trees
    reading.py        logits as entries
"""
