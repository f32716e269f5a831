"""Block caches of several sequences that are evaluated together, in mlx-lm's protocol for batches.

Every sequence keeps its own length, pages and tail, and encodes as it would alone; padded columns are never stored.
Each is a `BlockKVCache`, until a step of few rows comes that the backend answers for all at once: then they move into a
`PagePool`, and back for whatever else is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.pooled_values import pooled_values
from tqgguf.runtime.attention.reads import Usage, n_reads
from tqgguf.runtime.attention.steps import BatchStep, Columns, PooledStep
from tqgguf.runtime.cache.alike import check_alike, shape_of
from tqgguf.runtime.cache.sequence_cache import SequenceCache
from tqgguf.runtime.kv.page_pool import PagePool
from tqgguf.runtime.kv.pages import PAGE, ROLLBACK_TOKENS, cuts
from tqgguf.runtime.kv.settings import is_whole


@dataclass
class _Member:
    """A sequence of a batch. cache: its own, which counts for itself. usage: of the cache that it came from."""

    cache: SequenceCache
    usage: Usage

    @classmethod
    def of(cls, cache: SequenceCache) -> _Member:
        copy = cache.copy()
        copy.usage = replace(cache.usage, by_fallback=0, unattended=set())
        return cls(copy, cache.usage)

    def settle(self) -> None:
        """Add what was counted to where the sequence came from."""
        self.usage.by_fallback += self.cache.usage.by_fallback
        self.cache.usage.by_fallback = 0

    def count(self, pool: PagePool, lo: int, attended: int) -> None:
        """Count the steps in a pool whose rows stand from position lo on: attended from before `attended`, or not."""
        cache, (k, v) = self.cache, pool.kinds
        for first, end in pairwise(cuts(lo, attended)):
            cache.usage.reads.count_page(first, end, k.codec, v.codec, cache.window, k.n_prefix)
        if attended < cache.offset:
            cache.usage.by_fallback += n_reads(attended, cache.offset - attended, cache.window)
            cache.usage.unattended.add(cache.layer)


class BatchBlockKVCache(_BaseCache):
    """One layer's `BlockKVCache` of several sequences, as their `merge` makes it. Its own are copies.

    RequestError: caches of different layers, types or windows.
    """

    def __init__(self, caches: Sequence[SequenceCache]) -> None:
        check_alike(caches, [shape for cache in caches if (shape := shape_of(cache)) is not None])
        self._members = [_Member.of(cache) for cache in caches]
        self._layer, self._window = caches[0].layer, caches[0].window
        self._pool: PagePool | None = None
        """Has the rows of all, which the members' caches then only count."""
        self._last: PooledStep | None = None
        self._counted = [0] * len(self._members)
        """Positions up to which reads from the pool have been counted."""
        self._left = [0] * len(self._members)
        """Columns of left padding that are still to come, by sequence."""
        self._to_come: list[int] | None = None
        """Tokens that are still to come before a sequence's right padding; None without any."""

    @property
    def offset(self) -> mx.array:
        """int32 [sequences]: the position of each one's next column."""
        offsets = (m.cache.offset - left for m, left in zip(self._members, self._left, strict=True))
        return _int32(tuple(offsets))

    @property
    def left_padding(self) -> mx.array:
        """int32 [sequences]: columns before each one's first key, as masks have them."""
        return _int32(tuple(self._padding()[1]))

    def _padding(self) -> tuple[int, list[int]]:
        """Columns of keys before the next step's own, and how many of all columns are padding, by sequence."""
        held = [member.cache.n_visible for member in self._members]
        most = max(held)
        return most, [most - n + left for n, left in zip(held, self._left, strict=True)]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> hook.CausalMask:
        """bool [sequences, 1, n, keys + n] for the next n columns; padding is not seen."""
        window = self._window or window_size
        most, left = self._padding()
        mask = hook.CausalMask(create_causal_mask(n, most, window_size=window, left_padding=_int32(tuple(left))))
        mask.window = window
        return mask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Tell what of the next columns is padding: left_padding before the first token of each sequence, or everything
        after its next `lengths` tokens, until `finalize`. ValueError: not a number >= 0 for every sequence, left
        padding of sequences that hold tokens, or right padding without lengths; nothing changes then."""
        left, to_come, right = (
            self._numbers(name, given)
            for name, given in (("left_padding", left_padding), ("lengths", lengths), ("right_padding", right_padding))
        )
        if left is not None and not self.empty():
            raise ValueError("left padding can only be added to an empty batch of block caches")
        is_padded = right is not None and any(right)
        if is_padded and to_come is None:
            raise ValueError("right padding of block caches needs the lengths of the sequences")
        if left is not None:
            self._left = [held + n for held, n in zip(self._left, left, strict=True)]
        if is_padded:
            self._to_come = to_come

    def _numbers(self, name: str, given: Sequence[int] | None) -> list[int] | None:
        if given is None:
            return None
        numbers, n_sequences = _entries(given), len(self._members)
        if len(numbers) != n_sequences or not all(is_whole(n) and n >= 0 for n in numbers):
            raise ValueError(f"{name}: expected {n_sequences} numbers >= 0, one for each sequence, found {numbers}")
        return numbers

    def finalize(self) -> None:
        """The right padding is through."""
        self._to_come = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[hook.LazyKV, hook.LazyKV]:
        """Add keys [sequences, n_kv_heads, columns, head_dim] and values; returns `LazyKV` arrays of everything held.

        Errors as `BlockKVCache.update`. A batch that raised is as it was.
        """
        shapes = [rows.shape if isinstance(rows, mx.array) else type(rows).__name__ for rows in (keys, values)]
        of_k, of_v = (shape[:3] if isinstance(shape, tuple) and len(shape) == 4 else None for shape in shapes)
        if of_k is None or of_k != of_v or of_k[0] != len(self._members):
            raise RequestError(
                f"layer {self._layer}: expected K and V of {len(self._members)} sequences [sequences, n_kv_heads, "
                f"columns, head_dim], of as many heads and columns, found {shapes[0]} and {shapes[1]}"
            )
        n_columns = keys.shape[2]
        columns = self._columns(n_columns)
        fetched = self._grow_pool(keys, values, columns)
        if fetched is None:
            self._leave_pool()
            fetched = self._append(keys, values, columns)
        return fetched

    def _append(self, keys: mx.array, values: mx.array, columns: Sequence[Columns]) -> tuple[hook.LazyKV, hook.LazyKV]:
        """`update_and_fetch` sequence by sequence."""
        n_columns = keys.shape[2]
        most, left = self._padding()
        grown = [replace(member, cache=member.cache.copy()) for member in self._members]
        usages = [member.cache.usage for member in grown]
        counted = [(usage.by_fallback, set(usage.unattended)) for usage in usages]
        try:
            parts = [
                member.cache.update_and_fetch(*(rows[i : i + 1, :, lo:hi] for rows in (keys, values)))
                if lo < hi
                else None
                for i, (member, (lo, hi)) in enumerate(zip(grown, columns, strict=True))
            ]
            steps: list[Any] = [None if part is None else part[0].step for part in parts]
            first = self._members[0].cache
            step = BatchStep(self._layer, n_columns, self._window, first.backend, first.usage, steps, columns)
            fetched = []
            for side, new in enumerate((keys, values)):
                aligned = [
                    _aligned(None if part is None else part[side], new, most + n_columns, at)
                    for part, at in zip(parts, left, strict=True)
                ]
                fetched.append(hook.LazyKV.of(mx.concatenate(aligned), step))
        except BaseException:
            for usage, (by_fallback, unattended) in zip(usages, counted, strict=True):
                usage.by_fallback, usage.unattended = by_fallback, unattended
            raise
        self.__dict__.update(_members=grown, **self._taken(columns, n_columns))  # all or none, whatever interrupts this
        return fetched[0], fetched[1]

    def _grow_pool(
        self, keys: mx.array, values: mx.array, columns: Sequence[Columns]
    ) -> tuple[hook.LazyKV, hook.LazyKV] | None:
        """`update_and_fetch` for all at once, or None: the rows must go sequence by sequence."""
        n_own, backend = [hi - lo for lo, hi in columns], self._members[0].cache.backend
        if any(self._left) or (self._last is not None and not self._last.is_attended):
            return None
        pool = self._pool or self._enter_pool(backend, keys.shape[2])
        if pool is None or not pool.can_grow(n_own) or not pool.fits((keys, values)):
            return None
        if not backend.answers_batches(pool.kinds[0].codec, pool.kinds[1].codec, keys.shape[2]):
            return None
        self._last = None  # it holds planes, which would be copied when they are written
        pool.settle()
        usage, n_columns = self._members[0].cache.usage, keys.shape[2]
        try:
            pages, growth = pool.pages, pool.grow((keys, values), n_own)
            step = PooledStep(self._layer, n_columns, self._window, backend, usage, pool, pages, growth)
            firsts = [(member.cache.offset - member.cache.n_visible) // PAGE for member in self._members]
            k, v = (
                hook.LazyKV.of(pooled_values(backend, pages, growth, side, firsts, growth.new[side].dtype), step)
                for side in (0, 1)
            )
            self._follow(pool)
            self.__dict__.update(_last=step, **self._taken(columns, n_columns))
        except BaseException:
            pool.cancel()
            self._follow(pool)
            raise
        return k, v

    def _follow(self, pool: PagePool) -> None:
        for member, offset in zip(self._members, pool.offsets, strict=True):
            member.cache.offset = offset

    def _enter_pool(self, backend: Backend, n_rows: int) -> PagePool | None:
        """Move the sequences into a pool, if that can be done."""
        caches = [member.cache for member in self._members]
        sides = [cache.poolable_sides for cache in caches]
        pairs = [of for of in sides if of is not None]
        if len(pairs) < len(sides) or len({(k.codec, v.codec, k.n_heads, v.n_heads) for k, v in pairs}) > 1:
            return None
        if not backend.answers_batches(pairs[0][0].codec, pairs[0][1].codec, n_rows):
            return None
        window = None if any(cache.keeps_pages for cache in caches) else self._window
        self._counted = [cache.offset for cache in caches]
        n_back = ROLLBACK_TOKENS if caches[0].settings.rolls_back else 0
        self._pool = PagePool(pairs, self._counted, window, backend, n_back)
        for member in self._members:
            member.cache.sides = None
        return self._pool

    def _leave_pool(self) -> None:
        if self._pool is not None:
            self._count()
            for i, member in enumerate(self._members):
                member.cache.hold(self._pool.sides_of(i))
            self._pool = self._last = None

    def _count(self) -> None:
        """Count what has been read from the pool since that was done last."""
        if self._pool is None:
            return
        last = self._last
        for i, (member, lo) in enumerate(zip(self._members, self._counted, strict=True)):
            if last is None or last.is_attended:
                member.cache.usage.unattended.discard(self._layer)  # from when it was asked for too early
                member.count(self._pool, lo, member.cache.offset)
            elif lo < member.cache.offset:  # otherwise counted before, and perhaps of another order
                member.count(self._pool, lo, last.growth.offsets[i])
        self._counted = [member.cache.offset for member in self._members]
        if last is not None and last.is_attended:
            self._last = None

    def _columns(self, n: int) -> list[Columns]:
        """Which of the next n columns are a sequence's own."""
        ends = [n] * len(self._left) if self._to_come is None else self._to_come
        return [(min(n, left), min(n, left + end)) for left, end in zip(self._left, ends, strict=True)]

    def _taken(self, columns: Sequence[Columns], n: int) -> dict[str, Any]:
        """What there is of padding after n columns, by attribute."""
        left, to_come = [left - min(n, left) for left in self._left], self._to_come
        if to_come is not None:
            to_come = [end - (hi - lo) for end, (lo, hi) in zip(to_come, columns, strict=True)]
        return {"_left": left, "_to_come": to_come}

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keep these sequences only, in this order; negative indices count from the end. RequestError: an index that
        there is not, one twice, or none at all."""
        given, n = _entries(batch_indices), len(self._members)
        keep = [i % n for i in given if is_whole(i) and -n <= i < n]
        if not keep or len(keep) < len(given) or len(set(keep)) < len(keep):
            raise RequestError(f"filter: expected at least one, and different indices of {n} sequences, found {given}")
        self._count()
        for member in self._members:
            member.settle()
        changed: dict[str, Any] = {name: [getattr(self, name)[i] for i in keep] for name in ("_members", "_left")}
        if self._to_come is not None:
            changed["_to_come"] = [self._to_come[i] for i in keep]
        if self._pool is not None:
            self._pool.settle()
            pool = changed["_pool"] = copy(self._pool)  # steps of before have the other one
            pool.select(keep)
            changed["_counted"] = [self._counted[i] for i in keep]
        self.__dict__.update(changed)  # all or nothing, whatever interrupts this

    def extend(self, other: BatchBlockKVCache) -> None:
        """Add another batch's sequences after these. ValueError: one of them is amid padding; RequestError: caches
        that could not have been merged."""
        if not isinstance(other, BatchBlockKVCache):
            raise RequestError(f"extend: expected a batch of block caches, found {type(other).__name__}")
        if self._to_come is not None or other._to_come is not None:
            raise ValueError("a batch of block caches cannot be extended before its right padding is through")
        caches = [member.cache for member in (*self._members, *other._members)]
        check_alike(caches, [*self._shapes(), *other._shapes()])
        added = [_Member.of(other.extract(i)) for i in range(len(other._members))]
        self._leave_pool()
        self.__dict__.update(_members=[*self._members, *added], _left=[*self._left, *other._left])

    def _shapes(self) -> list[tuple[int, ...]]:
        """What `shape_of` has of the sequences that hold tokens."""
        if self._pool is not None:
            k, v = self._pool.tails
            return [(*k.shape[1::2], *v.shape[1::2])]
        return [shape for member in self._members if (shape := shape_of(member.cache)) is not None]

    def extract(self, idx: int) -> SequenceCache:
        """The cache of one sequence, as it would be had it run alone."""
        member = self._members[idx]
        self._count()
        member.settle()
        made = member.cache.copy()
        if self._pool is not None:
            made.hold(self._pool.sides_of(idx))
        made.usage = member.usage
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchBlockKVCache:
        """The same sequences; they count where these do."""
        made = BatchBlockKVCache([self.extract(i) for i in range(len(self._members))])
        made._left = list(self._left)
        made._to_come = None if self._to_come is None else list(self._to_come)
        return made

    def __copy__(self) -> BatchBlockKVCache:
        """The same: sequences that two batches share could not grow apart."""
        return self.__deepcopy__({})

    def __repr__(self) -> str:
        lengths = ", ".join(str(member.cache.offset) for member in self._members)
        return f"{type(self).__name__}({self._members[0].cache.description}, tokens: {lengths}, {self.nbytes:,} bytes)"

    def size(self) -> int:
        return max(member.cache.offset for member in self._members)

    def empty(self) -> bool:
        return self._pool is None and all(member.cache.empty() for member in self._members)

    def is_trimmable(self) -> bool:
        """As `BlockKVCache.is_trimmable`, of every sequence."""
        if not self._members[0].cache.settings.rolls_back:
            self._leave_pool()
        return all(member.cache.is_trimmable() for member in self._members)

    def trim(self, n: int) -> int:
        """Remove the last n tokens of every sequence (all of shorter ones); returns how many of the longest were.
        Errors as `BlockKVCache.trim`; nothing is removed then."""
        self._leave_pool()
        trimmed = [replace(member, cache=member.cache.copy()) for member in self._members]
        removed = max([member.cache.trim(n) for member in trimmed])
        self._members = trimmed
        return removed

    @property
    def nbytes(self) -> int:
        return sum(member.cache.nbytes for member in self._members) if self._pool is None else self._pool.nbytes

    @property
    def state(self) -> list[Any]:
        """Every sequence's state: what mlx-lm evaluates. `extract` is what can be saved and restored."""
        return [self.extract(i).state for i in range(len(self._members))]


def _entries(given: Any) -> list[Any]:
    """Of a list, or of an array of MLX or numpy, as Python's."""
    return [entry.tolist() if hasattr(entry, "tolist") else entry for entry in given]


@lru_cache(maxsize=8)
def _int32(numbers: tuple[int, ...]) -> mx.array:
    """Layers share the numbers of a step."""
    return mx.array(numbers, dtype=mx.int32)


def _aligned(rows: mx.array | None, new: mx.array, width: int, left: int) -> mx.array:
    """One sequence's rows [1, n_kv_heads, width, head_dim] from column `left` on, zeros around them."""
    if rows is None:
        return mx.zeros((1, new.shape[1], width, new.shape[3]), dtype=new.dtype)
    right = width - left - rows.shape[2]
    return rows if left == right == 0 else mx.pad(rows, [(0, 0), (0, 0), (left, right), (0, 0)])
