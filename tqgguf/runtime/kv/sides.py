"""How one side (K or V) of one layer is stored in a block type, and what a step of attention may read of it.

`BlockSide` keeps whole pages as planes of codes and scales, the unfilled page as an f16 tail, and the first tokens (the
exact prefix) in f16. Long steps read it as a `SideView`, as they do a `FloatSide`; steps within a page read its `pages`
and its tail. Knows nothing of queries, masks or mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import FormatError
from tqgguf.runtime.kv.balance import ChannelScale, checked_scale
from tqgguf.runtime.kv.block_ops import to_f16
from tqgguf.runtime.kv.page_encoder import PageEncoder
from tqgguf.runtime.kv.pages import PAGE, SidePages, SideView, padded
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.saved import as_saved, expect, expect_squares
from tqgguf.runtime.kv.tiles import can_be_tiled, to_rows, to_tiles


class Waiting:
    """Whole pages that are not encoded before the queries of page 0 are known, or nobody can bring them any more."""

    def __init__(self, side: BlockSide, rows: mx.array) -> None:
        self._side, self.rows = side, rows
        self._view: SideView | None = None

    def view(self) -> SideView:
        """What the step that brought the rows reads, its pages encoded."""
        if self._view is None:
            self._view = self._side.encode_waiting(self.rows)
        return self._view


@dataclass(frozen=True)
class LastPage:
    """The last whole page as it was before it was encoded. rows: f16 [n_kv_heads, PAGE, head_dim]. scale: of page 0,
    the channel scale while the page was still to decide it."""

    rows: mx.array
    scale: ChannelScale | None = None

    @property
    def arrays(self) -> tuple[mx.array, mx.array | None]:
        return self.rows, None if self.scale is None else self.scale.query_squares


@dataclass
class BlockSide:
    """Whole pages as blocks, the last unfilled page and the exact prefix in f16.

    With `means`, each page's mean is subtracted from it, and with `scale` what is left is multiplied, before encoding.
    While the scale is open, full pages wait in f16 (`waiting`) for the queries of the step that filled page 0.
    """

    codec: Codec
    n_prefix: int
    encoder: PageEncoder
    first_page: int = 0
    codes: Plane = field(default_factory=Plane)
    scales: Plane = field(default_factory=Plane)
    prefix: mx.array | None = None
    tails: mx.array | None = None
    """f16 [1, n_kv_heads, PAGE, head_dim]: the rows after the last whole page, and whatever lies after them."""
    n_tail: int = 0
    """How many rows of `tails` are there."""
    n_written: int = -1
    """Rows of `tails` that a backend may have written in place: where there are no more of them than `n_tail`, nobody
    else reads what comes after."""
    means: Plane | None = None
    scale: ChannelScale | None = None
    waiting: Waiting | None = None
    tiled: bool = False
    """Whether codes are held in the order of `kv.tiles`."""
    rolls_back: bool = False
    """Whether `last_page` is kept, which makes cuts inside that page exact."""
    last_page: LastPage | None = None
    _pages: SidePages | None = None

    @property
    def end_page(self) -> int:
        """The page that the tail belongs to."""
        return self.first_page + self.codes.length

    @property
    def tail(self) -> mx.array | None:
        """f16 [n_kv_heads, tokens, head_dim]: the rows after the last whole page; None where there are none."""
        return self.tails[0, :, : self.n_tail] if self.tails is not None and self.n_tail else None

    @tail.setter
    def tail(self, rows: mx.array | None) -> None:
        self.n_tail, self.n_written = 0 if rows is None else rows.shape[1], -1
        self.tails = None if rows is None or not self.n_tail else padded(rows, PAGE)[None]

    def append(self, rows: mx.array) -> SideView:
        """Take the tail's rows with new ones after them, f16 [n_kv_heads, tokens, head_dim], for both. Pages that
        become full are encoded, or wait. None may be waiting. Returns what this step reads."""
        start = self.end_page * PAGE
        for page in _whole_pages(rows):
            self.encoder.check_finite(self.codec, page)  # the exact prefix too, and before anything changes
        if start == 0 and (0 if self.prefix is None else self.prefix.shape[1]) < self.n_prefix:
            self.prefix = mx.contiguous(rows[:, : self.n_prefix])  # a copy: a slice would keep all rows alive
            self._pages = None
        if self.scale is not None and self.scale.is_open and rows.shape[1] >= PAGE:
            self.tail, self.waiting = None, Waiting(self, rows)
        else:
            self._encode_pages(rows)
        return self.pages.view(rows, start)

    def can_grow(self, n_rows: int) -> bool:
        """Whether that many new rows only make the tail longer: no page fills, the exact prefix is complete."""
        if self.waiting is not None or self.n_tail + n_rows >= PAGE:
            return False
        return self.end_page > 0 or (self.tails is not None and self.n_tail >= self.n_prefix)

    def room(self) -> mx.array:
        """`tails`, made where there are none."""
        if self.tails is None:
            self.take(mx.zeros((1, self.n_heads or 0, PAGE, self.codec.head_dim), dtype=mx.float16), 0)
        assert self.tails is not None
        return self.tails

    @property
    def is_ours(self) -> bool:
        """Whether nobody else reads what lies after the tail's last row."""
        return self.n_written == self.n_tail

    def take(self, tails: mx.array, n_tail: int) -> None:
        """Other tails, in which so many rows are there."""
        self.tails, self.n_tail, self.n_written = tails, n_tail, n_tail

    @property
    def pages(self) -> SidePages:
        """The whole pages, for as long as there are no others."""
        if self._pages is None:
            means = None if self.means is None else self.means.array
            self._pages = SidePages(
                self.codec,
                self.codes.array,
                self.scales.array,
                self.first_page,
                self.end_page,
                self.prefix,
                means,
                self.channel_scale,
                self.tiled,
            )
        return self._pages

    def encode_waiting(self, rows: mx.array) -> SideView:
        """Fix the scale by what has been observed and encode the pages of `rows`, which begin with page 0."""
        assert self.scale is not None
        page, open_scale = rows[:, :PAGE], self.scale.copy()
        mean, squares = self.encoder.page_mean(page, self.n_prefix), self.scale.query_squares
        self.scale.fix(self.encoder.page_scale(page, mean, squares, self.n_prefix, self.scale.layout))
        self.waiting = None
        self._encode_pages(rows)
        if self.last_page is not None and self.end_page == 1:
            self.last_page = LastPage(self.last_page.rows, open_scale)
        return self.pages.view(rows, 0)

    def _encode_pages(self, rows: mx.array) -> None:
        end = rows.shape[1] // PAGE * PAGE
        if end:
            codes, scales, means = self.encoder.encode_pages(
                self.codec,
                rows[:, :end],
                n_skipped=self.n_prefix if self.end_page == 0 else 0,
                centred=self.means is not None,
                scale=self.channel_scale,
                **({"tiled": True} if self.tiled else {}),
            )
            self._pages = None  # who holds a plane makes its next append a copy
            self.codes.append(codes)
            self.scales.append(scales)
            if self.means is not None and means is not None:
                self.means.append(means)
            if self.rolls_back:
                page = rows[:, end - PAGE : end]
                # a copy where there are others: a slice would keep all rows alive
                self.last_page = LastPage(page if rows.shape[1] == PAGE else mx.contiguous(page))
        self.tail = rows[:, end:] if end < rows.shape[1] else None

    @property
    def planes(self) -> list[Plane]:
        """The planes whose first axis counts pages."""
        return [plane for plane in (self.codes, self.scales, self.means) if plane is not None]

    def release(self, first_page: int) -> None:
        """Free the pages before `first_page`, and with page 0 the exact prefix."""
        count = min(first_page - self.first_page, self.codes.length)
        if count > 0:
            for plane in self.planes:
                plane.drop_front(count)
            self.first_page += count
            self.prefix = self._pages = None

    def truncate(self, length: int) -> None:
        """Keep the tokens before `length`. A cut inside an encoded page brings its rows back where they are kept; else
        its decoded values become the tail."""
        page, rest = divmod(length, PAGE)
        if page >= self.end_page:
            self.n_tail = min(self.n_tail, rest)
        else:
            slot = page - self.first_page
            tail = None
            last, self.last_page = self.last_page, None
            if last is not None and page == self.end_page - 1:
                tail = last.rows[:, :rest] if rest else None
                if last.scale is not None:
                    self.scale = last.scale.copy()
            elif rest:
                tail = to_f16(mx.concatenate(self.pages.decoded_exactly(page, page + 1), axis=1))[:, :rest]
            for plane in self.planes:
                plane.truncate(slot)
            self.tail = tail
        self._pages = None
        if self.first_page == 0 and length < self.n_prefix:
            self.prefix = self.prefix[:, :length] if self.prefix is not None and length else None
        if self.scale is not None:
            self.scale.forget(length)

    @property
    def channel_scale(self) -> mx.array | None:
        """f32 [n_kv_heads, head_dim], once it is fixed."""
        return None if self.scale is None else self.scale.value

    @property
    def nbytes(self) -> int:
        """Of everything that is held, the rows of the last page included."""
        last = () if self.last_page is None else self.last_page.arrays
        waiting = None if self.waiting is None else self.waiting.rows
        held = (*self.planes, self.prefix, self.tails, waiting, self.channel_scale, *last)
        return sum(x.nbytes for x in held if x is not None)

    def arrays(self) -> tuple[mx.array | None, ...]:
        """What `restore` needs, without spare capacity, codes in the order in which they are held; of a balanced side
        its means, and what its scale has, too; then what `LastPage` has."""
        means = () if self.means is None else (self.means.read(),)
        scale = () if self.scale is None else (self.scale.value, self.scale.query_squares)
        last_rows, last_squares = (None, None) if self.last_page is None else self.last_page.arrays
        last = (last_rows,) if self.scale is None else (last_rows, last_squares)
        return (self.codes.read(), self.scales.read(), self.prefix, self.tail, *means, *scale, *last)

    def row_codes(self) -> mx.array | None:
        """Codes of the whole pages, row by row."""
        codes = self.codes.read()
        return to_rows(self.codec, codes) if self.tiled and codes is not None else codes

    def restore(self, first_page: int, offset: int, saved: Sequence[Any], tiled: bool = False) -> None:
        """Take over what `arrays` gave of `offset` tokens, codes `tiled` or row by row. FormatError for anything else,
        before anything changes."""
        codec, open_scale = self.codec, None
        if tiled and not can_be_tiled(codec):
            raise FormatError(f"cache state: expected rows of {codec.cache_type}, found tiles, which it has not")
        n_expected = 5 + (self.means is not None) + 3 * (self.scale is not None)
        codes, scales, prefix, tail, *balance = as_saved(saved, n_expected)
        last = [balance.pop() for _ in range(1 if self.scale is None else 2)][::-1]
        n_heads = next((a.shape[axis] for a, axis in ((codes, 1), (tail, 0), (prefix, 0)) if a is not None), 0)
        pages = offset // PAGE - first_page
        n_prefix = min(self.n_prefix, offset) if first_page == 0 else 0
        expect("codes", codes, (pages, n_heads, PAGE, codec.n_blocks * codec.code_bytes), mx.uint8)
        expect("scales", scales, (pages, n_heads, PAGE, codec.n_blocks * codec.n_scales), mx.float16)
        expect("the exact prefix", prefix, (n_heads, n_prefix, codec.head_dim), mx.float16)
        expect("the tail", tail, (n_heads, offset % PAGE, codec.head_dim), mx.float16)
        if self.means is not None:
            expect("page means", balance[0], (pages, n_heads, codec.head_dim), mx.float16)
        if self.scale is not None:
            is_given, (value, squares) = not self.scale.is_open, balance[1:]
            if value is not None or pages:
                expect("the channel scale", value, (n_heads, codec.head_dim), mx.float32)
                checked_scale(value, "cache state")
            expect_squares(squares, n_heads, min(offset, PAGE) if value is None else 0, codec.head_dim)
            opened = offset // PAGE == 1 and first_page == 0 and not is_given and last[0] is not None
            expect_squares(last[1], n_heads, PAGE if opened else 0, codec.head_dim)
            open_scale = ChannelScale(self.scale.layout, None, last[1]) if opened else None
            self.scale = replace(self.scale, value=value, query_squares=squares)
        if last[0] is not None:
            expect("the last page", last[0], (n_heads, PAGE if pages else 0, codec.head_dim), mx.float16)
            self.last_page = LastPage(last[0], open_scale) if self.rolls_back else None
        if self.means is not None:
            self.means = Plane(balance[0], pages)
        self.first_page = first_page
        held = codes if codes is None or tiled == self.tiled else (to_tiles if self.tiled else to_rows)(codec, codes)
        self.codes, self.scales = Plane(held, pages), Plane(scales, pages)
        self.prefix, self.tail, self._pages = prefix, tail, None

    def copy(self) -> BlockSide:
        """The same contents; what is appended to the copy does not show in the original. Nothing may be waiting."""
        made = BlockSide.__new__(BlockSide)  # not `replace`, which takes a decode step ten times as long
        made.__dict__.update(self.__dict__)
        made.codes, made.scales, made.n_written = self.codes.copy(), self.scales.copy(), -1
        made.means = None if self.means is None else self.means.copy()
        made.scale = None if self.scale is None else self.scale.copy()
        return made

    @property
    def n_heads(self) -> int | None:
        """KV heads, None while there are no rows."""
        if self.waiting is not None:
            return self.waiting.rows.shape[0]
        held = ((self.tails, 1), (self.codes.array, 1), (self.prefix, 0))
        return next((array.shape[axis] for array, axis in held if array is not None), None)


def _whole_pages(rows: mx.array) -> list[mx.array]:
    """Rows [n_kv_heads, tokens, head_dim] that begin with a page, as the pages that they fill."""
    return [rows[:, end - PAGE : end] for end in range(PAGE, rows.shape[1] + 1, PAGE)]
