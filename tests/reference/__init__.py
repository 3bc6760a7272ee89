"""The drafting kernels in plain Python: what each C++ function of `lade/native` has to compute, bit for bit.

The library calls the compiled ones alone; `test_compiled_kernels.py` compares.
"""

from reference import growth, reading, requests, tables

MODULES = growth, reading, requests, tables


def of(name: str):
    """The reference of a kernel, by the name of its declaration."""
    (found,) = {getattr(module, name) for module in MODULES if hasattr(module, name)}
    return found
