"""Block caches of several sequences that are evaluated together, in mlx-lm's protocol for batches.

Every sequence keeps its own length, pages and tail, and encodes as it would alone; padded columns are never stored.
Knows nothing of how one sequence is held: that is `BlockKVCache`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.batch_step import BatchStep, Columns

if TYPE_CHECKING:
    from tqgguf.runtime.cache.kv_cache import BlockKVCache


@dataclass
class _Member:
    """A sequence of a batch. cache: its own, which counts for itself. usage: of the cache that it came from."""

    cache: BlockKVCache
    usage: hook.Usage

    @classmethod
    def of(cls, cache: BlockKVCache) -> _Member:
        copy = cache.copy()
        copy.usage = replace(cache.usage, by_fallback=0, unattended=set())
        return cls(copy, cache.usage)

    def settle(self) -> None:
        """Add what was counted to where the sequence came from."""
        self.usage.by_fallback += self.cache.usage.by_fallback
        self.cache.usage.by_fallback = 0

    def extracted(self) -> BlockKVCache:
        self.settle()
        made = self.cache.copy()
        made.usage = self.usage
        return made


class BatchBlockKVCache(_BaseCache):
    """One layer's `BlockKVCache` of several sequences, as their `merge` makes it. Its own are copies.

    RequestError: caches of different layers, types or windows.
    """

    def __init__(self, caches: Sequence[BlockKVCache]) -> None:
        settings = {cache.settings for cache in caches}
        if len(settings) != 1:
            raise RequestError(f"a batch takes block caches of one layer and of the same types, found {len(settings)}")
        self._members = [_Member.of(cache) for cache in caches]
        self._layer, self._window = caches[0].layer, caches[0].window
        self._start()

    def _start(self) -> None:
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
        after its next `lengths` tokens, until `finalize`. ValueError: left padding of sequences that hold tokens, or
        right padding without lengths."""
        if left_padding is not None:
            if not self.empty():
                raise ValueError("left padding can only be added to an empty batch of block caches")
            self._left = [held + int(n) for held, n in zip(self._left, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right padding of block caches needs the lengths of the sequences")
            self._to_come = [int(n) for n in lengths]

    def finalize(self) -> None:
        """The right padding is through."""
        self._to_come = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[hook.LazyKV, hook.LazyKV]:
        """Add keys [sequences, n_kv_heads, columns, head_dim] and values; returns `LazyKV` arrays of everything held.

        Errors as `BlockKVCache.update`. A batch that raised is as it was.
        """
        if not isinstance(keys, mx.array) or keys.ndim != 4 or len(keys) != len(self._members):
            found = keys.shape if isinstance(keys, mx.array) else type(keys).__name__
            raise RequestError(
                f"layer {self._layer}: expected rows of {len(self._members)} sequences [sequences, n_kv_heads, "
                f"columns, head_dim], found {found}"
            )
        n_columns = keys.shape[2]
        columns = self._columns(n_columns)
        most, left = self._padding()
        before = [member.cache.copy() for member in self._members]
        try:
            parts = [
                member.cache.update_and_fetch(*(rows[i : i + 1, :, lo:hi] for rows in (keys, values)))
                if lo < hi
                else None
                for i, (member, (lo, hi)) in enumerate(zip(self._members, columns, strict=True))
            ]
        except Exception:
            for member, cache in zip(self._members, before, strict=True):
                member.cache = cache
            raise
        steps = [None if part is None else part[0].step for part in parts]
        step = BatchStep(steps, columns, n_columns, self._layer, self._members[0].cache.usage)
        fetched = []
        for side, new in enumerate((keys, values)):
            aligned = [
                _aligned(None if part is None else part[side], new, most + n_columns, at)
                for part, at in zip(parts, left, strict=True)
            ]
            lazy = hook.LazyKV(mx.concatenate(aligned))
            lazy.step = step  # type: ignore[assignment]  # it stands for one
            fetched.append(lazy)
        self._take(columns, n_columns)
        return fetched[0], fetched[1]

    def _columns(self, n: int) -> list[Columns]:
        """Which of the next n columns are a sequence's own."""
        ends = [n] * len(self._left) if self._to_come is None else self._to_come
        return [(min(n, left), min(n, left + end)) for left, end in zip(self._left, ends, strict=True)]

    def _take(self, columns: list[Columns], n: int) -> None:
        self._left = [left - min(n, left) for left in self._left]
        if self._to_come is not None:
            self._to_come = [end - (hi - lo) for end, (lo, hi) in zip(self._to_come, columns, strict=True)]

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keep these sequences only, in this order."""
        keep = [int(i) for i in batch_indices]
        for member in self._members:
            member.settle()
        self._members = [self._members[i] for i in keep]
        self._left = [self._left[i] for i in keep]
        if self._to_come is not None:
            self._to_come = [self._to_come[i] for i in keep]

    def extend(self, other: BatchBlockKVCache) -> None:
        """Add another batch's sequences after these. ValueError: one of them is amid padding."""
        if self._to_come is not None or other._to_come is not None:
            raise ValueError("a batch of block caches cannot be extended before its right padding is through")
        for member in other._members:
            member.settle()
        self._members += [_Member.of(member.extracted()) for member in other._members]
        self._left += other._left

    def extract(self, idx: int) -> BlockKVCache:
        """The cache of one sequence, as it would be had it run alone."""
        return self._members[idx].extracted()

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchBlockKVCache:
        """The same sequences; they count where these do."""
        made = BatchBlockKVCache([member.extracted() for member in self._members])
        made._left = list(self._left)
        made._to_come = None if self._to_come is None else list(self._to_come)
        return made

    def size(self) -> int:
        return max(member.cache.offset for member in self._members)

    def empty(self) -> bool:
        return all(member.cache.empty() for member in self._members)

    def is_trimmable(self) -> bool:
        return all(member.cache.is_trimmable() for member in self._members)

    def trim(self, n: int) -> int:
        """Remove the last n tokens of every sequence (all of shorter ones); returns how many of the longest were."""
        return max([member.cache.trim(n) for member in self._members])

    @property
    def nbytes(self) -> int:
        return sum(member.cache.nbytes for member in self._members)

    @property
    def state(self) -> list[Any]:
        """Every sequence's state: what mlx-lm evaluates. `extract` is what can be saved and restored."""
        return [member.cache.state for member in self._members]


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
