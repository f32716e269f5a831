"""Several sequences' K and V of one layer in arrays that one kernel reads: a pool of whole pages, and tails of a page's
length.

Pages fill as `BlockSide` fills them, by it. Knows nothing of queries, masks or mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from tqgguf.runtime.kernels.batch_attention import BatchPages, PooledSide
from tqgguf.runtime.kv.balance import ChannelScale
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.side_view import PAGE, first_seen_page
from tqgguf.runtime.kv.sides import BlockSide

Pair = tuple[mx.array, mx.array]
"""Of K and V."""


class BatchJoiner(Protocol):
    """The part of a backend's reading that joins rows to the tails of a batch."""

    def join_batch(self, tails: Pair, new: Pair, offsets: Sequence[int], n_own: Sequence[int]) -> Pair:
        """Tails f16 [sequences, n_kv_heads, PAGE, head_dim] with each sequence's own rows of [sequences, n_kv_heads,
        rows, head_dim] where they stand."""


@dataclass(eq=False)
class PoolGrowth:
    """New rows of a step, `n_own` of each sequence at positions from `offsets` on, before they are joined to `tails`;
    `joined` has the tails after that. pages: the whole pages before them."""

    pages: BatchPages
    offsets: tuple[int, ...]
    n_own: tuple[int, ...]
    tails: Pair
    new: Pair
    joined: Pair | None = None


class PagePool:
    """sides: of every sequence, with rows, without pages that wait; offsets: the tokens that they hold. window: pages
    that no later query sees through it are given up; None: all stay."""

    def __init__(
        self,
        sides: Sequence[tuple[BlockSide, BlockSide]],
        offsets: Sequence[int],
        window: int | None,
        joiner: BatchJoiner,
    ) -> None:
        self.kinds = _without_rows(sides[0][0]), _without_rows(sides[0][1])
        """A side of K and one of V that say what all are."""
        self.offsets = list(offsets)
        self.scales = [k.scale for k, _ in sides]
        self._window, self._joiner = window, joiner
        self._first_pages = [k.first_page for k, _ in sides]
        self._slots: list[list[int]] = []
        n_slots = 0
        for k, _ in sides:
            held = range(n_slots, n_slots + k.codes.length)
            self._slots.append([0] * k.first_page + list(held))
            n_slots = held.stop
        self._free: list[int] = []
        self._planes = [
            [_pooled([side.planes[i] for side in of]) for i in range(len(of[0].planes))]
            for of in zip(*sides, strict=True)
        ]
        k_tails, v_tails = ([side.to_length(side.tail, PAGE) for side in of] for of in zip(*sides, strict=True))
        self.tails: Pair = mx.stack(k_tails), mx.stack(v_tails)
        n_prefix = self.kinds[0].n_prefix
        self._prefixes = [
            mx.stack([side.to_length(side.prefix, n_prefix) for side in of]) if n_prefix else None
            for of in zip(*sides, strict=True)
        ]
        self._growth: PoolGrowth | None = None
        self._pages: BatchPages | None = None

    @property
    def pages(self) -> BatchPages:
        """The whole pages of all; the same object until one fills."""
        if self._pages is None:
            k, v = (
                PooledSide(kind.codec, planes[0].array, planes[1].array, prefix, tiled=kind.tiled)
                for kind, planes, prefix in zip(self.kinds, self._planes, self._prefixes, strict=True)
            )
            means = self._planes[0][2].array if self.kinds[0].means is not None else None
            k = PooledSide(k.codec, k.codes, k.scales, k.prefix, means, self._scale_values(), k.tiled)
            self._pages = BatchPages(k, v, [list(of) for of in self._slots])
        return self._pages

    def _scale_values(self) -> mx.array | None:
        """Channel scales of all; of a sequence without a whole page it is not read."""
        if self.kinds[0].scale is None:
            return None
        n_heads, dim = self.tails[0].shape[1::2]
        values = [None if scale is None else scale.value for scale in self.scales]
        return mx.stack([mx.ones((n_heads, dim)) if value is None else value for value in values])

    def can_grow(self, n_own: Sequence[int]) -> bool:
        """Whether each sequence's rows all lie in one page."""
        return all(offset % PAGE + n <= PAGE for offset, n in zip(self.offsets, n_own, strict=True))

    def fits(self, new: Pair) -> bool:
        """Whether rows have these sequences' heads and head sizes."""
        return all(
            rows.ndim == 4
            and rows.shape[:2] == tails.shape[:2]
            and rows.shape[2:] == (new[0].shape[2], tails.shape[3])
            and mx.issubdtype(rows.dtype, mx.floating)
            for rows, tails in zip(new, self.tails, strict=True)
        )

    def grow(self, new: Pair, n_own: Sequence[int]) -> PoolGrowth:
        """Rows for which `can_grow`, [sequences, n_kv_heads, rows, head_dim]; `take` is told when they are joined."""
        self.settle()
        growth = self._growth = PoolGrowth(self.pages, tuple(self.offsets), tuple(n_own), self.tails, new)
        self.offsets = [offset + n for offset, n in zip(self.offsets, n_own, strict=True)]
        return growth

    def observe(self, growth: PoolGrowth, q: mx.array) -> None:
        """Count a step's queries [sequences, n_heads, rows, head_dim] where they are still to decide a scale."""
        if self._growth is growth:
            for i, scale in enumerate(self.scales):
                if scale is not None and scale.is_open:
                    scale.observe(q[i, :, : growth.n_own[i]], growth.offsets[i], growth.new[0].shape[1])

    def take(self, growth: PoolGrowth, tails: Pair) -> None:
        """The tails with a step's rows, as somebody has joined them; pages that they fill are encoded."""
        growth.joined = tails
        if self._growth is not growth:
            return
        self._growth, self.tails = None, tails
        for i, (offset, n) in enumerate(zip(self.offsets, growth.n_own, strict=True)):
            if n and offset % PAGE == 0:
                self._fill(i)

    def settle(self) -> None:
        """Join the rows that nobody has joined."""
        growth = self._growth
        if growth is not None:
            self.take(growth, self._joiner.join_batch(growth.tails, growth.new, growth.offsets, growth.n_own))

    def _fill(self, i: int) -> None:
        page = len(self._slots[i])
        self._pages = None  # who holds a plane makes writing it a copy
        slot = self._free.pop() if self._free else self._planes[0][0].length
        for s, kind in enumerate(self.kinds):
            side = self._side(s, i, page)
            rows = self.tails[s][i]
            side.append(rows[None], rows)
            if side.waiting is not None:
                side.waiting.view()
            for plane, new in zip(self._planes[s], side.planes, strict=True):
                assert new.array is not None
                plane.put(slot, new.array[:1])
            prefixes = self._prefixes[s]
            if page == 0 and prefixes is not None:
                prefixes = self._prefixes[s] = mx.array(prefixes)  # ours alone: the assignment changes it
                prefixes[i] = rows[:, : kind.n_prefix]
        self._slots[i].append(slot)
        needed = first_seen_page(self.offsets[i], self._window)
        for gone in range(self._first_pages[i], needed):
            self._free.append(self._slots[i][gone])
        self._first_pages[i] = max(needed, self._first_pages[i])

    def _side(self, s: int, i: int, first_page: int) -> BlockSide:
        """A side of a sequence without rows."""
        kind = self.kinds[s]
        means, scale = None if kind.means is None else Plane(), self.scales[i] if s == 0 else None
        return BlockSide(
            kind.codec, kind.n_prefix, kind.encoder, first_page, means=means, scale=scale, tiled=kind.tiled
        )

    def sides_of(self, i: int) -> tuple[BlockSide, BlockSide]:
        """A sequence's sides, as `BlockSide` holds them."""
        self.settle()
        offset, first = self.offsets[i], self._first_pages[i]
        slots, n_tail = self._slots[i][first:], offset % PAGE
        at = mx.array(slots, dtype=mx.int32)
        made = []
        for s in range(2):
            side = self._side(s, i, first)
            if side.scale is not None:
                side.scale = side.scale.copy()
            if slots:
                for plane, held in zip(side.planes, self._planes[s], strict=True):
                    assert held.array is not None
                    plane.array, plane.length = held.array[at], len(slots)
            rows, prefixes = self.tails[s][i], self._prefixes[s]
            side.tail = rows[:, :n_tail] if n_tail else None
            if prefixes is not None and first == 0:
                n_prefix = min(offset, side.n_prefix)
                side.prefix = mx.contiguous((prefixes[i] if offset >= PAGE else rows)[:, :n_prefix])
            made.append(side)
        return made[0], made[1]

    def select(self, keep: Sequence[int]) -> None:
        """Keep these sequences only, in this order."""
        self.settle()
        self._pages = None
        gone = set(range(len(self.offsets))) - set(keep)
        self._free += [slot for i in gone for slot in self._slots[i][self._first_pages[i] :]]
        at = mx.array(list(keep), dtype=mx.int32)
        self.tails = self.tails[0][at], self.tails[1][at]
        self._prefixes = [None if prefixes is None else prefixes[at] for prefixes in self._prefixes]
        self.offsets, self.scales = [self.offsets[i] for i in keep], [self.scales[i] for i in keep]
        self._slots, self._first_pages = [self._slots[i] for i in keep], [self._first_pages[i] for i in keep]

    @property
    def nbytes(self) -> int:
        planes = [plane for of in self._planes for plane in of]
        scales = [scale.value for scale in self.scales if scale is not None]
        return sum(x.nbytes for x in (*planes, *self.tails, *self._prefixes, *scales) if x is not None)


def _without_rows(side: BlockSide) -> BlockSide:
    """Its kind; the arrays themselves would stay in memory for it."""
    means, scale = None if side.means is None else Plane(), side.scale and ChannelScale(side.scale.layout)
    return BlockSide(side.codec, side.n_prefix, side.encoder, means=means, scale=scale, tiled=side.tiled)


def _pooled(planes: Sequence[Plane]) -> Plane:
    """One plane with the pages of all."""
    held = [pages for pages in (plane.read() for plane in planes) if pages is not None]
    return Plane(mx.concatenate(held), sum(plane.length for plane in planes)) if held else Plane()
