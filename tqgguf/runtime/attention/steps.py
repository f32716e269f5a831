"""A step: one update of a layer's cache, as attention may read it. The dispatcher of `hook` attends from the step that
it finds on the keys.

Knows nothing of where rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.reads import Usage, n_reads
from tqgguf.runtime.kv.balance import ChannelScale
from tqgguf.runtime.kv.page_pool import PagePool
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Query, SideView
from tqgguf.runtime.kv.sides import BlockSide, Waiting

Columns = tuple[int, int]
"""The first column of a step that is a sequence's own, and the one after its last."""


@dataclass(eq=False, slots=True)
class Step:
    """What the steps of one sequence, of a batch and of a pool have in common. window: of the layer.

    Nobody changes one; frozen, it would take four times as long to make, for every layer and token.
    """

    layer: int
    n_rows: int
    window: int | None
    backend: Backend
    usage: Usage

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Attention of q [sequences, n_heads, rows, head_dim] from the blocks; window: where the layer has none.
        RequestError: queries of another shape."""
        raise NotImplementedError

    def query(self, scale: float, window: int | None, sinks: mx.array | None) -> Query:
        return Query(scale, window if self.window is None else self.window, sinks)

    def check_queries(
        self, q: mx.array, sinks: mx.array | None, n_sequences: int, n_kv_heads: int, head_dim: int
    ) -> None:
        """RequestError for queries that do not belong to the step's keys: what reads them in C checks nothing."""
        batch, n_heads, n_rows, width = q.shape if q.ndim == 4 else (0, 0, 0, 0)
        expected = batch == n_sequences and n_rows == self.n_rows and width == head_dim
        if not expected or n_heads < 1 or n_heads % n_kv_heads:
            raise RequestError(
                f"layer {self.layer}: expected queries [{n_sequences}, a multiple of {n_kv_heads}, {self.n_rows}, "
                f"{head_dim}], found {list(q.shape)}"
            )
        if sinks is not None and sinks.shape != (n_heads,):
            raise RequestError(f"layer {self.layer}: expected {n_heads} sink logits, found {list(sinks.shape)}")

    def refusal(self, reason: str) -> RequestError:
        """What strict caches say of keys that nobody would read from their blocks."""
        return RequestError(
            f"layer {self.layer}: keys would be read by fallback instead of from their blocks ({reason}); "
            "leave --strict-kv out to allow it"
        )


@dataclass(eq=False, slots=True)
class SequenceStep(Step):
    """One sequence's rows from position `offset` on: either views of both sides that hold them, or pages and a growth.

    own_from_blocks: as `Backend.attend` has it. scale: counts the queries, while it is open. waiting: has what is read
    of K, instead of the view, where pages were not encoded before the queries are known. sides: get the joined tails.
    """

    offset: int
    views: tuple[SideView, SideView] | None = None
    own_from_blocks: bool = False
    scale: ChannelScale | None = None
    waiting: Waiting | None = None
    pages: Pages | None = None
    growth: Growth | None = None
    sides: tuple[BlockSide, BlockSide] | None = None

    def open(self) -> None:
        """Count the step as a fallback until somebody attends from it."""
        if self.usage.strict and self.layer in self.usage.unattended:
            raise self.refusal("the model computes attention by itself")
        self.usage.unattended.add(self.layer)
        self.usage.by_fallback += self._n_reads

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        n_kv_heads, head_dim = self._shape
        self.check_queries(q, sinks, 1, n_kv_heads, head_dim)
        self.usage.unattended.discard(self.layer)
        self.usage.by_fallback -= self._n_reads
        if self.scale is not None:
            self.scale.observe(q[0], self.offset, n_kv_heads)
        if self.usage.observer is not None:
            self.usage.observer(self, q, scale)
        query, reads = self.query(scale, window, sinks), self.usage.reads
        if self.growth is not None and self.pages is not None:
            out, tails = self.backend.append_and_attend(q, self.pages, self.growth, query, reads)
            self._take(self.growth, tails)
            return out
        return self.backend.attend(
            q, self.k, self.v, offset=self.offset, query=query, reads=reads, own_from_blocks=self.own_from_blocks
        )

    @property
    def k(self) -> SideView:
        """What is read of K."""
        return self._view(0) if self.waiting is None else self.waiting.view()

    @property
    def v(self) -> SideView:
        return self._view(1)

    def _view(self, side: int) -> SideView:
        if self.views is not None:
            return self.views[side]
        assert self.pages is not None and self.growth is not None
        self.join()
        assert self.growth.joined is not None
        pages, tail = (self.pages.k, self.pages.v)[side], self.growth.joined[side]
        return self.backend.tail_view(pages, tail, self.growth.end_in_page, self.offset // PAGE)

    def join(self) -> None:
        """Join the rows that no attention has joined."""
        if self.growth is not None and self.growth.joined is None:
            self._take(self.growth, self.backend.join(self.growth))

    def _take(self, growth: Growth, tails: tuple[mx.array, mx.array]) -> None:
        if growth.joined is None and self.sides is not None:
            growth.joined = tails
            for side, tail in zip(self.sides, tails, strict=True):
                side.take(tail, growth.end_in_page)

    @property
    def _shape(self) -> tuple[int, int]:
        """KV heads, and values of a key."""
        if self.growth is not None:
            _, n_kv_heads, _, head_dim = self.growth.new[0].shape
        else:
            assert self.views is not None
            n_kv_heads, _, head_dim = self.views[0].rows.shape
        return n_kv_heads, head_dim

    @property
    def _n_reads(self) -> int:
        return n_reads(self.offset, self.n_rows, self.window)


@dataclass(eq=False, slots=True)
class BatchStep(Step):
    """Several sequences' steps, attended from one by one; None where one has no column of its own."""

    steps: Sequence[SequenceStep | None]
    columns: Sequence[Columns]

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Zeros in columns that are padding."""
        if q.ndim != 4 or q.shape[0] != len(self.steps) or q.shape[2] != self.n_rows:
            n, found = len(self.steps), list(q.shape)
            raise RequestError(
                f"layer {self.layer}: expected queries of {n} sequences and {self.n_rows} columns, found {found}"
            )
        parts: list[mx.array | None] = []
        for i, (step, (lo, hi)) in enumerate(zip(self.steps, self.columns, strict=True)):
            part = None if step is None else step.attend(q[i : i + 1, :, lo:hi], scale, window, sinks)
            if part is not None and hi - lo < self.n_rows:
                part = mx.pad(part, [(0, 0), (0, 0), (lo, self.n_rows - hi), (0, 0)])
            parts.append(part)
        shape = next((part.shape for part in parts if part is not None), q.shape)
        return mx.concatenate([mx.zeros(shape, dtype=q.dtype) if part is None else part for part in parts])


@dataclass(eq=False, slots=True)
class PooledStep(Step):
    """Several sequences' rows in a pool, attended from at once. is_attended: whether somebody has."""

    pool: PagePool
    pages: Pages
    growth: Growth
    is_attended: bool = False

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Columns of padding hold anything."""
        growth = self.growth
        n_sequences, n_kv_heads, _, head_dim = growth.new[0].shape
        self.check_queries(q, sinks, n_sequences, n_kv_heads, head_dim)
        self.is_attended = True
        self.pool.observe(growth, q)
        out, tails = self.backend.append_and_attend(q, self.pages, growth, self.query(scale, window, sinks))
        self.pool.take(growth, tails)
        return out
