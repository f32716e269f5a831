"""A step of several sequences at once, as the dispatcher of `hook` attends from one: sequence by sequence.

Knows nothing of where the sequences' rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.hook import Step, Usage

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
        if q.ndim != 4 or q.shape[0] != len(self.steps) or q.shape[2] != self.n_rows:
            raise RequestError(
                f"layer {self.layer}: expected queries of {len(self.steps)} sequences and {self.n_rows} columns, "
                f"found {list(q.shape)}"
            )
        parts: list[mx.array | None] = []
        for i, (step, (lo, hi)) in enumerate(zip(self.steps, self.columns, strict=True)):
            part = None if step is None else step.attend(q[i : i + 1, :, lo:hi], scale, window, sinks)
            if part is not None and hi - lo < self.n_rows:
                part = mx.pad(part, [(0, 0), (0, 0), (lo, self.n_rows - hi), (0, 0)])
            parts.append(part)
        shape = next((part.shape for part in parts if part is not None), q.shape)
        return mx.concatenate([mx.zeros(shape, dtype=q.dtype) if part is None else part for part in parts])

    def refusal(self, reason: str) -> RequestError:
        step = next((step for step in self.steps if step is not None), None)
        return RequestError(f"layer {self.layer}: {reason}") if step is None else step.refusal(reason)
