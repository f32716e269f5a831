"""Rows of files and planes of caches are permutations of each other."""

from __future__ import annotations

import numpy as np
import pytest

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.blocks.page_rows import pages_to_rows, rows_to_pages

BLOCKS = [name for name, block_type in BLOCK_TYPES.items() if block_type.family != "float"]


@pytest.mark.parametrize("cache_type", BLOCKS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_planes_become_the_codecs_interleaved_rows_and_come_back(cache_type: str, head_dim: int) -> None:
    codec = resolve_codec(cache_type, head_dim, "k")
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (3 * 128, 2, codec.row_bytes), dtype=np.uint8)
    codes, scales = codec.split(rows.reshape(3, 128, 2, -1).swapaxes(1, 2))
    assert np.array_equal(pages_to_rows(codec, codes, scales), rows)
    empty = np.zeros_like(codes), np.zeros_like(scales)
    rows_to_pages(codec, rows, *empty)
    assert np.array_equal(empty[0], codes)
    assert np.array_equal(empty[1].view(np.uint16), scales.view(np.uint16))
