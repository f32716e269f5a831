"""What a cache asks of the device that it lives on: blocks made of pages, rows joined, attention.

`Backend` answers everything by an `Arithmetic`; numpy's and MLX's operations are such. `c_backend` and `kernel_backend`
put something faster in the places that count. Which of them serves is decided in `backends`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.arithmetic import Arithmetic, MlxArithmetic, NumpyArithmetic
from tqgguf.runtime.attention.attend import attend_tiles
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.balance import page_mean_mlx, page_mean_numpy, page_scale_mlx
from tqgguf.runtime.kv.page_encoder import PageEncoder
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Pair, Query, SidePages, SideView, first_seen_page


class Backend(PageEncoder):
    """How pages are encoded, how rows are joined, and how queries are answered. `arithmetic`: of whatever has no faster
    way."""

    arithmetic: Arithmetic

    def float_rows(self, cache_type: str, new: mx.array) -> NDArray[Any] | None:
        """New rows [1, n_kv_heads, tokens, head_dim] in a float type, where they are kept by numpy; else None."""
        return None

    def join_side(self, rows: mx.array | None, new: mx.array) -> mx.array:
        """f16 rows [n_kv_heads, tokens, head_dim], or none, with new ones [1, ...] of any float type after them, in
        f16."""
        return block_ops.join_rows(rows, new)

    def join_rows(self, rows: tuple[mx.array | None, mx.array | None], new: Pair) -> Pair:
        """`join_side` of K and V, which hold equally many tokens."""
        return self.join_side(rows[0], new[0]), self.join_side(rows[1], new[1])

    def join(self, growth: Growth) -> Pair:
        """The tails with each sequence's own new rows where they stand in its page."""
        raise NotImplementedError

    def tail_view(self, side: SidePages, tail: mx.array, n_rows: int, page: int) -> SideView:
        """A sequence's pages with the first rows of its tail after them."""
        return side.view(tail[0, :, :n_rows], page * PAGE)

    def dequantise(self, side: SideView, offset: int, dtype: mx.Dtype) -> mx.array:
        """Every held row [1, n_kv_heads, tokens, head_dim], lazily: decoded blocks, and float rows from `offset`'s page
        on.

        Models that compute attention by themselves read this; rows of a step that spans pages then see the step's
        earlier pages in f16 too, where attention from blocks would see them as blocks.
        """
        end_page = offset // PAGE
        if side.codes is None or end_page <= side.first_page:
            return block_ops.as_float(side.rows, dtype)[None]
        parts = [*side.decoded_exactly(side.first_page, end_page), side.rows]
        return block_ops.as_float(mx.concatenate(parts, axis=1), dtype)[None]

    def dequantise_pages(self, side: SidePages, first: int, dtype: mx.Dtype) -> mx.array:
        """What pages from `first` on decode to, lazily: [1, n_kv_heads, tokens, head_dim]."""
        end = side.end_page * PAGE
        return self.dequantise(side.view(no_rows(side), end).starting_at(first), end, dtype)

    def dequantise_growth(
        self, side: SidePages, first: int, tail: mx.array, n_held: int, new: mx.array, keeps: bool
    ) -> mx.array:
        """`dequantise` of pages from `first` on, of n_held rows of a tail and of new rows after them. keeps: what the
        pages decode to, for the next steps: it takes memory only if somebody evaluates it."""
        dtype = new.dtype
        rows = [block_ops.as_float(tail[:, :, :n_held], dtype), block_ops.as_float(block_ops.to_f16(new), dtype)]
        if first < side.end_page:
            blocks = side.kept.get(("decoded", first, dtype))
            if blocks is None:
                blocks = self.dequantise_pages(side, first, dtype)
            if keeps:
                side.kept["decoded", first, dtype] = blocks
            rows.insert(0, blocks)
        return mx.concatenate(rows, axis=2)

    def attend(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        *,
        offset: int,
        query: Query,
        reads: Reads | None = None,
        own_from_blocks: bool = False,
    ) -> mx.array:
        """Causal attention of queries [1, n_heads, rows, head_dim] at positions offset .. offset + rows - 1.

        k and v hold every key up to the last query's own. reads: counted into. own_from_blocks: queries read their own
        page as blocks too, where it has been encoded. Returns [1, n_heads, rows, head_dim of v] in q's dtype.
        """
        return attend_tiles(
            self.arithmetic, q, k, v, offset=offset, query=query, reads=reads, own_from_blocks=own_from_blocks
        )

    def append_and_attend(
        self, q: mx.array, pages: Pages, growth: Growth, query: Query, reads: Reads | None = None
    ) -> tuple[mx.array, Pair]:
        """Attention of a step's queries [sequences, n_heads, rows, head_dim] over pages and tails with the step's rows;
        and those tails. Answers of rows that are not a sequence's own mean nothing.

        Whatever decodes comes here. Several sequences, and a position on the device, only where `answers_batches` and
        `compiles` say so; reads are counted for one sequence.
        """
        tails = growth.joined or self.join(growth)
        n_rows, page = growth.end_in_page, growth.offset // PAGE
        k, v = (self.tail_view(side, tail, n_rows, page) for side, tail in zip((pages.k, pages.v), tails, strict=True))
        first = first_seen_page(growth.offset, query.window)
        k, v = k.starting_at(first), v.starting_at(first)
        return self.attend(q, k, v, offset=growth.offset, query=query, reads=reads), tails

    def answers_batches(self, k: Codec, v: Codec, n_rows: int) -> bool:
        """Whether `append_and_attend` takes steps of that many rows of several sequences at once."""
        return False

    def compiles(self, k: Codec, v: Codec) -> bool:
        """Whether `append_and_attend` takes a position on the device, and reads nothing on the host then."""
        return False

    def compiled(self, function: Any) -> Any:
        """A function of arrays whose shapes do not change from call to call, as MLX compiles it where that can be."""
        return function

    def wait(self) -> None:
        """Return when what has been asked for can be evaluated without another compiler's delay."""

    def n_shares(self, pages: Pages, n_kv_heads: int, group_size: int, window: int | None) -> int:
        """What a compiled step makes of the number of its pages: the same graph serves all that have the same.
        group_size: query heads of a KV head."""
        return 0


def no_rows(side: SidePages) -> mx.array:
    """f16 [n_kv_heads, 0, head_dim] of a side that holds pages."""
    n_kv_heads = 0 if side.codes is None else side.codes.shape[1]
    return mx.zeros((n_kv_heads, 0, side.codec.head_dim), dtype=mx.float16)


class NumpyBackend(Backend):
    """For the CPU, by numpy. Evaluates what it reads."""

    arithmetic: Arithmetic = NumpyArithmetic()

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        return block_ops.encode_page_numpy(codec, rows)

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        block_ops.check_finite_numpy(rows)

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        return page_mean_numpy(rows, n_skipped)

    def float_rows(self, cache_type: str, new: mx.array) -> NDArray[Any] | None:
        if new.dtype != mx.float32 or cache_type == "bf16":
            return None
        return block_ops.to_f16_numpy(new) if cache_type == "f16" else np.asarray(new)

    def join_side(self, rows: mx.array | None, new: mx.array) -> mx.array:
        if new.dtype != mx.float32:
            return super().join_side(rows, new)
        values = block_ops.to_f16_numpy(new)[0]
        return mx.array(values if rows is None else np.concatenate([np.asarray(rows), values], axis=1))

    def join(self, growth: Growth) -> Pair:
        tails = self.own_tails(growth)
        for tail, new in zip(tails, growth.new, strict=True):
            rows, values = np.asarray(tail), _f16_values(new)
            for i, (offset, n_own) in enumerate(zip(growth.offsets, growth.n_own, strict=True)):
                start = offset % PAGE
                rows[i, :, start : start + n_own] = values[i, :, :n_own]
        return tails

    def own_tails(self, growth: Growth) -> Pair:
        """A growth's tails to write its rows into: its own where nobody else can see that (`Growth.is_ours`), else
        copies."""
        if growth.is_ours:
            return growth.tails
        k, v = (mx.array(np.asarray(tail)) for tail in growth.tails)
        return k, v

    def tail_view(self, side: SidePages, tail: mx.array, n_rows: int, page: int) -> SideView:
        view = super().tail_view(side, tail, n_rows, page)
        view.__dict__["host"] = np.asarray(tail)[0, :, :n_rows]
        return view


def _f16_values(new: mx.array) -> NDArray[np.float16]:
    return block_ops.to_f16_numpy(new) if new.dtype == mx.float32 else np.asarray(block_ops.to_f16(new))


class MlxBackend(Backend):
    """By operations of MLX, lazily: for GPUs without kernels, and the kernels' plain twin in tests."""

    arithmetic: Arithmetic = MlxArithmetic()

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        return block_ops.encode_page_mlx(codec, rows)

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        if not block_ops.can_encode(codec):  # its encoder would refuse them, but later
            block_ops.check_finite_numpy(rows)

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        return page_mean_mlx(rows, n_skipped)

    def page_scale(
        self, page: mx.array, mean: mx.array, query_squares: mx.array | None, n_skipped: int, layout: RopeLayout
    ) -> mx.array:
        return page_scale_mlx(page, mean, query_squares, n_skipped, layout)

    def join(self, growth: Growth) -> Pair:
        at = mx.array(growth.offset, dtype=mx.int32) if growth.position is None else growth.position[0]
        row = mx.arange(PAGE) - at % PAGE
        is_new = ((row >= 0) & (row < growth.n_rows))[None, None, :, None]
        places = mx.clip(row, 0, growth.n_rows - 1)
        k, v = (
            mx.where(is_new, mx.take(block_ops.to_f16(new), places, axis=2), tail)
            for tail, new in zip(growth.tails, growth.new, strict=True)
        )
        return k, v

    def compiles(self, k: Codec, v: Codec) -> bool:
        return all(codec.cache_type == "f16" or not codec.is_float for codec in (k, v))  # tails are f16

    def compiled(self, function: Any) -> Any:
        return mx.compile(function)

    def append_and_attend(
        self, q: mx.array, pages: Pages, growth: Growth, query: Query, reads: Reads | None = None
    ) -> tuple[mx.array, Pair]:
        if growth.position is None:
            return super().append_and_attend(q, pages, growth, query, reads)
        if q.shape[2] != 1:
            raise RequestError(f"expected steps of one row where the position is on the device, found {q.shape[2]}")
        tails = self.join(growth)
        return _attend_in_page(q, pages, tails, growth.position[0], query), tails


def _attend_in_page(q: mx.array, pages: Pages, tails: Pair, at: mx.array, query: Query) -> mx.array:
    """Attention of one row whose position is a number on the device: what it must not see is masked."""
    own_start, first = at // PAGE * PAGE, pages.first_page
    last = min(side.first_page + side.n_there for side in (pages.k, pages.v))
    places = mx.concatenate([mx.arange(first * PAGE, last * PAGE), own_start + mx.arange(PAGE)])
    seen = (places <= at) & ((mx.arange(places.size) >= (last - first) * PAGE) | (places < own_start))
    if query.window is not None:
        seen &= places > at - query.window
    keys, values = (
        _rows_in_page(side, tail, first, last) for side, tail in zip((pages.k, pages.v), tails, strict=True)
    )
    out = mx.fast.scaled_dot_product_attention(
        q.astype(mx.float32),
        keys[None],
        mx.where(seen[:, None], values, 0.0)[None],  # rows that are not there yet may hold anything
        scale=query.scale,
        mask=seen[None],
        sinks=None if query.sinks is None else query.sinks.astype(mx.float32),
    )
    return block_ops.as_float(out, q.dtype)


def _rows_in_page(side: SidePages, tail: mx.array, first: int, last: int) -> mx.array:
    """float32 [n_kv_heads, tokens, head_dim] in original axes: pages first .. last - 1 as blocks, then the tail."""
    parts = [tail[0]] if first == last else [*side.decoded_exactly(first, last), tail[0]]
    return mx.concatenate([part.astype(mx.float32) for part in parts], axis=1)
