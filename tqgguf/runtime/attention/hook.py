"""How attention from blocks gets into mlx-lm's models without changing them.

A block cache returns `LazyKV` arrays: their own value is the lazy, dequantised K or V, right for anybody who computes
with it, and they carry the step that made them. `install` puts a dispatcher in the place of
`scaled_dot_product_attention` in every loaded model module; it sees the step on the keys and attends from the blocks.
Every other use is a fallback: counted, and an error under strict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.attend import attend
from tqgguf.runtime.attention.readings import Reading, Reads
from tqgguf.runtime.kv.balance import ChannelScale
from tqgguf.runtime.kv.side_view import SideView
from tqgguf.runtime.kv.sides import Growth, Waiting

_MODELS = "mlx_lm.models"
_original = base.scaled_dot_product_attention


@dataclass
class Usage:
    """What attention read, for all layers of one prompt cache.

    unattended: layers from whose last step nobody has attended (yet). observer: called with every step that is attended
    from, its queries [1, n_heads, rows, head_dim] and their scale.
    """

    strict: bool = False
    reads: Reads = field(default_factory=Reads)
    by_fallback: int = 0
    unattended: set[int] = field(default_factory=set)
    observer: Callable[[Step, mx.array, float], None] | None = None


@dataclass(eq=False, slots=True)
class Step:
    """One update of a layer's cache: its sides as attention may read them, and where its rows stand.

    Nobody changes one; frozen, it would take four times as long to make, for every layer and token.
    """

    k: SideView
    v: SideView
    layer: int
    offset: int
    n_rows: int
    window: int | None
    reading: Reading
    usage: Usage
    own_from_blocks: bool = False
    scale: ChannelScale | None = None
    """Counts the queries, while it is open."""
    waiting: Waiting | None = None
    """Has what is read of K, instead of `k`, where pages were not encoded before the queries are known."""
    growth: Growth | None = None
    """Has the step's rows, which are not among those of `k` and `v`, where attention is to join them."""

    def open(self) -> None:
        """Count the step as a fallback until somebody attends from it."""
        if self.usage.strict and self.layer in self.usage.unattended:
            raise self.refusal("the model computes attention by itself")
        self.usage.unattended.add(self.layer)
        self.usage.by_fallback += self._n_reads

    def attend(self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Attention of q [1, n_heads, rows, head_dim] from the blocks. RequestError: queries of another shape."""
        self.check_queries(q, sinks)
        self.usage.unattended.discard(self.layer)
        self.usage.by_fallback -= self._n_reads
        if self.scale is not None:
            self.scale.observe(q[0], self.offset, self.k.rows.shape[0])
        if self.usage.observer is not None:
            self.usage.observer(self, q, scale)
        window = window if self.window is None else self.window
        k, v = self.k if self.waiting is None else self.waiting.view(), self.v
        growth = self.growth
        if growth is not None and growth.rows is None:
            answer = self.reading.answer_late(
                q,
                k,
                v,
                growth.new,
                offset=self.offset,
                scale=scale,
                window=window,
                sinks=sinks,
                reads=self.usage.reads,
            )
            if answer is not None:
                growth.take(answer[1:])
                return answer[0]
        if growth is not None:
            k, v = (view.with_rows(rows) for view, rows in zip((k, v), growth.join(), strict=True))
        return attend(
            q,
            k,
            v,
            offset=self.offset,
            scale=scale,
            reading=self.reading,
            window=window,
            sinks=sinks,
            reads=self.usage.reads,
            own_from_blocks=self.own_from_blocks,
        )

    def check_queries(self, q: mx.array, sinks: mx.array | None) -> None:
        """RequestError for queries that do not belong to the step's keys: what reads them in C checks nothing."""
        n_kv_heads, _, head_dim = self.k.rows.shape
        batch, n_heads, n_rows, width = q.shape if q.ndim == 4 else (0, 0, 0, 0)
        if batch != 1 or n_heads < 1 or n_heads % n_kv_heads or n_rows != self.n_rows or width != head_dim:
            raise RequestError(
                f"layer {self.layer}: expected queries [1, a multiple of {n_kv_heads}, {self.n_rows}, {head_dim}], "
                f"found {list(q.shape)}"
            )
        if sinks is not None and sinks.shape != (n_heads,):
            raise RequestError(f"layer {self.layer}: expected {n_heads} sink logits, found {list(sinks.shape)}")

    def refusal(self, reason: str) -> RequestError:
        return refusal(self.layer, reason)

    @property
    def _n_reads(self) -> int:
        return n_reads(self.offset, self.n_rows, self.window)


def n_reads(offset: int, n_rows: int, window: int | None) -> int:
    """Keys that queries at positions from `offset` on see, in all."""
    end = offset + n_rows
    if window is None:
        return (offset + 1 + end) * n_rows // 2
    return sum(min(n, window) for n in range(offset + 1, end + 1))


def refusal(layer: int, reason: str) -> RequestError:
    """What strict caches say of keys that nobody would read from their blocks."""
    return RequestError(
        f"layer {layer}: keys would be read by fallback instead of from their blocks ({reason}); "
        "leave --strict-kv out to allow it"
    )


class LazyKV(mx.array):
    """Dequantised keys or values [1, n_kv_heads, tokens, head_dim] with the step that made them."""

    step: Step


class CausalMask(mx.array):
    """A boolean causal mask that says which window it stands for (None: no window)."""

    window: int | None


def is_causal(mask: Any, n_rows: int) -> bool:
    """Whether a mask of mlx-lm's is known to be causal, with a window or without."""
    if isinstance(mask, CausalMask):
        return True
    return (isinstance(mask, str) and mask == "causal") or (mask is None and n_rows == 1)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    step: Any = getattr(keys, "step", None)
    step_of_values: Any = getattr(values, "step", None)
    if step is None or step_of_values is not step:
        return _original(queries, keys, values, cache, scale, mask, sinks)
    if is_causal(mask, step.n_rows):
        return step.attend(queries, scale, getattr(mask, "window", None), sinks)
    if step.usage.strict:
        raise step.refusal("the model's mask is not causal" if mask is None else "the model brings a mask of its own")
    return _original(queries, keys, values, cache, scale, mask, sinks)


def install() -> None:
    """Put the dispatcher into every mlx-lm model module that is loaded; modules loaded later need another call."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODELS) and getattr(module, "scaled_dot_product_attention", None) is _original:
            module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined]
