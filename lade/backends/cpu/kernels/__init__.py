"""CPU kernels of packed linear layers, attention and norms: a *package of kernels*, see `lade.compilation`.

Machine code is cached across processes until a file of this folder changes. Therefore compiled code calls functions and
reads constants of this folder only.

    instructions.py        raw memory access, atomic counters, dtype codes, CPU features
    vectors.py             vector types; vectors as wide as the processor's registers
    lanes.py               vectors of 16 float32 lanes, whatever the processor
    exponentials.py        exp, tanh and the logistic function on vectors
    attention.py           attention, and in norms.py RMS norms, with a fixed summation order
    codes.py               per-row int8 quantisation
    panel_products.py      blocked GEMM: arguments and epilogue
    tiles.py               AMX tile registers; tile_products.py: GEMM with them
    dots.py                AVX-512 and AVX2 dot products; dot_products.py: GEMM with them
"""
