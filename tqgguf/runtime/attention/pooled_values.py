"""Everything that a pool holds, as rows: for models that compute attention by themselves.

Asked for at every step and hardly ever evaluated: what the steps over the same pages share is kept, the rest are a few
lazy operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, SidePages
from tqgguf.runtime.thread_cache import lru_cache_in_thread


def pooled_values(
    backend: Backend, pages: Pages, growth: Growth, side: int, first_pages: Sequence[int], dtype: mx.Dtype
) -> mx.array:
    """K (side 0) or V of a step: [sequences, n_kv_heads, columns, head_dim], lazily.

    Of each sequence the rows from its first page in `first_pages` on, so that all end in the same column before the
    step's own; columns before its first row hold anything finite.
    """
    tails, new = growth.tails[side], growth.new[side].astype(dtype)
    key = "values", side, dtype, tuple(first_pages)
    blocks = pages.kept.get(key)
    if blocks is None:
        blocks = pages.kept[key] = _blocks(backend, pages, side, growth.offsets, first_pages, tails.shape, dtype)
    n_held = tuple(offset - PAGE * first for offset, first in zip(growth.offsets, first_pages, strict=True))
    rows = mx.concatenate([blocks, tails.astype(dtype), new], axis=2)
    return mx.take_along_axis(rows, _places(n_held, blocks.shape[2], new.shape[2]), axis=2)


def _blocks(
    backend: Backend,
    pages: Pages,
    side: int,
    offsets: Sequence[int],
    first_pages: Sequence[int],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
) -> mx.array:
    """Whole pages of all, [sequences, n_kv_heads, rows of the longest, head_dim]."""
    of, (_, n_heads, _, head_dim) = pages.k if side == 0 else pages.v, shape
    assert pages.slots is not None
    decoded = []
    for i, (offset, first) in enumerate(zip(offsets, first_pages, strict=True)):
        end = offset // PAGE
        if end == first or of.codes is None or of.scales is None:
            decoded.append(mx.zeros((1, n_heads, 0, head_dim), dtype=dtype))
            continue
        at = mx.array(list(pages.slots[i][first:end]), dtype=mx.int32)
        own = SidePages(
            of.codec,
            of.codes[at],
            of.scales[at],
            first,
            end,
            prefix=of.prefix[i] if of.prefix is not None and first == 0 else None,
            page_means=None if of.page_means is None else of.page_means[at],
            channel_scale=None if of.channel_scale is None else of.channel_scale[i],
            tiled=of.tiled,
        )
        decoded.append(backend.dequantise_pages(own, first, dtype))
    longest = max(rows.shape[2] for rows in decoded)
    return mx.concatenate([mx.pad(x, [(0, 0), (0, 0), (0, longest - x.shape[2]), (0, 0)]) for x in decoded])


@lru_cache_in_thread(4)
def _places(n_held: tuple[int, ...], n_coded: int, n_new: int) -> mx.array:
    """Where each sequence's columns lie among its `n_coded` rows of pages, its tail and the new rows: int32 [sequences,
    1, columns, 1], which the layers of a step share."""
    most = max(n_held)
    held, columns = mx.array(n_held, dtype=mx.int32)[:, None], mx.arange(most + n_new, dtype=mx.int32)[None]
    row, whole = columns - (most - held), held // PAGE * PAGE
    in_tail, in_new = n_coded + row - whole, n_coded + PAGE + row - held
    places = mx.where(row < whole, row, mx.where(row < held, in_tail, in_new))
    return mx.maximum(places, 0)[:, None, :, None]
