"""Finds infinities and NaN in the data of tensors, by the bits that make them, without decoding a block.

A tensor is read once, in pieces that stay in the processor's cache. Layouts are ggml's (ggml-common.h); what the scales
of a block mean is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.cursor import Buffer
from tqgguf.formats.gguf.types import GGML_TYPES

Bytes = Buffer | memoryview | NDArray[np.uint8]
PIECE_BYTES: Final = 1 << 18
REPORT_BYTES: Final = 1 << 24  # after which progress is told: some hundredths of a second


class FloatBits(NamedTuple):
    """A number is infinite or NaN if all bits of `mask` are set in it."""

    dtype: np.dtype
    mask: int


F16: Final = FloatBits(np.dtype("<u2"), 0x7C00)
BF16: Final = FloatBits(np.dtype("<u2"), 0x7F80)
F32: Final = FloatBits(np.dtype("<u4"), 0x7F80_0000)
F64: Final = FloatBits(np.dtype("<u8"), 0x7FF0_0000_0000_0000)
E8M0: Final = FloatBits(np.dtype("u1"), 0xFF)

DENSE: Final[dict[str, FloatBits]] = {"F16": F16, "BF16": BF16, "F32": F32, "F64": F64}
"""Float types by name: every value counts."""

SCALES: Final[dict[str, tuple[FloatBits, tuple[int, ...]]]] = {
    "Q4_0": (F16, (0,)),
    "Q4_1": (F16, (0, 2)),
    "Q5_0": (F16, (0,)),
    "Q5_1": (F16, (0, 2)),
    "Q8_0": (F16, (0,)),
    "Q8_1": (F16, (0, 2)),
    "Q2_K": (F16, (80, 82)),
    "Q3_K": (F16, (108,)),
    "Q4_K": (F16, (0, 2)),
    "Q5_K": (F16, (0, 2)),
    "Q6_K": (F16, (208,)),
    "Q8_K": (F32, (0,)),
    "IQ2_XXS": (F16, (0,)),
    "IQ2_XS": (F16, (0,)),
    "IQ3_XXS": (F16, (0,)),
    "IQ1_S": (F16, (0,)),
    "IQ4_NL": (F16, (0,)),
    "IQ3_S": (F16, (0,)),
    "IQ2_S": (F16, (0,)),
    "IQ4_XS": (F16, (0,)),
    "TQ1_0": (F16, (52,)),
    "TQ2_0": (F16, (64,)),
    "MXFP4": (E8M0, (0,)),
    "Q1_0": (F16, (0,)),
}
"""Block types by name: what their scales and minima are, and at which bytes of a block they stand. A scale of NVFP4 is
finite whatever its byte.
"""

IQ1_M: Final = "IQ1_M"
IQ1_M_SCALES: Final = 48  # four u16, whose highest four bits together are the f16 scale, the lowest first


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first number of a tensor that is not finite.

    position: in bytes from the beginning of the tensor's data. bits: the number's own. block: the block in which it
    stands (of float types: which value it is). count: how many such numbers there are.
    """

    position: int
    bits: int
    block: int
    count: int


def no_progress(n_bytes: int) -> None:
    """Nobody wants to know how far it is."""


def first_non_finite(
    buffer: Bytes,
    begin: int,
    n_bytes: int,
    type_id: int,
    progress: Callable[[int], None] = no_progress,
) -> NonFinite | None:
    """The first scale or value that is not finite in a tensor of a known type; None if there is none.

    buffer: the file, in which the tensor's data are `n_bytes` bytes from `begin` on: whole blocks. progress: called
    with bytes that were looked at, every REPORT_BYTES.
    """
    ggml_type = GGML_TYPES[type_id]
    pieces = _numbers(buffer, begin, n_bytes, ggml_type.name, ggml_type.block_bytes)
    return _first(pieces, ggml_type.block_bytes, n_bytes, progress)


def first_bad_norm(
    buffer: Bytes,
    begin: int,
    n_bytes: int,
    block_bytes: int,
    progress: Callable[[int], None] = no_progress,
) -> NonFinite | None:
    """The same of blocks that begin with a float16 norm, as turbo types' do: it may not be negative either."""
    pieces = _strided(buffer, begin, n_bytes, block_bytes, F16.dtype, (0,))
    # with its sign bit a number is not below the infinite one either
    return _first(((at, norms, norms >= F16.mask) for at, norms in pieces), block_bytes, n_bytes, progress)


def _first(
    pieces: Iterator[tuple[int, NDArray[Any], NDArray[np.bool_] | None]],
    block_bytes: int,
    n_bytes: int,
    progress: Callable[[int], None],
) -> NonFinite | None:
    """The first number that is marked. pieces: where in the tensor the first number stands, numbers a block apart, and
    which of them are bad (None: none).
    """
    first: tuple[int, int] | None = None
    count = told = 0
    for at, numbers, bad in pieces:
        if bad is not None and bad.any():
            where = np.flatnonzero(bad)
            count += len(where)
            here = at + int(where[0]) * block_bytes, int(numbers[where[0]])
            first = here if first is None else min(first, here)
        if at - told >= REPORT_BYTES:
            progress(at - told)
            told = at
    progress(n_bytes - told)
    if first is None:
        return None
    position, bits = first
    return NonFinite(position, bits, position // block_bytes, count)


def _marked(numbers: NDArray[Any], mask: int) -> NDArray[np.bool_] | None:
    """Which numbers have all bits of the mask; None if none has."""
    masked = numbers & numbers.dtype.type(mask)
    return masked == mask if masked.size and masked.max() == mask else None


def _numbers(
    buffer: Bytes, begin: int, n_bytes: int, name: str, block_bytes: int
) -> Iterator[tuple[int, NDArray[Any], NDArray[np.bool_] | None]]:
    """The numbers that must be finite, in pieces as `_first` takes them."""
    if name == IQ1_M:
        for at, scales in _iq1_m(buffer, begin, n_bytes, block_bytes):
            yield at, scales, _marked(scales, F16.mask)
        return
    (dtype, mask), offsets = (DENSE[name], (0,)) if name in DENSE else SCALES.get(name, (F16, ()))
    for at, numbers in _strided(buffer, begin, n_bytes, block_bytes, dtype, offsets):
        yield at, numbers, _marked(numbers, mask)


def _strided(
    buffer: Bytes,
    begin: int,
    n_bytes: int,
    block_bytes: int,
    dtype: np.dtype,
    offsets: tuple[int, ...],
) -> Iterator[tuple[int, NDArray[Any]]]:
    """The numbers at these offsets of every block, in pieces: where in the tensor the first one stands, and them."""
    step = max(PIECE_BYTES // block_bytes, 1) * block_bytes
    for start in range(0, n_bytes, step) if offsets else ():
        n_blocks = min(step, n_bytes - start) // block_bytes
        for offset in offsets:
            at = start + offset
            yield at, np.ndarray(n_blocks, dtype, buffer, begin + at, (block_bytes,))


def _iq1_m(buffer: Bytes, begin: int, n_bytes: int, block_bytes: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """The f16 scales of IQ1_M, put together from the highest nibbles of its four u16."""
    step = max(PIECE_BYTES // block_bytes, 1) * block_bytes
    for start in range(0, n_bytes, step):
        n_blocks = min(step, n_bytes - start) // block_bytes
        at = start + IQ1_M_SCALES
        words = np.ndarray((n_blocks, 4), F16.dtype, buffer, begin + at, (block_bytes, 2))
        top = words & np.uint16(0xF000)
        yield at, top[:, 0] >> 12 | top[:, 1] >> 8 | top[:, 2] >> 4 | top[:, 3]
