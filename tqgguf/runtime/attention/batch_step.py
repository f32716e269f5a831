"""A step of several sequences at once, as the dispatcher of `hook` attends from one: sequence by sequence, or from a
pool of all.

Knows nothing of where the sequences' rows are kept otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.hook import Step, Usage, refusal
from tqgguf.runtime.attention.readings import Reading
from tqgguf.runtime.kv.page_pool import PagePool, PoolGrowth

Columns = tuple[int, int]
"""The first column of a step that is a sequence's own, and the one after its last."""


@dataclass(eq=False, slots=True)
class BatchStep:
    """One update of a layer for a batch. steps: of the sequences, None where one has no column of its own."""

    steps: Sequence[Step | None]
    columns: Sequence[Columns]
    n_rows: int
    layer: int
    usage: Usage

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Attention of q [sequences, n_heads, columns, head_dim], zeros in columns that are padding. RequestError:
        queries of another shape."""
        _check_queries(q, len(self.steps), self.n_rows, self.layer)
        parts: list[mx.array | None] = []
        for i, (step, (lo, hi)) in enumerate(zip(self.steps, self.columns, strict=True)):
            part = None if step is None else step.attend(q[i : i + 1, :, lo:hi], scale, window, sinks)
            if part is not None and hi - lo < self.n_rows:
                part = mx.pad(part, [(0, 0), (0, 0), (lo, self.n_rows - hi), (0, 0)])
            parts.append(part)
        shape = next((part.shape for part in parts if part is not None), q.shape)
        return mx.concatenate([mx.zeros(shape, dtype=q.dtype) if part is None else part for part in parts])

    def refusal(self, reason: str) -> RequestError:
        return refusal(self.layer, reason)


@dataclass(eq=False, slots=True)
class PooledStep:
    """One update of a layer for a batch in a pool. is_attended: whether somebody has attended from it."""

    pool: PagePool
    growth: PoolGrowth
    n_rows: int
    layer: int
    window: int | None
    reading: Reading
    usage: Usage
    is_attended: bool = False

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """As `BatchStep.attend`, but that columns of padding hold anything."""
        growth, (n_kv_heads, head_dim) = self.growth, self.growth.new[0].shape[1::2]
        _check_queries(q, len(growth.offsets), self.n_rows, self.layer)
        n_heads = q.shape[1]
        if not n_heads or n_heads % n_kv_heads or q.shape[3] != head_dim:
            raise RequestError(
                f"layer {self.layer}: expected queries of a multiple of {n_kv_heads} heads of {head_dim} values, "
                f"found {list(q.shape)}"
            )
        if sinks is not None and sinks.shape != (n_heads,):
            raise RequestError(f"layer {self.layer}: expected {n_heads} sink logits, found {list(sinks.shape)}")
        self.is_attended = True
        self.pool.observe(growth, q)
        window = window if self.window is None else self.window
        out, tails = self.reading.answer_batch(q, growth, scale=scale, window=window, sinks=sinks)
        self.pool.take(growth, tails)
        return out

    def refusal(self, reason: str) -> RequestError:
        return refusal(self.layer, reason)


def _check_queries(q: mx.array, n_sequences: int, n_rows: int, layer: int) -> None:
    if q.ndim != 4 or q.shape[0] != n_sequences or q.shape[2] != n_rows:
        raise RequestError(
            f"layer {layer}: expected queries of {n_sequences} sequences and {n_rows} columns, found {list(q.shape)}"
        )
