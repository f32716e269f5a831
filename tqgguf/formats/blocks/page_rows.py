"""Between rows of blocks as files hold them and the planes that caches keep: a lossless permutation.

Files interleave scales and codes, token by token, head-major; planes keep codes and scales apart, page by page and head
by head. Each block moves as two pieces, so that numpy copies pieces and not bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Codec


def pages_to_rows(codec: Codec, codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Planes [pages, n_kv_heads, PAGE_TOKENS, n_blocks * n] to rows uint8 [tokens, n_kv_heads, row_bytes]."""
    pages, n_heads = codes.shape[:2]
    rows = np.empty((pages * PAGE_TOKENS, n_heads, codec.row_bytes), np.uint8)
    blocks = _blocks(codec, rows)
    blocks["scales"] = _pieces(scales, 2 * codec.n_scales)
    blocks["codes"] = _pieces(codes, codec.code_bytes)
    return rows


def rows_to_pages(codec: Codec, rows: NDArray[np.uint8], codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> None:
    """The way back: rows of whole pages into planes, which are contiguous and as many pages long."""
    blocks = _blocks(codec, np.ascontiguousarray(rows))
    _pieces(scales, 2 * codec.n_scales)[...] = blocks["scales"]
    _pieces(codes, codec.code_bytes)[...] = blocks["codes"]


def _blocks(codec: Codec, rows: NDArray[np.uint8]) -> NDArray[np.void]:
    """Contiguous rows as blocks of two pieces in the order of the planes [pages, n_kv_heads, PAGE_TOKENS, n_blocks]."""
    kind = np.dtype([("scales", f"V{2 * codec.n_scales}"), ("codes", f"V{codec.code_bytes}")])
    n_tokens, n_heads, _ = rows.shape
    blocks = rows.reshape(n_tokens // PAGE_TOKENS, PAGE_TOKENS, n_heads, codec.n_blocks, codec.block_bytes).view(kind)
    return blocks[..., 0].swapaxes(1, 2)


def _pieces(plane: NDArray[np.generic], n_bytes: int) -> NDArray[np.void]:
    """A contiguous plane [pages, n_kv_heads, PAGE_TOKENS, ...] as pieces of n_bytes [..., n_blocks]."""
    return plane.view(np.uint8).view(f"V{n_bytes}")
