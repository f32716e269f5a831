"""Rows of weights into blocks of a type, by whatever is fastest; some types otherwise than in caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqgguf.conversion.iq4_nl_search import encode_searched
from tqgguf.formats.blocks.codec import make_codec, refuse_non_finite
from tqgguf.formats.blocks.ggml import QK
from tqgguf.formats.errors import EncodeError
from tqgguf.formats.gguf.tensor_values import row_groups
from tqgguf.formats.gguf.types import GGML_TYPES, ggml_type_name
from tqgguf.formats.ordered_work import in_order

VALUES_AT_ONCE: Final = 1 << 19  # of a run of rows: measured, smaller and larger ones are slower

SEARCHED: Final[dict[str, Callable[[NDArray[np.float32]], NDArray[np.uint8]]]] = {"iq4_nl": encode_searched}
"""Types whose scale is searched for in weights: blocks' values [n, 32] to blocks."""

_MOST_F16: Final = float(np.finfo(np.float16).max)
_MOST_BF16: Final = 2.0**127 * (2 - 2.0**-7)

Encode = Callable[[str, NDArray[Any]], NDArray[np.uint8] | None]
"""Type and float16 or float32 rows [n, columns] to blocks [n, row_bytes]; None where it does not serve them."""


def encoded_runs(
    shape: tuple[int, int], ggml_type: int, rows_of: Callable[[slice], NDArray[Any]], encode: Encode | None, what: str
) -> Iterator[tuple[slice, memoryview]]:
    """A matrix [rows, columns] in runs of rows, encoded on all cores: which rows, and their blocks.

    rows_of: gives a run's values, float16 or float32. what: the matrix's name in messages. EncodeError: a value is not
    finite, or larger than the type can hold.
    """
    cache_type = ggml_type_name(ggml_type).lower()

    def encoded(rows: slice) -> NDArray[np.uint8]:
        values = rows_of(rows)
        blocks = None if encode is None else encode(cache_type, values)
        try:
            if blocks is None:
                blocks = in_numpy(cache_type, values)
            _refuse_clamped(cache_type, values, blocks)
        except EncodeError as error:
            raise EncodeError(f"{what}, rows from {rows.start} on: {error}") from error
        return blocks

    runs = [slice(rows.start, min(rows.stop, shape[0])) for rows in row_groups(shape, VALUES_AT_ONCE)]
    for rows, blocks in zip(runs, in_order(encoded, runs), strict=True):
        yield rows, blocks.reshape(-1).data


def _refuse_clamped(cache_type: str, values: NDArray[Any], blocks: NDArray[np.uint8]) -> None:
    """EncodeError where an encoder has clamped a value, or a scale, to the largest that the type has."""
    is_bf16 = cache_type == "bf16"
    most = _MOST_BF16 if is_bf16 else _MOST_F16
    if cache_type == "f32" or not values.size or max(float(values.max()), -float(values.min())) <= most:
        return
    codec = make_codec(cache_type, values.shape[1], None)
    held = blocks.view("<u2") if codec.is_float else codec.split(blocks)[1].view("<u2")
    clamped = (held & 0x7FFF) == (0x7F7F if is_bf16 else 0x7BFF)
    if clamped.any():
        row, place = np.argwhere(clamped)[0]
        start = place // max(codec.n_scales, 1) * codec.block_size
        block = values[row, start : start + codec.block_size]
        found = float(block[np.argmax(np.abs(block))])
        raise EncodeError(
            f"{found:.6g} in row {row} of them is too large for {cache_type}; leave out --type, or take --type f32"
        )


def in_numpy(cache_type: str, rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Float rows [n, columns] to blocks [n, row_bytes]. EncodeError: a value is not finite."""
    if cache_type not in SEARCHED:
        return make_codec(cache_type, rows.shape[1], None).encode(rows)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(rows, np.float32)
    refuse_non_finite(values, rows)
    return SEARCHED[cache_type](values.reshape(-1, QK)).reshape(len(rows), -1)


def bytes_of(ggml_type: int, n_values: int) -> int:
    """Bytes of so many values in whole blocks."""
    made = GGML_TYPES[ggml_type]
    return n_values // made.block_size * made.block_bytes
