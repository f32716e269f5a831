"""Which calls of the C library are worth it, as measured: beyond these limits, matrix products by a BLAS are faster."""

from __future__ import annotations

MOST_SINGLE_ROWS = 16
"""Rows of x up to which each is multiplied by a packed matrix in C; decoding the whole matrix costs more than so many
passes. With 24 both take as long."""

SLOW_PATHS = ("portable",)
"""Paths on which a product of packed rows takes longer than one of float32 rows by OpenBLAS."""
