"""How one side (K or V) of one layer is stored in a block type, and what a step of attention may read of it.

`BlockSide` keeps whole pages as planes of codes and scales, the unfilled page as an f16 tail, and the first tokens (the
exact prefix) in f16. It answers with a `SideView`, whose readings are by absolute token position, as `FloatSide` does
for float types. Knows nothing of queries, masks or mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import FormatError
from tqgguf.runtime.kernels.tiles import can_be_tiled, to_rows, to_tiles
from tqgguf.runtime.kv.balance import ChannelScale, checked_scale
from tqgguf.runtime.kv.block_ops import to_f16
from tqgguf.runtime.kv.planes import Plane
from tqgguf.runtime.kv.saved import as_saved, expect, expect_squares
from tqgguf.runtime.kv.side_view import PAGE, SideView


class PageEncoder(Protocol):
    """The part of a backend's reading that makes blocks of a page's rows [n_kv_heads, PAGE, head_dim]."""

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        """f16 or f32 rows to codes uint8 and scales f16, both [n_kv_heads, tokens, ...]."""

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        """EncodeError where a page's f16 rows hold a value that is not finite; GPUs do not look."""

    def encode_pages(
        self,
        codec: Codec,
        rows: mx.array,
        *,
        n_skipped: int,
        centred: bool,
        scale: mx.array | None,
        tiled: bool = False,
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Whole pages of rows to codes and scales [pages, n_kv_heads, PAGE, ...], and their means if `centred`."""

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        """f16 [n_kv_heads, head_dim]: the mean of f16 rows from n_skipped on."""

    def join(self, tail: mx.array | None, new: mx.array) -> mx.array:
        """f16 rows [n_kv_heads, tokens, head_dim] and new ones [1, ...] of any float type after them: f16."""

    def join_sides(
        self, tails: tuple[mx.array | None, mx.array | None], new: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """`join` for K and V, which hold equally many tokens."""

    def host_rows(self, cache_type: str, new: mx.array) -> NDArray[Any] | None:
        """New rows [1, n_kv_heads, tokens, head_dim] in a float type, by numpy; None where that does not serve."""


class Waiting:
    """Whole pages that are not encoded before the queries of page 0 are known, or nobody can bring them any more."""

    def __init__(self, side: BlockSide, rows: mx.array) -> None:
        self._side, self._rows = side, rows
        self._view: SideView | None = None

    def view(self) -> SideView:
        """What the step that brought the rows reads, its pages encoded."""
        if self._view is None:
            self._view = self._side.encode_waiting(self._rows)
        return self._view


class Growth:
    """New rows [1, n_kv_heads, rows, head_dim] of K and V that only make tails longer.

    The attention that reads them joins them; whoever else needs tails before that, or none attends, calls `join`.
    """

    def __init__(self, sides: tuple[BlockSide, BlockSide], new: tuple[mx.array, mx.array]) -> None:
        self.sides, self.new = sides, new
        self.rows: tuple[mx.array, mx.array] | None = None

    def join(self) -> tuple[mx.array, mx.array]:
        """Both tails with the new rows."""
        if self.rows is None:
            k, v = self.sides
            self.take(k.encoder.join_sides((k.tail, v.tail), self.new))
        assert self.rows is not None
        return self.rows

    def take(self, rows: tuple[mx.array, mx.array]) -> None:
        """The tails as somebody has joined them."""
        self.rows = self.sides[0].tail, self.sides[1].tail = rows


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
    tail: mx.array | None = None
    means: Plane | None = None
    scale: ChannelScale | None = None
    waiting: Waiting | None = None
    tiled: bool = False
    """Whether codes are held in the order of `kernels.tiles`."""
    rolls_back: bool = False
    """Whether `last_page` is kept, which makes cuts inside that page exact."""
    last_page: LastPage | None = None
    _last_view: SideView | None = None
    _cut_view: SideView | None = None
    """`_last_view` without the pages in front that no query sees."""

    @property
    def end_page(self) -> int:
        """The page that the tail belongs to."""
        return self.first_page + self.codes.length

    def append(self, new: mx.array, joined: mx.array | None = None) -> SideView:
        """Add rows [1, n_kv_heads, tokens, head_dim]; pages that become full are encoded, or wait. None may be waiting.

        joined: tail and new rows as `PageEncoder.join` has them, if that was done. Returns what this step reads.
        """
        start = self.end_page * PAGE
        rows = self.encoder.join(self.tail, new) if joined is None else joined
        for page in _whole_pages(rows):
            self.encoder.check_finite(self.codec, page)  # the exact prefix too, and before anything changes
        if start == 0 and (0 if self.prefix is None else self.prefix.shape[1]) < self.n_prefix:
            self.prefix = mx.contiguous(rows[:, : self.n_prefix])  # a copy: a slice would keep all rows alive
        if self.scale is not None and self.scale.is_open and rows.shape[1] >= PAGE:
            self.tail, self.waiting = rows, Waiting(self, rows)
            return self._view(rows, start)
        self._encode_pages(rows)
        return self._view(rows, start)

    def can_grow(self, n_rows: int) -> bool:
        """Whether that many new rows only make the tail longer: no page fills, the exact prefix is complete."""
        if self.tail is None or self.waiting is not None:
            return False
        n_held = self.tail.shape[1]
        return n_held + n_rows < PAGE and (n_held >= self.n_prefix or self.end_page > 0)

    def grown(self, rows: mx.array, seen_from: int = 0) -> SideView:
        """What a step reads that `can_grow` holds for, by its tail with the new rows (or without them yet): the pages
        from `seen_from` on."""
        last, codes = self._last_view, self.codes.read()
        scale = self.channel_scale
        same = last is not None and last.codes is codes and last.prefix is self.prefix and last.channel_scale is scale
        if last is None or not same or last.rows_start != self.end_page * PAGE:
            last = self._last_view = self._view(rows, self.end_page * PAGE)
            self._cut_view = None
        if seen_from <= self.first_page:
            return last.with_rows(rows)
        cut = self._cut_view
        if cut is None or cut.pages_start != seen_from:
            cut = self._cut_view = last.starting_at(seen_from)
        return cut.with_rows(rows)

    def encode_waiting(self, rows: mx.array) -> SideView:
        """Fix the scale by what has been observed and encode the pages of `rows`, which begin with page 0."""
        assert self.scale is not None
        page, open_scale = rows[:, :PAGE], self.scale.copy()
        self.scale.fix(page, self.encoder.page_mean(page, self.n_prefix), self.n_prefix)
        self.waiting = None
        self._encode_pages(rows)
        if self.last_page is not None and self.end_page == 1:
            self.last_page = LastPage(self.last_page.rows, open_scale)
        return self._view(rows, 0)

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
            self._last_view = self._cut_view = None  # who holds a slice of a plane makes its next append a copy
            self.codes.append(codes)
            self.scales.append(scales)
            if self.means is not None and means is not None:
                self.means.append(means)
            if self.rolls_back:
                page = rows[:, end - PAGE : end]
                # a copy where there are others: a slice would keep all rows alive
                self.last_page = LastPage(page if rows.shape[1] == PAGE else mx.contiguous(page))
        rest = rows.shape[1] - end
        if rest and end:
            rows = rows[:, end:]
        self.tail = rows if rest else None

    def _view(self, rows: mx.array, start: int) -> SideView:
        return SideView(
            codec=self.codec,
            rows=rows,
            rows_start=start,
            codes=self.codes.read(),
            scales=self.scales.read(),
            pages_start=self.first_page,
            prefix=self.prefix,
            page_means=None if self.means is None else self.means.read(),
            channel_scale=self.channel_scale,
            tiled=self.tiled,
        )

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
            self.prefix = None

    def truncate(self, length: int) -> None:
        """Keep the tokens before `length`. A cut inside an encoded page brings its rows back where they are kept; else
        its decoded values become the tail."""
        page, rest = divmod(length, PAGE)
        if page >= self.end_page:
            self.tail = self.tail[:, :rest] if self.tail is not None and rest else None
        else:
            slot = page - self.first_page
            tail = None
            last, self.last_page = self.last_page, None
            if last is not None and page == self.end_page - 1:
                tail = last.rows[:, :rest] if rest else None
                if last.scale is not None:
                    self.scale = last.scale.copy()
            elif rest:
                tail = to_f16(self._view(mx.zeros((0,)), 0).decoded(page, page + 1))[:, :rest]
                if page == 0 and self.prefix is not None:
                    tail = mx.concatenate([self.prefix, tail[:, self.prefix.shape[1] :]], axis=1)[:, :rest]
            for plane in self.planes:
                plane.truncate(slot)
            self.tail = tail
        if self.first_page == 0 and length < self.n_prefix:
            self.prefix = self.prefix[:, :length] if self.prefix is not None and length else None
        if self.scale is not None:
            self.scale.forget(length)

    def to_length(self, rows: mx.array | None, length: int) -> mx.array:
        """f16 rows of this side, or none, as [n_kv_heads, length, head_dim]: zeros after those that there are."""
        if rows is None:
            return mx.zeros((self.n_heads or 0, length, self.codec.head_dim), dtype=mx.float16)
        return mx.pad(rows, [(0, 0), (0, length - rows.shape[1]), (0, 0)])

    @property
    def channel_scale(self) -> mx.array | None:
        """f32 [n_kv_heads, head_dim], once it is fixed."""
        return None if self.scale is None else self.scale.value

    @property
    def nbytes(self) -> int:
        """Of everything that is held, the rows of the last page included."""
        last = () if self.last_page is None else self.last_page.arrays
        held = (*self.planes, self.prefix, self.tail, self.channel_scale, *last)
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
        self.prefix, self.tail = prefix, tail

    def copy(self) -> BlockSide:
        """The same contents; what is appended to the copy does not show in the original. Nothing may be waiting."""
        means = None if self.means is None else self.means.copy()
        scale = None if self.scale is None else self.scale.copy()
        return BlockSide(  # not `replace`, which takes a decode step ten times as long
            self.codec,
            self.n_prefix,
            self.encoder,
            self.first_page,
            self.codes.copy(),
            self.scales.copy(),
            self.prefix,
            self.tail,
            means,
            scale,
            self.waiting,
            self.tiled,
            self.rolls_back,
            self.last_page,
            self._last_view,
            self._cut_view,
        )

    @property
    def n_heads(self) -> int | None:
        """KV heads, None while there are no rows."""
        rows = self.tail if self.tail is not None else self.prefix
        if rows is not None:
            return rows.shape[0]
        return None if self.codes.array is None else self.codes.array.shape[1]


def _whole_pages(rows: mx.array) -> list[mx.array]:
    """Rows [n_kv_heads, tokens, head_dim] that begin with a page, as the pages that they fill."""
    return [rows[:, end - PAGE : end] for end in range(PAGE, rows.shape[1] + 1, PAGE)]
