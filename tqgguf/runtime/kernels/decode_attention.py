"""Decode attention of a few rows straight from blocks, of one sequence or of several: the only caller of its kernels.

Two kernels attend, one over shares of the keys and one that joins what they give; a third joins new rows to tails.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.kernels.decode_plan import ATTENTION, Plan, answer_with, calls_for, given_sinks, plan_for
from tqgguf.runtime.kernels.launch import Call, Launcher, position_array, sizes_array
from tqgguf.runtime.kernels.pages import join_sizes, join_tails_with
from tqgguf.runtime.kernels.types import given, is_supported, nothing
from tqgguf.runtime.kv.pages import (
    PAGE,
    Growth,
    Pages,
    Pair,
    Query,
    SidePages,
    SideView,
    first_read_page,
    prefix_length,
)

_COLUMN_STEP = 32  # columns of a page table come so many at a time: compiled steps are made anew for every size


def refusal_of(k: Codec, v: Codec) -> str | None:
    """Why the kernels cannot read pages and tails of these types, if they cannot."""
    for name, codec in (("K", k), ("V", v)):
        if not is_supported(codec):
            return f"{name} is {codec.cache_type} with head size {codec.head_dim}: the kernels do not read it"
    return None


def append_and_attend(
    launcher: Launcher, q: mx.array, pages: Pages, growth: Growth, query: Query
) -> tuple[mx.array, Pair]:
    """`Backend.append_and_attend`, by one compiled function which layers and steps share.

    RequestError: types that `refusal_of` names. Rows that were joined before are not joined again.
    """
    tails = growth.tails if growth.joined is None else growth.joined
    key = q.shape[1], q.shape[2], q.dtype, query.scale, query.window, query.sinks is None
    prepared: _Prepared | None = pages.kept.get(key)
    if prepared is None:
        prepared = pages.kept[key] = _prepare_tails(launcher, q, pages, tails, query)
    is_batch, sinks = pages.slots is not None, given_sinks(query.sinks)
    position = _position(growth, is_batch)
    if growth.joined is not None:
        return prepared.answer(q, tails, position, sinks), tails
    n_heads = tails[0].shape[1] if is_batch else 0
    step = _compiled_step(launcher, prepared.plan, prepared.calls, growth.n_rows, n_heads)
    out, k, v = step(tails, growth.new, q, position, sinks, prepared.inputs, prepared.plan.v_signs)
    return out, (k, v)


def join_tails(launcher: Launcher, growth: Growth) -> Pair:
    """Tails with new rows that nobody attends from."""
    is_batch = growth.position is None and growth.n_own != (growth.n_rows,)
    sizes = _join_sizes(growth, growth.tails[0].shape[1] if is_batch else 0)
    return join_tails_with(launcher, growth.tails, growth.new, _position(growth, is_batch), sizes)


def attend_rows(launcher: Launcher, q: mx.array, k: SideView, v: SideView, *, offset: int, query: Query) -> mx.array:
    """Attention of rows that share one page: q [1, n_heads, rows, head_dim] at positions from `offset` on.

    The pages before theirs are read as blocks (f16 where a side is f16), their own page in f16. Both sides are of types
    that `types.is_supported`, one of them at least a block type. Returns [1, n_heads, rows, head_dim of v] in q's
    dtype.
    """
    shape = q.shape
    own_start, end = offset // PAGE * PAGE, offset + shape[2]
    n_seen = own_start // PAGE - first_read_page(k, v, offset, query.window)
    own = (_own_rows(k, own_start, end), _own_rows(v, own_start, end))
    prepared = _prepare(launcher, q, Pages(k, v), k.rows.shape[0], own, n_seen, query)
    return prepared.answer(q, (own[0].array, own[1].array), position_array(offset), given_sinks(query.sinks))


def n_shares(launcher: Launcher, pages: Pages, n_kv_heads: int, n_columns: int, window: int | None) -> int:
    """Into how many shares the blocks of a KV head with that many query columns are split."""
    plan = plan_for(
        launcher.family, pages.k.codec, pages.v.codec, n_columns, 1.0, False, False, False, False, mx.float32
    )
    return plan.n_coded(launcher.family, pages.most_seen(window), n_kv_heads)


def _position(growth: Growth, is_batch: bool) -> mx.array:
    if growth.position is not None:
        return growth.position
    return batch_positions(growth.offsets, growth.n_own) if is_batch else position_array(growth.offset)


@lru_cache(maxsize=4)
def batch_positions(offsets: tuple[int, ...], n_own: tuple[int, ...]) -> mx.array:
    """int32, at least 8: for each sequence the first query's position, and how many rows are its own. Layers share
    it."""
    pairs = [*chain.from_iterable(zip(offsets, n_own, strict=True))]
    return mx.array(np.array(pairs + [0] * (8 - len(pairs)), np.int32))


def _join_sizes(growth: Growth, n_heads: int) -> mx.array:
    return join_sizes(growth.new[0].shape[3], growth.new[1].shape[3], PAGE, growth.n_rows, n_heads)


@lru_cache(maxsize=16)
def _compiled_step(launcher: Launcher, plan: Plan, calls: tuple[Call, Call], n_rows: int, n_heads: int) -> Any:
    """A step's three kernels as one function of arrays, none of which it keeps alive: layers share it."""
    sizes = join_sizes(plan.k_dim, plan.v_dim, PAGE, n_rows, n_heads)

    def step(
        tails: Pair,
        new: Pair,
        q: mx.array,
        position: mx.array,
        sinks: mx.array,
        inputs: list[mx.array],
        v_signs: mx.array,  # an input too: what is among the inputs (K's signs may be the same) cannot be a constant
    ) -> tuple[mx.array, ...]:
        joined = join_tails_with(launcher, tails, new, position, sizes)
        return answer_with(calls, inputs, q, joined, position, (v_signs, sinks, inputs[_SIZES])), *joined

    return launcher.compiled(step)


_SIZES = ATTENTION.inputs.index("sizes")


class _Prepared(NamedTuple):
    """All of a step but its queries and own rows. inputs: of attention, with gaps for what changes from step to
    step."""

    plan: Plan
    calls: tuple[Call, Call]
    inputs: list[mx.array]

    def answer(self, q: mx.array, rows: Pair, position: mx.array, sinks: mx.array) -> mx.array:
        return answer_with(self.calls, self.inputs, q, rows, position, (self.plan.v_signs, sinks, self.inputs[_SIZES]))


class _Rows(NamedTuple):
    """f16 rows of the own page or of the exact prefix: where they lie, in elements. `head` is 0 where the own rows of
    all heads lie together, as many as there are: the kernel knows how many."""

    array: mx.array
    token: int
    head: int
    start: int = 0


def _prepare_tails(launcher: Launcher, q: mx.array, pages: Pages, tails: Pair, query: Query) -> _Prepared:
    reason = refusal_of(pages.k.codec, pages.v.codec)
    if reason is not None:
        raise RequestError(f"tails cannot be read by the kernels: {reason}")
    k, v = (_Rows(tail, tail.shape[3], PAGE * tail.shape[3]) for tail in tails)
    return _prepare(launcher, q, pages, tails[0].shape[1], (k, v), pages.most_seen(query.window), query)


def _prepare(
    launcher: Launcher,
    q: mx.array,
    pages: Pages,
    n_kv_heads: int,
    own: tuple[_Rows, _Rows],
    n_seen: int,
    query: Query,
) -> _Prepared:
    """own: K's and V's own rows. n_seen: whole pages that some row sees, which decides into how many shares they are
    split."""
    (n_sequences, n_heads, n_rows, _), (k, v), is_batch = q.shape, (pages.k, pages.v), pages.slots is not None
    group_size = n_heads // n_kv_heads
    plan = plan_for(
        launcher.family,
        k.codec,
        v.codec,
        group_size * n_rows,
        query.scale,
        k.page_means is not None,
        k.channel_scale is not None,
        query.sinks is not None,
        v.tiled,
        q.dtype,
        batched=is_batch,
    )
    n_coded = plan.n_coded(launcher.family, max(0, n_seen), n_sequences * n_kv_heads, n_beside=0 if is_batch else 1)
    n_prefix, slots = prefix_length(k, v), pages.slots or ()
    columns = -(-max(map(len, slots), default=0) // _COLUMN_STEP) * _COLUMN_STEP
    numbers = {
        **{"group_size": group_size, "n_rows": n_rows, "n_coded": n_coded, "n_prefix": n_prefix},
        **{"window": query.window or 0, "n_kv_heads": n_kv_heads, "table_columns": columns},
        **{"first_page": pages.first_page, "k_page": k.first_page, "v_page": v.first_page},
    }
    inputs = dict(plan.constants)
    for name, side, rows in (("k", k, own[0]), ("v", v, own[1])):
        prefix = _prefix_rows(side, n_prefix)
        inputs |= zip(
            (f"{name}_codes", f"{name}_scales", f"{name}_prefix"), (*_planes(side), prefix.array), strict=True
        )
        for where, of in (("", rows), ("_of_prefix", prefix)):
            numbers |= {f"{name}_{what}{where}": getattr(of, what) for what in ("token", "head", "start")}
    table = chain.from_iterable((*of, *[0] * (columns - len(of))) for of in slots)
    inputs |= {
        "page_means": given(k.page_means, mx.float16),
        "channel_scale": given(k.channel_scale, mx.float32),
        "sizes": sizes_array(*(numbers.get(name, 0) for name in ATTENTION.sizes[:-1]), *table),
    }
    gap = nothing(mx.float16)
    calls = calls_for(launcher, plan, n_rows, n_coded, (n_kv_heads, n_heads), q.dtype, n_sequences)
    return _Prepared(plan, calls, [inputs.get(name, gap) for name in ATTENTION.inputs])


def _planes(side: SidePages) -> Pair:
    """Codes and scales of whole pages; a float side's rows, token by token as they are held."""
    if side.codec.is_float:
        return side.token_rows, nothing(mx.float16)
    return given(side.codes, mx.uint8), given(side.scales, mx.float16)


def _own_rows(side: SideView, own_start: int, end: int) -> _Rows:
    n_kv_heads, n_rows, head_dim = side.rows.shape
    first = own_start - side.rows_start
    if side.codec.is_float:
        return _Rows(side.rows.swapaxes(0, 1), n_kv_heads * head_dim, head_dim, first * n_kv_heads * head_dim)
    return _Rows(
        side.rows, head_dim, 0 if first == 0 and n_rows == end - own_start else n_rows * head_dim, first * head_dim
    )


def _prefix_rows(side: SidePages, n_prefix: int) -> _Rows:
    """Of a float side they are its first rows."""
    if not n_prefix:
        return _Rows(nothing(mx.float16), 0, 0)
    if side.prefix is None:
        rows = side.token_rows
        return _Rows(rows, rows.shape[1] * rows.shape[2], rows.shape[2])
    head_dim = side.codec.head_dim
    return _Rows(side.prefix, head_dim, n_prefix * head_dim)
