"""Several sequences' K and V of one layer in arrays that one kernel reads: a pool of whole pages, and tails of a page's
length.

Pages fill as `BlockSide` fills them, by it. Knows nothing of queries, masks or mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from tqgguf.runtime.kv.balance import ChannelScale
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Pair, SidePages, first_seen_page
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.sides import BlockSide, padded


class Joiner(Protocol):
    """The part of a backend that joins rows to tails."""

    def join(self, growth: Growth) -> Pair: ...


class PagePool:
    """sides: of every sequence, with rows, without pages that wait; offsets: the tokens that they hold. window: pages
    that no later query sees through it are given up; None: all stay. n_back: tokens that queries may go back."""

    def __init__(
        self,
        sides: Sequence[tuple[BlockSide, BlockSide]],
        offsets: Sequence[int],
        window: int | None,
        joiner: Joiner,
        n_back: int = 0,
    ) -> None:
        self.kinds = _without_rows(sides[0][0]), _without_rows(sides[0][1])
        """A side of K and one of V that say what all are."""
        self.offsets = list(offsets)
        self.scales = [k.scale for k, _ in sides]
        self._window, self._joiner, self._n_back = window, joiner, n_back
        self._last_pages = [(k.last_page, v.last_page) for k, v in sides]
        self._first_pages = [k.first_page for k, _ in sides]
        self._slots: list[list[int]] = []
        n_slots = 0
        for k, _ in sides:
            held = range(n_slots, n_slots + k.codes.length)
            self._slots.append([0] * k.first_page + list(held))
            n_slots = held.stop
        self._n_slots = n_slots
        self._free: list[int] = []
        self._planes = [
            [_pooled([side.planes[i] for side in of]) for i in range(len(of[0].planes))]
            for of in zip(*sides, strict=True)
        ]
        k_tails, v_tails = ([side.room() for side in of] for of in zip(*sides, strict=True))
        self.tails: Pair = mx.concatenate(k_tails), mx.concatenate(v_tails)
        n_prefix = self.kinds[0].n_prefix
        self._prefixes = [
            mx.stack([_prefix_of(side) for side in of]) if n_prefix else None for of in zip(*sides, strict=True)
        ]
        self._is_ours = False
        """Whether nobody else reads what lies after the tails' last rows."""
        self._growth: Growth | None = None
        self._pages: Pages | None = None

    @property
    def pages(self) -> Pages:
        """The whole pages of all; the same object until one fills."""
        if self._pages is None:
            scales = self._scale_values(), None
            k, v = (
                SidePages(
                    kind.codec,
                    planes[0].array,
                    planes[1].array,
                    0,
                    self._n_slots,
                    prefix,
                    None if kind.means is None else planes[2].array,
                    scale,
                    kind.tiled,
                )
                for kind, planes, prefix, scale in zip(self.kinds, self._planes, self._prefixes, scales, strict=True)
            )
            self._pages = Pages(k, v, [list(of) for of in self._slots])
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

    def grow(self, new: Pair, n_own: Sequence[int]) -> Growth:
        """Rows for which `can_grow`, [sequences, n_kv_heads, rows, head_dim]; `take` is told when they are joined."""
        self.settle()
        growth = Growth(self.tails, new, tuple(self.offsets), tuple(n_own), is_ours=self._is_ours)
        offsets = [offset + n for offset, n in zip(self.offsets, n_own, strict=True)]
        self.__dict__.update(_growth=growth, offsets=offsets)  # both or neither, whatever interrupts this
        return growth

    def cancel(self) -> None:
        """Forget the rows that nobody has joined."""
        if self._growth is not None:
            self.__dict__.update(offsets=list(self._growth.offsets), _growth=None)

    def observe(self, growth: Growth, q: mx.array) -> None:
        """Count a step's queries [sequences, n_heads, rows, head_dim] where they are still to decide a scale."""
        if self._growth is growth:
            for i, scale in enumerate(self.scales):
                if scale is not None and scale.is_open:
                    scale.observe(q[i, :, : growth.n_own[i]], growth.offsets[i], growth.new[0].shape[1])

    def take(self, growth: Growth, tails: Pair) -> None:
        """The tails with a step's rows, as somebody has joined them; pages that they fill are encoded."""
        growth.joined = tails
        if self._growth is not growth:
            return
        changed: dict[str, Any] = {"_growth": None, "tails": tails, "_is_ours": True}
        filled = [i for i, n in enumerate(growth.n_own) if n and self.offsets[i] % PAGE == 0]
        if filled:
            changed |= self._filled(filled, tails)
            changed["_is_ours"] = False  # rows of a filled page may be held as they lie in its tail
        self.__dict__.update(changed)  # all or nothing, whatever interrupts this: the step is then joined again

    def settle(self) -> None:
        """Join the rows that nobody has joined."""
        growth = self._growth
        if growth is not None:
            self.take(growth, self._joiner.join(growth))

    def _filled(self, which: Sequence[int], tails: Pair) -> dict[str, Any]:
        """Encode the pages that these sequences have filled; the attributes that say so. Planes are written at once,
        in places that are nobody's until then."""
        self._pages = None  # who holds a plane makes writing it a copy
        made = {i: (self._encoded(0, i, tails), self._encoded(1, i, tails)) for i in which}
        free, n_slots, slots, first_pages = list(self._free), self._n_slots, list(self._slots), list(self._first_pages)
        scales, last_pages, prefixes = list(self.scales), list(self._last_pages), list(self._prefixes)
        for i, sides in made.items():
            slot = free.pop() if free else n_slots
            n_slots = max(n_slots, slot + 1)
            for s, (kind, side) in enumerate(zip(self.kinds, sides, strict=True)):
                for plane, new in zip(self._planes[s], side.planes, strict=True):
                    assert new.array is not None
                    plane.put(slot, new.array[:1])
                held = prefixes[s]
                if not self._slots[i] and held is not None:
                    held = prefixes[s] = mx.array(held)  # ours alone: the assignment changes it
                    held[i] = tails[s][i, :, : kind.n_prefix]
            slots[i] = [*slots[i], slot]
            scales[i], last_pages[i] = sides[0].scale, (sides[0].last_page, sides[1].last_page)
            needed = first_seen_page(self.offsets[i] - self._n_back, self._window)
            free += slots[i][first_pages[i] : needed]
            first_pages[i] = max(needed, first_pages[i])
        return {
            "_free": free,
            "_n_slots": n_slots,
            "_slots": slots,
            "_first_pages": first_pages,
            "scales": scales,
            "_last_pages": last_pages,
            "_prefixes": prefixes,
        }

    def _encoded(self, s: int, i: int, tails: Pair) -> BlockSide:
        """A side that holds nothing but the page that a sequence has filled."""
        side, rows = self._side(s, i, len(self._slots[i])), mx.contiguous(tails[s][i])
        side.append(rows)
        if side.waiting is not None:
            side.waiting.view()
        return side

    def _side(self, s: int, i: int, first_page: int) -> BlockSide:
        """A side of a sequence without rows."""
        kind = self.kinds[s]
        held = self.scales[i] if s == 0 else None
        means, scale = None if kind.means is None else Plane(), None if held is None else held.copy()
        return BlockSide(
            kind.codec,
            kind.n_prefix,
            kind.encoder,
            first_page,
            means=means,
            scale=scale,
            tiled=kind.tiled,
            rolls_back=kind.rolls_back,
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
            side.last_page = self._last_pages[i][s]
            if slots:
                for plane, held in zip(side.planes, self._planes[s], strict=True):
                    assert held.array is not None
                    plane.array, plane.length = held.array[at], len(slots)
            rows, prefixes = self.tails[s][i], self._prefixes[s]
            if n_tail:
                side.tails, side.n_tail = rows[None], n_tail
            if prefixes is not None and first == 0:
                n_prefix = min(offset, side.n_prefix)
                side.prefix = mx.contiguous((prefixes[i] if offset >= PAGE else rows)[:, :n_prefix])
            made.append(side)
        return made[0], made[1]

    def select(self, keep: Sequence[int]) -> None:
        """Keep these sequences only, in this order."""
        self.settle()
        gone = set(range(len(self.offsets))) - set(keep)
        at = mx.array(list(keep), dtype=mx.int32)
        changed: dict[str, Any] = {
            name: [getattr(self, name)[i] for i in keep]
            for name in ("offsets", "scales", "_slots", "_first_pages", "_last_pages")
        }
        changed["_free"] = self._free + [slot for i in gone for slot in self._slots[i][self._first_pages[i] :]]
        changed["tails"] = self.tails[0][at], self.tails[1][at]
        changed["_prefixes"] = [None if prefixes is None else prefixes[at] for prefixes in self._prefixes]
        self.__dict__.update(changed, _pages=None, _is_ours=False)

    @property
    def nbytes(self) -> int:
        planes = [plane for of in self._planes for plane in of]
        scales = [scale.value for scale in self.scales if scale is not None]
        last = [array for pair in self._last_pages for page in pair if page is not None for array in page.arrays]
        return sum(x.nbytes for x in (*planes, *self.tails, *self._prefixes, *scales, *last) if x is not None)


def _without_rows(side: BlockSide) -> BlockSide:
    """Its kind; the arrays themselves would stay in memory for it."""
    means, scale = None if side.means is None else Plane(), side.scale and ChannelScale(side.scale.layout)
    made = BlockSide(side.codec, side.n_prefix, side.encoder, means=means, scale=scale, tiled=side.tiled)
    made.rolls_back = side.rolls_back
    return made


def _prefix_of(side: BlockSide) -> mx.array:
    """f16 [n_kv_heads, n_prefix, head_dim]: zeros after what there is of the exact prefix."""
    if side.prefix is None:
        return mx.zeros((side.n_heads or 0, side.n_prefix, side.codec.head_dim), dtype=mx.float16)
    return padded(side.prefix, side.n_prefix)


def _pooled(planes: Sequence[Plane]) -> Plane:
    """One plane with the pages of all."""
    held = [pages for pages in (plane.read() for plane in planes) if pages is not None]
    return Plane(mx.concatenate(held), sum(plane.length for plane in planes)) if held else Plane()
