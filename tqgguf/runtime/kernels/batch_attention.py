"""Decode attention of a few rows of several sequences at once, each with its own length, from one pool of pages.

Knows nothing of how a cache fills the pool or chooses its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.kernels.decode_plan import ATTENTION, PAGE, Plan, answer_with, calls_for, given_sinks, plan_for
from tqgguf.runtime.kernels.launch import Call, Launcher, sizes_array
from tqgguf.runtime.kernels.pages import join_in_batch, join_sizes
from tqgguf.runtime.kernels.types import given, is_supported, nothing


@dataclass(frozen=True, eq=False)
class PooledSide:
    """K or V of one layer for a batch of sequences, but for their own pages.

    codes/scales: planes [slots, n_kv_heads, PAGE, ...] of whole pages, anybody's; None while there are none. prefix:
    f16 [sequences, n_kv_heads, n_prefix, head_dim], read of sequences that have a whole page; None without an exact
    prefix. page_means: f16 [slots, n_kv_heads, head_dim], or None. channel_scale: f32 [sequences, n_kv_heads,
    head_dim], or None. tiled: as `SideView`'s.
    """

    codec: Codec
    codes: mx.array | None
    scales: mx.array | None
    prefix: mx.array | None = None
    page_means: mx.array | None = None
    channel_scale: mx.array | None = None
    tiled: bool = False


@dataclass(frozen=True, eq=False)
class BatchPages:
    """The whole pages of a batch. slots: for each sequence, where its pages from page 0 on lie in the planes of both
    sides; pages that no query can see any more may name any slot."""

    k: PooledSide
    v: PooledSide
    slots: Sequence[Sequence[int]]
    kept: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    """What steps over the same pages share."""


_COLUMN_STEP = 32  # columns of a page table come so many at a time: compiled steps are made anew for every size


def refusal_of(k: Codec, v: Codec) -> str | None:
    """Why the kernels cannot read a batch of these types, if they cannot: it goes sequence by sequence then."""
    for name, codec in (("K", k), ("V", v)):
        if codec.is_float:
            return f"{name} is {codec.cache_type}: batches are read from blocks on both sides"
        if not is_supported(codec):
            return f"{name} is {codec.cache_type} with head size {codec.head_dim}: the kernels do not read it"
    return None


def attend_batch(
    launcher: Launcher,
    q: mx.array,
    tails: tuple[mx.array, mx.array],
    pages: BatchPages,
    *,
    offsets: Sequence[int],
    n_own: Sequence[int] | None = None,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of a batch: q [sequences, n_heads, rows, head_dim], those of one at positions from its offset on.

    A sequence's rows share one page; the whole pages before it are in `pages`, and its rows, with this step's, begin
    its tail: K's and V's f16 [sequences, n_kv_heads, PAGE, head_dim]. n_own: how many of the rows are each sequence's
    own, all by default; answers of the others mean nothing. window, sinks: as `attend.attend` has them. RequestError:
    types that `refusal_of` names. Returns [sequences, n_heads, rows, head_dim of v] in q's dtype.
    """
    made = _prepared(launcher, q, tails, pages, scale, window, sinks is not None)
    position = _positions(q, offsets, n_own)
    return _answer(made.calls, made.inputs, q, tails, position, given_sinks(sinks), made.plan.v_signs)


def grow_and_attend_batch(
    launcher: Launcher,
    q: mx.array,
    tails: tuple[mx.array, mx.array],
    new: tuple[mx.array, mx.array],
    pages: BatchPages,
    *,
    offsets: Sequence[int],
    n_own: Sequence[int] | None = None,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`join_in_batch` of new K and V [sequences, n_kv_heads, rows, head_dim] to the tails, and `attend_batch` from the
    outcome: one compiled function, which layers share. Returns what both return: the answer, tails of K, tails of V."""
    made = _prepared(launcher, q, tails, pages, scale, window, sinks is not None)
    step = _compiled_step(launcher, made.plan, made.calls, q.shape[2], tails[0].shape[1])
    position = _positions(q, offsets, n_own)
    out, k_tails, v_tails = step(tails, new, q, position, given_sinks(sinks), made.inputs, made.plan.v_signs)
    return out, k_tails, v_tails


@lru_cache(maxsize=16)
def _compiled_step(launcher: Launcher, plan: Plan, calls: tuple[Call, Call], n_rows: int, n_kv_heads: int) -> Any:
    sizes = join_sizes(plan.k_dim, plan.v_dim, PAGE, n_rows, n_kv_heads)

    def step(
        tails: tuple[mx.array, mx.array],
        new: tuple[mx.array, mx.array],
        q: mx.array,
        position: mx.array,
        sinks: mx.array,
        inputs: list[mx.array],
        v_signs: mx.array,  # an input too: what is among the inputs (K's signs may be the same) cannot be a constant
    ) -> tuple[mx.array, ...]:
        joined = join_in_batch(launcher, tails, new, position, sizes)
        return _answer(calls, inputs, q, joined, position, sinks, v_signs), *joined

    return launcher.compiled(step)


def _answer(
    calls: tuple[Call, Call],
    inputs: list[mx.array],
    q: mx.array,
    tails: tuple[mx.array, mx.array],
    position: mx.array,
    sinks: mx.array,
    v_signs: mx.array,
) -> mx.array:
    return answer_with(calls, inputs, q, tails, position, (v_signs, sinks, inputs[_SIZES]))


_SIZES = ATTENTION.inputs.index("sizes")


class _Prepared(NamedTuple):
    """All of a step but its queries and tails. inputs: of attention, with gaps for those."""

    plan: Plan
    calls: tuple[Call, Call]
    inputs: list[mx.array]


def _prepared(
    launcher: Launcher,
    q: mx.array,
    tails: tuple[mx.array, mx.array],
    pages: BatchPages,
    scale: float,
    window: int | None,
    with_sinks: bool,
) -> _Prepared:
    key = q.shape[1], q.shape[2], q.dtype, scale, window, with_sinks
    made: _Prepared | None = pages.kept.get(key)
    if made is None:
        made = pages.kept[key] = _prepare(launcher, q, tails[0].shape[1], pages, scale, window, with_sinks)
    return made


def join_batch(
    launcher: Launcher,
    tails: tuple[mx.array, mx.array],
    new: tuple[mx.array, mx.array],
    offsets: Sequence[int],
    n_own: Sequence[int],
) -> tuple[mx.array, mx.array]:
    """`join_in_batch` alone, for rows that nobody attends from."""
    _, n_kv_heads, n_rows, k_dim = new[0].shape
    sizes = join_sizes(k_dim, new[1].shape[3], PAGE, n_rows, n_kv_heads)
    return join_in_batch(launcher, tails, new, batch_positions(tuple(offsets), tuple(n_own)), sizes)


def _positions(q: mx.array, offsets: Sequence[int], n_own: Sequence[int] | None) -> mx.array:
    return batch_positions(tuple(offsets), (q.shape[2],) * q.shape[0] if n_own is None else tuple(n_own))


def _prepare(
    launcher: Launcher,
    q: mx.array,
    n_kv_heads: int,
    pages: BatchPages,
    scale: float,
    window: int | None,
    with_sinks: bool,
) -> _Prepared:
    k, v = pages.k, pages.v
    reason = refusal_of(k.codec, v.codec)
    if reason is not None:
        raise RequestError(f"a batch cannot be read by the kernels: {reason}")
    n_sequences, n_heads, n_rows, _ = q.shape
    group_size = n_heads // n_kv_heads
    balance = k.page_means is not None, k.channel_scale is not None
    codecs, n_columns = (k.codec, v.codec), group_size * n_rows
    plan = plan_for(launcher.family, *codecs, n_columns, scale, *balance, with_sinks, v.tiled, q.dtype, batched=True)
    longest = max(map(len, pages.slots))
    columns = -(-longest // _COLUMN_STEP) * _COLUMN_STEP
    most_seen = longest if window is None else min(longest, (window + PAGE - 2) // PAGE)
    n_coded = plan.n_coded(launcher.family, most_seen, n_sequences * n_kv_heads, n_beside=0)
    n_prefix = 0 if k.prefix is None else k.prefix.shape[2]
    numbers = {
        **{"group_size": group_size, "n_rows": n_rows, "n_coded": n_coded, "n_prefix": n_prefix},
        **{"window": window or 0, "n_kv_heads": n_kv_heads, "table_columns": columns},
    }
    for name, dim in (("k", plan.k_dim), ("v", plan.v_dim)):
        numbers |= {f"{name}_token": dim, f"{name}_head": PAGE * dim}
        numbers |= {f"{name}_token_of_prefix": dim, f"{name}_head_of_prefix": n_prefix * dim}
    slots = chain.from_iterable((*of, *[0] * (columns - len(of))) for of in pages.slots)
    inputs = {
        **plan.constants,
        **{f"{name}_codes": given(side.codes, mx.uint8) for name, side in (("k", k), ("v", v))},
        **{f"{name}_scales": given(side.scales, mx.float16) for name, side in (("k", k), ("v", v))},
        "page_means": given(k.page_means, mx.float16),
        "channel_scale": given(k.channel_scale, mx.float32),
        "k_prefix": given(k.prefix, mx.float16),
        "v_prefix": given(v.prefix, mx.float16),
        "sizes": sizes_array(*(numbers.get(name, 0) for name in ATTENTION.sizes[:-1]), *slots),
    }
    gap = nothing(mx.float16)
    calls = calls_for(launcher, plan, n_rows, n_coded, (n_kv_heads, n_heads), q.dtype, n_sequences)
    return _Prepared(plan, calls, [inputs.get(name, gap) for name in ATTENTION.inputs])


@lru_cache(maxsize=4)
def batch_positions(offsets: tuple[int, ...], n_own: tuple[int, ...]) -> mx.array:
    """int32, at least 8: for each sequence the first query's position, and how many rows are its own. Layers share
    it."""
    pairs = [*chain.from_iterable(zip(offsets, n_own, strict=True))]
    return mx.array(np.array(pairs + [0] * (8 - len(pairs)), np.int32))
