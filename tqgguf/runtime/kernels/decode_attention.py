"""Decode attention of a few rows straight from blocks: two kernels, shares of the keys and their merge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kernels.decode_plan import (
    ATTENTION,
    Plan,
    answer_with,
    calls_for,
    given_sinks,
    plan_for,
)
from tqgguf.runtime.kernels.launch import Call, Launcher, position_array, sizes_array
from tqgguf.runtime.kernels.pages import join_sizes, join_with
from tqgguf.runtime.kernels.types import given, nothing
from tqgguf.runtime.kv.side_view import PAGE, SideView, first_read_page, prefix_length


class _Float(NamedTuple):
    """f16 rows of the own page or of the exact prefix: where they lie, in elements."""

    array: mx.array
    token: int
    head: int
    start: int


@dataclass(frozen=True)
class _Prepared:
    """All of a step but its queries and own rows, which the steps of one page share: see `SideView.kept`.

    calls: attention and merge. inputs: of attention, with gaps for what changes from step to step.
    """

    v: SideView
    plan: Plan
    calls: tuple[Call, Call]
    inputs: list[mx.array]
    sizes: mx.array

    def answer(self, q: mx.array, rows: tuple[mx.array, mx.array], position: mx.array, sinks: mx.array) -> mx.array:
        return answer_with(self.calls, self.inputs, q, rows, position, (self.plan.v_signs, sinks, self.sizes))


_OF_LAYER = (
    *("k_codes", "k_scales", "v_codes", "v_scales", "page_means", "channel_scale", "k_prefix", "v_prefix"),
    "sizes",
)
_PLACES_OF_LAYER = tuple(ATTENTION.inputs.index(name) for name in _OF_LAYER)


def attend_blocks(
    launcher: Launcher,
    q: mx.array,
    k: SideView,
    v: SideView,
    *,
    offset: int,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of rows that share one page: q [1, n_heads, rows, head_dim] at positions from `offset` on.

    The pages before theirs are read as blocks (f16 where a side is f16), their own page in f16. Both sides are of types
    that `types.is_supported`, one of them at least a block type. window, sinks: as `attend.attend` has them.
    Returns [1, n_heads, rows, head_dim of v] in q's dtype.
    """
    shape = q.shape
    own_start, end = offset // PAGE * PAGE, offset + shape[2]
    first_page = first_read_page(k, v, offset, window)
    key = shape[1], shape[2], q.dtype, own_start, first_page, window, scale, sinks is None
    prepared: _Prepared | None = k.kept.get(key)
    if prepared is None or prepared.v.kept is not v.kept:
        n_seen = own_start // PAGE - first_page
        prepared = _prepare(launcher, q, k, v, (own_start, end), n_seen, scale, window, sinks is not None)
        if _is_own_page(k, own_start, end) and _is_own_page(v, own_start, end):
            k.kept[key] = prepared
    return prepared.answer(q, (_as_held(k), _as_held(v)), position_array(offset), given_sinks(sinks))


def grow_and_attend(
    launcher: Launcher,
    q: mx.array,
    k: SideView,
    v: SideView,
    new: tuple[mx.array, mx.array],
    *,
    offset: int,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`join_rows` of new K and V [1, n_kv_heads, rows, head_dim] to the tails that two block sides have as their rows,
    and `attend_blocks` from the outcome: one compiled function, which layers share.

    Nothing but the tails changes with the new rows. Returns what both return: the answer, rows of K, rows of V.
    """
    shape = q.shape
    own_start = offset // PAGE * PAGE
    first_page = first_read_page(k, v, offset, window)
    key = "grow", shape[1], shape[2], q.dtype, first_page, window, scale, sinks is None
    kept = k.kept.get(key)
    if kept is None or kept[0] is not v.kept:
        n_seen = own_start // PAGE - first_page
        made = _prepare(launcher, q, k, v, (own_start, offset), n_seen, scale, window, sinks is not None)
        step = _compiled_step(launcher, made.plan, made.calls)
        kept = k.kept[key] = v.kept, step, [made.inputs[place] for place in _PLACES_OF_LAYER]
    positions = position_array(offset - own_start), position_array(offset)
    out, k_rows, v_rows = kept[1]((k.rows, v.rows), new, q, positions, given_sinks(sinks), kept[2])
    return out, k_rows, v_rows


def attend_in_page(
    launcher: Launcher,
    q: mx.array,
    k: SideView,
    v: SideView,
    *,
    n_pages: int,
    position: mx.array,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """`attend_blocks` of rows whose first position is int32 [8] and counts in its first entry.

    Both sides are of block types. Their planes hold at least the pages before the rows' own, of which n_pages are to be
    seen (how many decides only into how many shares they are split), and their rows are tails f16 [n_kv_heads, PAGE,
    head_dim], filled up to the last query's: nothing else in the graph depends on the position.
    """
    made = _prepare(launcher, q, k, v, None, n_pages, scale, window, sinks is not None)
    return made.answer(q, (k.rows, v.rows), position, given_sinks(sinks))


def n_shares(family: str, k: Codec, v: Codec, n_kv_heads: int, n_columns: int, n_pages: int) -> int:
    """Into how many shares the blocks of a KV head with that many query columns are split when n_pages are seen."""
    plan = plan_for(family, k, v, n_columns, 1.0, False, False, False, False, mx.float32)
    return plan.n_coded(family, n_pages, n_kv_heads)


@lru_cache(maxsize=16)
def _compiled_step(launcher: Launcher, plan: Plan, calls: tuple[Call, Call]) -> Any:
    """A step's three kernels as one function of arrays; it is traced again for every length of the tails.

    Whatever is a layer's own comes in by its arrays: caches share the function, and it must keep no planes alive.
    """
    sizes_of_join = join_sizes(plan.k_dim, plan.v_dim)
    shared = [plan.constants.get(name, nothing(mx.float16)) for name in ATTENTION.inputs]

    def step(
        tails: tuple[mx.array, mx.array],
        new: tuple[mx.array, mx.array],
        q: mx.array,
        positions: tuple[mx.array, mx.array],
        sinks: mx.array,
        of_layer: list[mx.array],
    ) -> tuple[mx.array, ...]:
        rows = join_with(launcher, tails, new, sizes_of_join, positions[0])
        filled = shared.copy()
        for place, array in zip(_PLACES_OF_LAYER, of_layer, strict=True):
            filled[place] = array
        sizes = of_layer[_OF_LAYER.index("sizes")]
        return answer_with(calls, filled, q, rows, positions[1], (plan.v_signs, sinks, sizes)), *rows

    return launcher.compiled(step)


def _is_own_page(side: SideView, own_start: int, end: int) -> bool:
    """Whether a side's rows are those of the step's page and nothing else: all that changes from step to step."""
    return not side.codec.is_float and side.rows_start == own_start and side.rows.shape[1] == end - own_start


def _as_held(side: SideView) -> mx.array:
    """A side's rows in the order in which they lie in memory."""
    return side.rows.swapaxes(0, 1) if side.codec.is_float else side.rows


def _prepare(
    launcher: Launcher,
    q: mx.array,
    k: SideView,
    v: SideView,
    own: tuple[int, int] | None,
    n_seen: int,
    scale: float,
    window: int | None,
    with_sinks: bool,
) -> _Prepared:
    """own: where the rows' page starts, and the position after the last row; None for tails of a page's length. n_seen:
    whole pages that some row sees."""
    _, n_heads, n_rows, _ = q.shape
    n_kv_heads = k.rows.shape[0]
    plan = _plan(launcher, q, k, v, scale, with_sinks)
    n_prefix = prefix_length(k, v)
    n_coded = plan.n_coded(launcher.family, max(0, n_seen), n_kv_heads)
    own_k, own_v = (_own_rows(side, *(own or (side.rows_start, side.rows_start))) for side in (k, v))
    prefix_k, prefix_v = (_prefix_rows(side, n_prefix) for side in (k, v))
    held = max(k.first_page, v.first_page)
    own_numbers = (n_heads // n_kv_heads, n_rows, n_coded, n_prefix, window or 0, held)
    places = (n for rows, prefix in ((own_k, prefix_k), (own_v, prefix_v)) for n in _places(rows, prefix))
    numbers = *own_numbers, k.first_page, v.first_page, *places
    k_codes, k_scales = _planes(k)
    v_codes, v_scales = _planes(v)
    inputs = {
        **plan.constants,
        "k_codes": k_codes,
        "k_scales": k_scales,
        "v_codes": v_codes,
        "v_scales": v_scales,
        "page_means": given(k.page_means, mx.float16),
        "channel_scale": given(k.channel_scale, mx.float32),
        "k_prefix": prefix_k.array,
        "v_prefix": prefix_v.array,
        "sizes": sizes_array(*numbers),
    }
    gap = nothing(mx.float16)
    calls = calls_for(launcher, plan, n_rows, n_coded, (n_kv_heads, n_heads), q.dtype)
    return _Prepared(v, plan, calls, [inputs.get(name, gap) for name in ATTENTION.inputs], inputs["sizes"])


def _plan(launcher: Launcher, q: mx.array, k: SideView, v: SideView, scale: float, with_sinks: bool) -> Plan:
    n_columns = q.shape[1] // k.rows.shape[0] * q.shape[2]
    balance = k.page_means is not None, k.channel_scale is not None
    return plan_for(launcher.family, k.codec, v.codec, n_columns, scale, *balance, with_sinks, v.tiled, q.dtype)


def _planes(side: SideView) -> tuple[mx.array, mx.array]:
    """Codes and scales of whole pages; a float side's rows, token by token as they are held."""
    if side.codec.is_float:
        return side.rows.swapaxes(0, 1), nothing(mx.float16)
    return given(side.codes, mx.uint8), given(side.scales, mx.float16)


def _own_rows(side: SideView, own_start: int, end: int) -> _Float:
    n_kv_heads, n_rows, head_dim = side.rows.shape
    first = own_start - side.rows_start
    if side.codec.is_float:
        return _Float(side.rows.swapaxes(0, 1), n_kv_heads * head_dim, head_dim, first * n_kv_heads * head_dim)
    # 0: the own page's rows up to the last query's and nothing else, whose number the kernel knows
    from_head_to_head = 0 if first == 0 and n_rows == end - own_start else n_rows * head_dim
    return _Float(side.rows, head_dim, from_head_to_head, first * head_dim)


def _prefix_rows(side: SideView, n_prefix: int) -> _Float:
    if not n_prefix:
        return _Float(nothing(mx.float16), 0, 0, 0)
    if side.prefix is None:
        rows = _own_rows(side, 0, 0)
        return _Float(rows.array, rows.token, rows.head, 0)
    _, n_rows, head_dim = side.prefix.shape
    return _Float(side.prefix, head_dim, n_rows * head_dim, 0)


def _places(own: _Float, prefix: _Float) -> tuple[int, ...]:
    """As the entries of ATTENTION.sizes name them."""
    return own.token, prefix.token, own.head, prefix.head, own.start, prefix.start
