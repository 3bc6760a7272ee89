"""Compiled kernels for models: a *package of kernels*, see `lade.compilation`.

Machine code is kept for later processes as long as no file of this folder changes. So whatever is compiled calls, and
takes constants from, files of this folder alone.

    instructions.py       memory by its address, and counts that threads share
    kinds.py              the numbers of dtypes; processor.py: what there is to compile for
    vector_types.py       vectors as types of compiled functions; their conversions
    lanes.py              16 float32 numbers at once
    vectors.py            as many at once as the processor has; exponentials.py: exp and tanh of them
    quads.py              products of four rows by columns
    attention.py          attention in one order; likewise norms.py, logistic.py
    codes.py              rows rounded to int8; panel_products.py: what products become
    tiles.py              registers of AMX; tile_products.py, tile_code_products.py: products by them
    dots.py               dot products of AVX-512; dot_products.py: products by them
"""
