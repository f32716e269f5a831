"""Calibrating the channel scale of K: a text goes through a model with an f16 cache, and queries and keys are counted.

Statistics are of what a balanced cache would encode: keys of whole pages after their page's mean was subtracted,
without the exact prefix, and the queries that read them; page by page without what is far outside. What that is, and
how scales follow from the statistics, is `formats.balance`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import (
    NOT_ROTATED,
    RopeLayout,
    centred_squares,
    channel_scale,
    page_mean,
    summed_queries,
)
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import TURBO_PREFIX
from tqgguf.formats.errors import EncodeError, RequestError
from tqgguf.runtime.attention.steps import SequenceStep
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.kv.rope_layout import rope_layouts
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.text.grid import DEFAULT_CHUNK

Progress = Callable[[int, int], None]
"""Called with (tokens evaluated, tokens in all)."""


@dataclass
class LayerSquares:
    """Sums of squares float64 [n_kv_heads, head_dim] of one layer's queries, over each KV head's group, and keys."""

    queries: NDArray[np.float64]
    keys: NDArray[np.float64]

    def scale(self, layout: RopeLayout) -> NDArray[np.float32]:
        """The channel scale f32 [n_kv_heads, head_dim]."""
        return channel_scale(self.queries, self.keys, layout)


class QueryKeyStatistics:
    """An observer of steps (`Usage.observer`) of f16 caches that are filled in whole pages but for the last step.

    n_prefix: tokens at the start whose keys would stay exact, so that neither they nor their queries count.
    """

    def __init__(self, n_prefix: int = TURBO_PREFIX) -> None:
        self.n_prefix = n_prefix
        self.layers: dict[int, LayerSquares] = {}

    def __call__(self, step: SequenceStep, q: mx.array, scale: float) -> None:
        """Count the step's queries [1, n_heads, rows, head_dim] and the pages that its rows are. EncodeError: values
        that are not finite."""
        rows = np.asarray(step.k.rows)
        n_kv_heads, _, head_dim = rows.shape
        zeros = np.zeros((n_kv_heads, head_dim))
        squares = self.layers.setdefault(step.layer, LayerSquares(zeros, zeros))
        queries = np.asarray(q[0].astype(mx.float32)).astype(np.float64)
        new = rows[:, step.offset - step.k.rows_start :][:, : step.n_rows]
        if not (np.isfinite(queries).all() and np.isfinite(new).all()):
            raise EncodeError(f"layer {step.layer}: expected finite queries and keys, found others")
        by_token = (queries.reshape(n_kv_heads, -1, step.n_rows, head_dim) ** 2).sum(axis=1)
        for start in range(0, step.n_rows, PAGE_TOKENS):
            n_skipped = max(0, self.n_prefix - step.offset - start)
            page = slice(start, start + PAGE_TOKENS)
            squares.queries = squares.queries + summed_queries(by_token[:, page][:, n_skipped:])
            keys = new[:, page]
            if keys.shape[1] == PAGE_TOKENS:
                squares.keys = squares.keys + centred_squares(keys, page_mean(keys, n_skipped), n_skipped)


def calibrate(
    loaded: LoadedModel, windows: NDArray[np.int64], chunk: int = DEFAULT_CHUNK, progress: Progress | None = None
) -> dict[int, NDArray[np.float32]]:
    """Channel scales f32 [n_kv_heads, head_dim] of every layer with keys, from windows int64 [n_windows, n_ctx].

    Each window is evaluated on its own. RequestError: windows shorter than a page, or a model that computes attention
    by itself, so that no queries are seen; EncodeError: values that are not finite. What `progress` raises ends it.
    """
    n_windows, n_ctx = windows.shape
    if n_ctx < PAGE_TOKENS:
        raise RequestError(f"expected windows of {PAGE_TOKENS} tokens or more, whole pages, found {n_ctx} (-c)")
    statistics = QueryKeyStatistics()
    n_unseen = 0
    for i, window in enumerate(windows.tolist()):
        session = Session(loaded, n_ctx=n_ctx, chunk=chunk)
        session.usage.observer = statistics
        session.prefill(window, _shifted(progress, i * n_ctx, n_windows * n_ctx))
        n_unseen += session.usage.by_fallback
    if n_unseen or not statistics.layers:
        raise RequestError("the model computes attention by itself: its queries cannot be seen, nor be balanced for")
    layouts = rope_layouts(loaded.model)
    return {layer: squares.scale(_layout(layouts, layer)) for layer, squares in sorted(statistics.layers.items())}


def _layout(layouts: Sequence[RopeLayout], layer: int) -> RopeLayout:
    return layouts[layer] if layer < len(layouts) else NOT_ROTATED


def _shifted(progress: Progress | None, done_before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(done_before + done, total)
