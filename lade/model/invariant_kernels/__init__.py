"""Kernels for CUDA that give a row the same bits whatever else is in a pass; `lade.invariant` does not take them yet.

They are tried in Triton's interpreter, on a CPU (`make test-kernel`), and on no GPU so far: until they are, a model
on a GPU is refused. Each answers what keeps PyTorch's own from it:

- matrix products choose tiles, and how a sum is split, by the number of rows: here both are fixed;
- attention is split by the number of keys and of free multiprocessors: here at fixed positions of the text;
- norms share a row among more threads where there are few rows: here a program has one row.
"""
