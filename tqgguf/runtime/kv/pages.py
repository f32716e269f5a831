"""What attention reads of one layer: whole pages of K and V, the rows after them, and new rows that go into tails.

These records are handed from the stores to the backends. They know nothing of how a cache keeps its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.balance import unbalance_pages
from tqgguf.runtime.kv.tiles import to_rows

PAGE = PAGE_TOKENS

ROLLBACK_TOKENS = PAGE
"""Tokens that can be taken back as if they had never been fed: the length of a draft, with room to spare. More would
take more rows in f16 than those of the last whole page."""

Pair = tuple[mx.array, mx.array]
"""Of K and V."""


@dataclass(frozen=True)
class Query:
    """What a step's attention is asked for beside its queries. scale: of the scores. window: keys that a query sees,
    its own included (None: all). sinks: [n_heads] logits that take part in the softmax and carry no value."""

    scale: float
    window: int | None = None
    sinks: mx.array | None = None

    def of_heads(self, some: slice) -> Query:
        """The same of some query heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[some])


@dataclass(frozen=True, eq=False)
class SidePages:
    """Whole pages of one side (K or V) of a layer, of one sequence, or of several that share planes.

    codes/scales: planes [pages, n_kv_heads, PAGE, ...], at their end maybe with room for more; None while there are no
    pages. Of a float type codes are its rows [tokens, n_kv_heads, head_dim], and there are no scales. first_page: the
    one at the planes' start. end_page: the one after the last; by default planes have no more room.
    prefix: f16 [n_kv_heads, n_prefix, head_dim], the exact prefix that is held apart from the blocks of page 0, or
    None. page_means: f16 [pages, n_kv_heads, head_dim] subtracted from each page before encoding, or None.
    channel_scale: f32 [n_kv_heads, head_dim] multiplied into K before encoding (undone on the query), or None.
    tiled: a page's codes are in the order of `tiles`, not row by row.
    Of several sequences, prefix and channel_scale have an axis for them in front, and the planes' pages are anybody's:
    `Pages.slots` says whose; first_page is 0 then.
    """

    codec: Codec
    codes: mx.array | None = None
    scales: mx.array | None = None
    first_page: int = 0
    end_page: int = -1
    prefix: mx.array | None = None
    page_means: mx.array | None = None
    channel_scale: mx.array | None = None
    tiled: bool = False
    kept: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    """What a backend prepares from these pages, for all steps that read them."""

    def __post_init__(self) -> None:
        if self.end_page < 0:
            object.__setattr__(self, "end_page", self.first_page + self.n_there)

    @property
    def n_there(self) -> int:
        """Pages that the planes have, or have room for."""
        if self.codec.is_float:
            return self.token_rows.shape[0] // PAGE
        return 0 if self.codes is None else self.codes.shape[0]

    @property
    def token_rows(self) -> mx.array:
        """Of a float type, every row from the first page on: [tokens, n_kv_heads, head_dim]."""
        assert self.codes is not None
        return self.codes

    @property
    def n_prefix(self) -> int:
        return 0 if self.prefix is None else self.prefix.shape[-2]

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of the record; `SideForm.pages` takes them."""
        given = (self.codes, self.scales, self.prefix, self.page_means, self.channel_scale)
        return [array for array in given if array is not None]

    @property
    def form(self) -> SideForm:
        has_means, has_scale = self.page_means is not None, self.channel_scale is not None
        return SideForm(self.codec, self.first_page, self.tiled, self.n_prefix, has_means, has_scale)

    def view(self, rows: mx.array, start: int) -> SideView:
        """These pages with f16 rows [n_kv_heads, tokens, head_dim] at positions from `start` on."""
        view = object.__new__(SideView)  # not the constructor, which takes ten times as long
        view.__dict__.update(self.__dict__, rows=rows, rows_start=start, host=None)
        return view

    def decoded(self, first: int, last: int) -> mx.array:
        """Rows f32 [n_kv_heads, tokens, head_dim] in original axes that pages first .. last - 1 decode to, lazily."""
        lo, hi = first - self.first_page, last - self.first_page
        if self.codec.is_float:
            return self.token_rows[lo * PAGE : hi * PAGE].swapaxes(0, 1).astype(mx.float32)
        assert self.codes is not None and self.scales is not None
        codes = to_rows(self.codec, self.codes[lo:hi]) if self.tiled else self.codes[lo:hi]
        rows = block_ops.decode_pages(self.codec, codes, self.scales[lo:hi])
        return rows if self.page_means is None else unbalance_pages(rows, self.page_means[lo:hi], self.channel_scale)

    def decoded_exactly(self, first: int, last: int) -> list[mx.array]:
        """`decoded` in parts that lie one after the other, with the exact prefix for the rows that it stands for."""
        blocks = self.decoded(first, last)
        return [blocks] if self.prefix is None or first else [self.prefix, blocks[:, self.n_prefix :]]


@dataclass(frozen=True)
class SideForm:
    """What `SidePages` are but for their arrays and how many pages there are: what a compiled step has in itself."""

    codec: Codec
    first_page: int
    tiled: bool
    n_prefix: int
    has_means: bool
    has_scale: bool

    def pages(self, end_page: int, arrays: Iterator[mx.array]) -> SidePages:
        """By the next of the arrays that `SidePages.arrays` gave."""
        codes = next(arrays)
        scales = None if self.codec.is_float else next(arrays)
        prefix = next(arrays) if self.n_prefix else None
        means = next(arrays) if self.has_means else None
        scale = next(arrays) if self.has_scale else None
        return SidePages(self.codec, codes, scales, self.first_page, end_page, prefix, means, scale, self.tiled)


@dataclass(frozen=True, eq=False)
class SideView(SidePages):
    """One side as a step of one sequence reads it: its pages, and the rows from the step's first page on.

    rows: [n_kv_heads, tokens, head_dim] in their float type, at positions from `rows_start` to the end; everything that
    is held for float types, whose pages have no other form. host: `rows` as numpy, where a float side has them so: who
    reads those need not evaluate `rows`.
    """

    rows: mx.array = field(kw_only=True)
    rows_start: int = field(default=0, kw_only=True)
    host: NDArray[Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.is_float:  # its rows are its pages
            object.__setattr__(self, "first_page", self.rows_start // PAGE)
            object.__setattr__(self, "end_page", (self.rows_start + self.rows.shape[1]) // PAGE)

    @property
    def token_rows(self) -> mx.array:
        return self.rows.swapaxes(0, 1)

    def starting_at(self, page: int) -> SideView:
        """Without the pages before `page`, which is no later than the one of `rows`' end."""
        if page <= self.first_page:
            return self
        if self.codec.is_float:
            cut = page * PAGE - self.rows_start
            host = None if self.host is None else self.host[:, cut:]
            return replace(self, rows=self.rows[:, cut:], host=host, rows_start=page * PAGE)
        cut = page - self.first_page
        parts = (self.codes, self.scales, self.page_means)
        codes, scales, means = (None if part is None else part[cut:] for part in parts)
        return replace(self, codes=codes, scales=scales, page_means=means, first_page=page, prefix=None)


@dataclass(frozen=True, eq=False)
class Pages:
    """The whole pages of a layer. slots: for each of several sequences, where its pages from page 0 on lie in the
    planes of both sides (pages that no query can see any more may name any slot); None for one sequence, whose pages
    lie in order."""

    k: SidePages
    v: SidePages
    slots: Sequence[Sequence[int]] | None = None
    kept: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    """What steps over the same pages share."""

    @property
    def first_page(self) -> int:
        """The first that both sides hold."""
        return max(self.k.first_page, self.v.first_page)

    @property
    def most_pages(self) -> int:
        """Pages before a step's own, of the longest sequence."""
        return self.k.end_page if self.slots is None else max(map(len, self.slots))

    def most_seen(self, window: int | None) -> int:
        """How many of them a step's queries see at most."""
        held = self.most_pages - self.first_page
        return held if window is None else min(held, (window + PAGE - 2) // PAGE)


@dataclass(eq=False)
class Growth:
    """New rows of a step that make tails longer and fill at most their page, before and after they are joined to them.

    tails: f16 [sequences, n_kv_heads, PAGE, head_dim], the rows after each sequence's whole pages; what lies after its
    last row may be anything. new: [sequences, n_kv_heads, rows, head_dim] of any float type. offsets: the position of
    each one's first new row. n_own: how many of the rows are a sequence's own. position: int32 [8] on the device that
    begins with the only sequence's offset, in the place of `offsets`. is_ours: whether nobody else reads what lies
    after the tails' last rows. joined: the tails with their rows, once somebody has joined them.
    """

    tails: Pair
    new: Pair
    offsets: tuple[int, ...]
    n_own: tuple[int, ...]
    position: mx.array | None = None
    is_ours: bool = False
    joined: Pair | None = None

    @property
    def offset(self) -> int:
        """Of the only sequence."""
        return self.offsets[0]

    @property
    def n_rows(self) -> int:
        return self.new[0].shape[2]

    @property
    def end_in_page(self) -> int:
        """Rows of the only sequence's tail, with the new ones."""
        return self.offset % PAGE + self.n_own[0]


def prefix_length(k: SidePages, v: SidePages) -> int:
    """Tokens of the exact prefix that a side holds apart from its blocks; 0 where neither does."""
    return max(k.n_prefix, v.n_prefix)


def first_seen_page(offset: int, window: int | None) -> int:
    """The first page that a query at `offset` or later can see."""
    return 0 if window is None else max(0, offset - window + 1) // PAGE


def first_read_page(k: SidePages, v: SidePages, offset: int, window: int | None) -> int:
    """The first page that is held and that a query at `offset` or later can see."""
    return max(k.first_page, v.first_page, first_seen_page(offset, window))


def cuts(start: int, end: int, step: int = PAGE) -> list[int]:
    """The range start .. end cut at absolute multiples of `step`, both ends included."""
    return [start, *range((start // step + 1) * step, end, step), end]


def padded(rows: mx.array, length: int) -> mx.array:
    """Rows [n_kv_heads, tokens, head_dim] as [n_kv_heads, length, head_dim]: zeros after those that there are."""
    missing = length - rows.shape[1]
    return mx.pad(rows, [(0, 0), (0, missing), (0, 0)]) if missing else rows
