"""Steps of attention as the C library takes them: its structures over numpy's views of a cache's arrays.

What steps over the same pages have in common is prepared once (`CommonSteps`); the rest is filled in for each step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Array
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.runtime.kv.pages import (
    PAGE,
    Growth,
    Pages,
    Pair,
    Query,
    SidePages,
    SideView,
    first_seen_page,
    prefix_length,
)
from tqgguf.runtime.native.library import KINDS, AttentionStep, Plane, address, codec_struct, page_plane, row_plane

FLOAT_KINDS = {mx.float16: KINDS["f16"], mx.bfloat16: KINDS["bf16"], mx.float32: KINDS["f32"]}
"""Types of queries and of new rows that the library reads."""

_F16 = KINDS["f16"]
_SLOT_BYTES = 4


class CommonSteps:
    """One structure for each sequence, with everything that its steps over the same pages have in common.

    pages: of one sequence or several; query: its window is none that changes from step to step.
    """

    def __init__(self, pages: Pages, n_sequences: int, n_kv_heads: int, n_heads: int, query: Query) -> None:
        self.query, k, v = query, pages.k, pages.v
        self.n_prefix = prefix_length(k, v)
        self._base, self._slots = _slot_tables(pages)
        sinks = None if query.sinks is None else query.sinks.astype(mx.float32)
        arrays = [*k.arrays, *v.arrays] if sinks is None else [*k.arrays, *v.arrays, sinks]
        if arrays:
            mx.eval(arrays)
        self._alive: list[NDArray[Any]] = []
        self.own_structs = (AttentionStep * n_sequences)()
        planes = self._page_plane(k), self._page_plane(v)
        prefixes, scales, means = self._host(k.prefix), self._host(k.channel_scale), self._host(k.page_means)
        value_prefixes, held_sinks = self._host(v.prefix), self._host(sinks)
        for i, struct in enumerate(self.own_structs):
            struct.k_codec, struct.v_codec = (ctypes.pointer(codec_struct(side.codec)) for side in (k, v))
            struct.k_pages, struct.v_pages = planes
            struct.n_kv_heads, struct.group = n_kv_heads, n_heads // n_kv_heads
            struct.n_prefix, struct.window, struct.scale = self.n_prefix, query.window or 0, query.scale
            if held_sinks is not None:
                struct.sinks = address(held_sinks)
            if scales is not None:
                struct.channel_scale = address(scales if pages.slots is None else scales[i])
            if means is not None:
                struct.page_means = address(means[self._base - k.first_page :])
                struct.mean_page, struct.mean_head = means.strides[:2]
            if prefixes is not None:
                struct.k_prefix = row_plane(_F16, prefixes if pages.slots is None else prefixes[i])
            if value_prefixes is not None:
                struct.v_prefix = row_plane(_F16, value_prefixes if pages.slots is None else value_prefixes[i])

    def _host(self, array: mx.array | None) -> NDArray[Any] | None:
        """numpy's view of an evaluated array without gaps, kept for as long as the structures point to it."""
        if array is None:
            return None
        self._alive.append(np.ascontiguousarray(np.asarray(array)))
        return self._alive[-1]

    def _page_plane(self, side: SidePages) -> Plane:
        kind = KINDS[side.codec.cache_type]
        if side.codes is None or side.scales is None:
            return Plane(kind=kind)
        codes, scales = _plain(side.codes), _plain(side.scales)
        self._alive += [codes, scales]
        skip = self._base - side.first_page
        return page_plane(kind, codes[skip:], scales[skip:])

    def structs(self) -> Array[AttentionStep]:
        """A copy for one step, whose rows, queries and results are still to be told."""
        return type(self.own_structs).from_buffer_copy(self.own_structs)

    def begin(self, struct: AttentionStep, i: int, offset: int, n_rows: int) -> None:
        """Tell a structure of sequence i where its step stands."""
        first = max(self._base, first_seen_page(offset, self.query.window))
        struct.offset, struct.n_rows, struct.first_page = offset, n_rows, first
        struct.slots = self._slots[i][1] + (first - self._base) * _SLOT_BYTES


_Table = tuple[NDArray[np.int32], int]
"""Where pages lie in planes, and this array's address."""


def _slot_tables(pages: Pages) -> tuple[int, list[_Table]]:
    """The page that tables begin with, and one for each sequence."""
    if pages.slots is not None:
        tables = [np.array([*slots, 0], np.int32) for slots in pages.slots]
        return 0, [(table, address(table)) for table in tables]
    n_pages = max(pages.k.end_page, pages.v.end_page) - pages.first_page
    return pages.first_page, [_in_order(1 << max(10, n_pages.bit_length()))]


@lru_cache(maxsize=24)
def _in_order(n: int) -> _Table:
    table = np.arange(n, dtype=np.int32)
    return table, address(table)


def common_steps(pages: Pages, growth: Growth, n_heads: int, query: Query) -> CommonSteps:
    """What steps over these pages have in common, prepared by the first of them."""
    key = "c", n_heads, query.scale, query.window
    common: CommonSteps | None = pages.kept.get(key)
    if common is None or common.query.sinks is not query.sinks:
        n_sequences, n_kv_heads = growth.new[0].shape[:2]
        common = pages.kept[key] = CommonSteps(pages, n_sequences, n_kv_heads, n_heads, query)
    return common


def growth_steps(
    common: CommonSteps, q: mx.array, growth: Growth, tails: Pair
) -> tuple[Array[AttentionStep], NDArray[np.float32], Any]:
    """The steps of a growth whose tails nobody else reads, or have its rows already: structures, their results
    [sequences, n_heads, rows, head_dim of v], and what must stay alive until those are there."""
    rows = (q,) if growth.joined is not None else (q, *growth.new)
    hosts = _hosts(rows)
    query, *new = hosts
    kinds = [FLOAT_KINDS[array.dtype] for array in rows]
    k_tails, v_tails = (np.asarray(tail) for tail in tails)
    n_sequences, n_heads, n_rows, _ = q.shape
    own = growth.n_own
    make: Callable[..., NDArray[np.float32]] = np.empty if min(own) == n_rows else np.zeros
    out = make((n_sequences, n_heads, n_rows, v_tails.shape[-1]), np.float32)
    structs = common.structs()
    for i, struct in enumerate(structs):
        common.begin(struct, i, growth.offsets[i], own[i])
        struct.k_own, struct.v_own = row_plane(_F16, k_tails[i]), row_plane(_F16, v_tails[i])
        if new:
            struct.k_new, struct.v_new = (row_plane(kinds[1 + s], new[s][i]) for s in (0, 1))
        _ask(struct, kinds[0], query[i], out[i])
    return structs, out, (hosts, k_tails, v_tails)


def _ask(struct: AttentionStep, kind: int, query: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Tell a structure its queries [n_heads, rows, head_dim] and where results go."""
    struct.query, struct.query_kind = address(query), kind
    struct.query_head, struct.query_row, _ = query.strides
    struct.out, struct.out_head = address(out), out.strides[0] // out.itemsize


class ViewSteps:
    """A step of one sequence over views of its sides, page by page."""

    def __init__(self, q: mx.array, k: SideView, v: SideView, query: Query) -> None:
        n_kv_heads, n_heads = k.rows.shape[0], q.shape[1]
        self._common = CommonSteps(Pages(k, v), 1, n_kv_heads, n_heads, query)
        self.n_prefix = self._common.n_prefix
        given = [view.rows for view in (k, v) if view.host is None]
        (self._query, *rows), self._kind = _hosts([q, *given]), FLOAT_KINDS[q.dtype]
        self._sides = tuple(_Rows(view, rows.pop(0) if view.host is None else view.host) for view in (k, v))
        self._head_dim, self._is_float = v.codec.head_dim, (k.codec.is_float, v.codec.is_float)
        self._start = max(k.first_page, v.first_page) * PAGE

    def step(
        self, first: int, offset: int, n_rows: int, own_from_blocks: bool
    ) -> tuple[Array[AttentionStep], NDArray[np.float32]]:
        """The rows from the query's row `first` on, at positions from `offset` on in one page: its structure, until the
        next one is asked for, and its result [n_heads, n_rows, head_dim of v]."""
        structs = self._common.own_structs
        struct, query, page = structs[0], self._query[0, :, first : first + n_rows], offset // PAGE * PAGE
        self._common.begin(struct, 0, offset, n_rows)
        struct.own_coded = own_from_blocks
        k, v = self._sides
        struct.k_own, struct.v_own = k.plane(page), v.plane(page)
        k_is_float, v_is_float = self._is_float  # whose rows are their pages
        if k_is_float:
            struct.k_pages, struct.k_prefix = k.plane(self._start, PAGE), k.plane(self._start)
        if v_is_float:
            struct.v_pages, struct.v_prefix = v.plane(self._start, PAGE), v.plane(self._start)
        out = np.empty((query.shape[0], n_rows, self._head_dim), np.float32)
        _ask(struct, self._kind, query, out)
        return structs, out


class _Rows:
    """Planes of a view's rows."""

    def __init__(self, view: SideView, rows: NDArray[Any]) -> None:
        kind = KINDS[view.codec.cache_type] if view.codec.is_float else _F16
        self._whole, self._rows, self._start = row_plane(kind, rows), rows, view.rows_start

    def plane(self, position: int, page_tokens: int = 0) -> Plane:
        """From a position on, a page being so many tokens."""
        of = self._whole
        first, page = (position - self._start) * of.token, page_tokens * of.token
        return Plane(of.codes + first, None, page, of.head, of.token, 0, 0, of.kind)


def _hosts(arrays: Sequence[mx.array]) -> list[NDArray[Any]]:
    """numpy's views of arrays whose last axes have no gaps, evaluated together; bfloat16 as its bits."""
    as_read = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    mx.eval(*as_read)
    return [_plain(array) for array in as_read]


def _plain(array: mx.array) -> NDArray[Any]:
    """numpy's view of an evaluated array, copied only where its last axis has gaps."""
    values = np.asarray(array)
    return values if values.strides[-1] == values.itemsize else np.ascontiguousarray(values)
