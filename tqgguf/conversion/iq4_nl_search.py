"""Weights as iq4_nl: the scale that llama-quantize searches for, a few numpy operations at a time.

A block of 32 values x gets the scale d and codes c that come near to least sum of x^2 (x - d * value[c])^2. Candidates
are scales by which the value of largest magnitude lies on, or a few steps beside, an end of the codebook; each is
refined by least squares over the codes that it gives. Source of the rule: llama.cpp's ggml-quants.c (quantize_iq4_nl,
without importances, 7 steps to both sides); sums run in the order of the values, so that the bytes are its own, as
compiled without fused multiply-add. Caches are encoded without a search (`ggml`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.ggml import IQ4_NL_CODEBOOK, QK, first_extreme, inverse
from tqgguf.formats.blocks.turbo import F16_MAX, count_not_above, ordered_sum

STEPS: Final = 7
"""Candidates to each side of the codebook's end."""
TINY: Final = np.float32(1e-15)
"""Blocks below it are zero."""
_BLOCKS_AT_ONCE: Final = 1 << 11
_VALUES: Final = IQ4_NL_CODEBOOK.values.astype(np.float32)
_LOWEST: Final = _VALUES[0]


def encode_searched(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Finite float32 [n, 32] to blocks uint8 [n, 18]."""
    out = np.empty((len(x), 2 + QK // 2), np.uint8)
    for start in range(0, len(x), _BLOCKS_AT_ONCE):
        columns = np.ascontiguousarray(x[start : start + _BLOCKS_AT_ONCE].T)
        blocks = out[start : start + _BLOCKS_AT_ONCE]
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            d = _search(columns)
            codes = _codes(columns, inverse(d))
        blocks[:, :2] = np.clip(d, -F16_MAX, F16_MAX).astype("<f2").view(np.uint8).reshape(-1, 2)
        blocks[:, 2:] = (codes[: QK // 2] | codes[QK // 2 :] << np.uint8(4)).T
    return out


def _search(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales [n] of blocks [32, n]."""
    extreme = first_extreme(x)
    guess = -extreme / _LOWEST
    squares = x * x
    sum_qx, sum_q2 = _sums(x, squares, np.float32(1) / guess)
    d = np.where(sum_q2 > 0, sum_qx / sum_q2, np.float32(0))
    best = d * sum_qx
    for step in range(-STEPS, STEPS + 1):
        sum_qx, sum_q2 = _sums(x, squares, (np.float32(step) + _LOWEST) / extreme)
        is_better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        d = np.where(is_better, sum_qx / sum_q2, d)
        best = np.where(is_better, d * sum_qx, best)
    d = np.where(np.isfinite(d), d, guess)  # squares that overflow
    return np.where(np.abs(extreme) < TINY, np.float32(0), d)


def _sums(
    x: NDArray[np.float32], squares: NDArray[np.float32], factor: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Sums of x^2 q x and x^2 q q, with the values q of the codes that x * factor has."""
    q = _VALUES[_codes(x, factor)]
    weighted = squares * q
    return ordered_sum(weighted * x), ordered_sum(weighted * q)


def _codes(x: NDArray[np.float32], factor: NDArray[np.float32]) -> NDArray[np.uint8]:
    return count_not_above(x * factor, IQ4_NL_CODEBOOK.boundaries)
