"""Types of numbers and arrays, as compiled functions take them."""

from __future__ import annotations

import numba

INTS, TABLE, LONGS = numba.int32[::1], numba.int32[:, ::1], numba.int64[::1]
DOUBLES, MATRIX, SCORES = numba.float64[::1], numba.float64[:, ::1], numba.float32[:, ::1]
INT, DOUBLE = numba.int64, numba.float64
