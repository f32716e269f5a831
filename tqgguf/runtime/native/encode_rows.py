"""The C library's way of encoding weights, for conversions: the bytes of `conversion/row_encoding.py`, faster.

Knows rows and types; neither files nor which tensors they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.conversion.row_encoding import SEARCHED
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import make_codec
from tqgguf.runtime.native.library import load_library

RUN = 256
"""Values that the library takes as a row, or the largest smaller power of two that divides a row. Measured: twice as
fast as 1,024."""


def row_encoder() -> Callable[[str, NDArray[Any]], NDArray[np.uint8] | None] | None:
    """A function of a type and float16 or float32 rows [n, columns] that gives blocks [n, row_bytes], or None for types
    and values that it does not encode; None where there is no library.

    It may be called from several threads, each of which then does its own work: the library's own threads are stilled.
    """
    library = load_library()
    if library is None:
        return None
    library.set_threads(1)

    def encode_rows(cache_type: str, rows: NDArray[Any]) -> NDArray[np.uint8] | None:
        n, columns = rows.shape
        size = min(RUN, columns & -columns)
        if BLOCK_TYPES[cache_type].family != "ggml" or columns % BLOCK_TYPES[cache_type].block_size:
            return None
        codec = make_codec(cache_type, size, None)
        encode = library.encode_searched if cache_type in SEARCHED else library.encode
        planes = encode(codec, np.ascontiguousarray(rows).reshape(1, -1, size))
        return None if planes is None else codec.join(planes[0][0], planes[1][0]).reshape(n, -1)

    return encode_rows
