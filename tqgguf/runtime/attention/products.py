"""numpy's float32 matrix products by the BLAS that serves mlx, so that one pool of threads works, not two in turns.

An OpenBLAS worker spins for a while after each product. Two libraries used in turns have twice as many workers as there
are cores, and whoever computes waits for cores that the other's workers spin on.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.runtime.attention.blas import load_fast_blas

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # CBLAS_ORDER and CBLAS_TRANSPOSE
_SGEMM_NAMES = ("scipy_cblas_sgemm", "cblas_sgemm")


def product(
    a: NDArray[np.float32], b: NDArray[np.float32], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """a [n, rows, inner] @ b [n, inner, columns], float32; `np.matmul` where no OpenBLAS serves mlx.

    out: where to write it, [n, rows, columns] without gaps inside a row.
    """
    sgemm = _sgemm()
    if sgemm is None:
        return np.matmul(a, b, out=out)
    (a, lda, trans_a), (b, ldb, trans_b) = _operand(a), _operand(b)
    n, rows, inner = a.shape
    columns = b.shape[2]
    if out is None:
        out = np.empty((n, rows, columns), np.float32)
    start_a, start_b, start = (x.__array_interface__["data"][0] for x in (a, b, out))
    for i in range(n):
        sgemm(
            _ROW_MAJOR,
            trans_a,
            trans_b,
            rows,
            columns,
            inner,
            1.0,
            start_a + i * a.strides[0],
            lda,
            start_b + i * b.strides[0],
            ldb,
            0.0,
            start + i * out.strides[0],
            max(out.strides[1] // 4, columns),
        )
    return out


def _operand(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], int, int]:
    """An array as CBLAS takes its matrices: itself or a contiguous copy, its leading dimension, whether transposed."""
    for axis, trans in ((2, _PLAIN), (1, _TRANSPOSED)):
        leading = x.strides[3 - axis] // 4
        if x.strides[axis] == 4 and x.strides[3 - axis] % 4 == 0 and leading >= x.shape[axis]:
            return x, max(leading, 1), trans
    x = np.ascontiguousarray(x)
    return x, max(x.shape[2], 1), _PLAIN


@functools.cache
def _sgemm() -> Callable[..., Any] | None:
    libraries = load_fast_blas().libraries
    found = next((getattr(lib, name) for lib in libraries for name in _SGEMM_NAMES if hasattr(lib, name)), None)
    if found is not None:
        i, f, p = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        found.argtypes = [i, i, i, i, i, i, f, p, i, p, i, f, p, i]
        found.restype = None
    return found
