"""Attention, decoding and encoding by the GPU kernels: the backend of a GPU.

Steps of a few rows are answered by decode attention straight from blocks, longer ones in `long_steps`; rows of float
types are left to MLX's own attention. What kernels do not read (types or head sizes) is left to MLX operations, whose
fast twin this is.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.attention.arithmetic import MlxArithmetic
from tqgguf.runtime.attention.backend import MlxBackend, no_rows
from tqgguf.runtime.attention.long_steps import MASK_BYTES, WORKSPACE_BYTES, LongSteps, causal_mask
from tqgguf.runtime.attention.partial import PartialAttention
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.kernels.decode_attention import append_and_attend, attend_rows, join_tails, n_shares, refusal_of
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.pages import decode_all, decode_rows, encode_pages, join_rows
from tqgguf.runtime.kernels.types import is_supported
from tqgguf.runtime.kv.pages import (
    PAGE,
    Growth,
    Pages,
    Pair,
    Query,
    SidePages,
    SideView,
    cuts,
    first_read_page,
    prefix_length,
)
from tqgguf.runtime.kv.tiles import can_be_tiled, to_tiles

MOST_ROWS = {"metal": 8, "cuda": 32}
"""Rows of a step up to which blocks are read by decode attention, by family of devices; longer steps decode them first.
CUDA's is measured (benchmarks/LOG.md), Metal's is a guess."""

_QUERY_TYPES = (mx.float16, mx.bfloat16, mx.float32)


class KernelArithmetic(MlxArithmetic):
    """MLX's, with pages decoded by a kernel."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def decode(self, side: SidePages, first: int, last: int) -> Any:
        if not is_supported(side.codec):
            return super().decode(side, first, last)
        pages = side.view(no_rows(side), last * PAGE)
        return decode_rows(self._launcher, pages, first * PAGE, last * PAGE, dtype=mx.float32, unrotated=False)


class KernelBackend(MlxBackend):
    """MLX's operations with kernels in the places that count. most_rows, workspace_bytes, mask_bytes: instead of the
    constants. partial: for long steps, instead of what MLX has here."""

    def __init__(
        self,
        launcher: Launcher,
        most_rows: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        mask_bytes: int = MASK_BYTES,
        partial: PartialAttention | None = None,
    ) -> None:
        self.launcher, self.arithmetic = launcher, KernelArithmetic(launcher)
        self.most_rows = MOST_ROWS[launcher.family] if most_rows is None else most_rows
        self.long_steps = LongSteps(launcher, partial, workspace_bytes, mask_bytes)

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        if not _can_encode(codec, rows):
            return super().encode(codec, rows)
        codes, scales, _ = encode_pages(self.launcher, codec, rows)
        return codes[0], scales[0]

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        if not _can_encode(codec, rows):
            super().check_finite(codec, rows)

    def tiles_values(self, codec: Codec) -> bool:
        return can_be_tiled(codec) and is_supported(codec)

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
        if not _can_encode(codec, rows):
            codes, scales, means = super().encode_pages(codec, rows, n_skipped=n_skipped, centred=centred, scale=scale)
            return to_tiles(codec, codes) if tiled else codes, scales, means
        return encode_pages(
            self.launcher, codec, rows, n_skipped=n_skipped, centred=centred, channel_scale=scale, tiled=tiled
        )

    def join_rows(self, rows: tuple[mx.array | None, mx.array | None], new: Pair) -> Pair:
        return join_rows(self.launcher, rows, new)

    def join(self, growth: Growth) -> Pair:
        return join_tails(self.launcher, growth)

    def dequantise(self, side: SideView, offset: int, dtype: mx.Dtype) -> mx.array:
        if side.codec.is_float or not is_supported(side.codec) or dtype not in _QUERY_TYPES:
            return super().dequantise(side, offset, dtype)
        coded_end = max(offset // PAGE, side.first_page) * PAGE
        return decode_all(self.launcher, side, coded_end, dtype)

    def dequantise_pages(self, side: SidePages, first: int, dtype: mx.Dtype) -> mx.array:
        if not is_supported(side.codec):
            return super().dequantise_pages(side, first, dtype)
        end, in_kernel = side.end_page * PAGE, dtype if dtype in _QUERY_TYPES else mx.float32
        rows = decode_rows(self.launcher, side.view(no_rows(side), end), first * PAGE, end, dtype=in_kernel)
        return rows[None].astype(dtype)

    def append_and_attend(
        self, q: mx.array, pages: Pages, growth: Growth, query: Query, reads: Reads | None = None
    ) -> tuple[mx.array, Pair]:
        k, v, n_rows = pages.k, pages.v, q.shape[2]
        if n_rows > self.most_rows or refusal_of(k.codec, v.codec) is not None:
            return super().append_and_attend(q, pages, growth, query, reads)
        rows = q if q.dtype in _QUERY_TYPES else q.astype(mx.float32)
        out, tails = append_and_attend(self.launcher, rows, pages, growth, query)
        if reads is not None and growth.position is None and pages.slots is None:
            first = growth.offset
            reads.count_page(first, first + n_rows, k.codec, v.codec, query.window, prefix_length(k, v))
        return out.astype(q.dtype), tails

    def answers_batches(self, k: Codec, v: Codec, n_rows: int) -> bool:
        in_blocks = not k.is_float and not v.is_float
        return in_blocks and n_rows <= self.most_rows and refusal_of(k, v) is None

    def compiles(self, k: Codec, v: Codec) -> bool:
        return refusal_of(k, v) is None

    def compiled(self, function: Any) -> Any:
        return self.launcher.compiled(function)

    def wait(self) -> None:
        self.launcher.wait()

    def n_shares(self, pages: Pages, n_kv_heads: int, group_size: int, window: int | None) -> int:
        return n_shares(self.launcher, pages, n_kv_heads, group_size, window)

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
        n_rows = q.shape[2]
        all_float = k.codec.is_float and v.codec.is_float
        in_kernels = is_supported(k.codec) and is_supported(v.codec)
        if own_from_blocks or q.dtype not in _QUERY_TYPES or not (in_kernels or all_float):
            return super().attend(q, k, v, offset=offset, query=query, reads=reads, own_from_blocks=own_from_blocks)
        pages = [(lo, hi) for lo, hi in pairwise(cuts(offset, offset + n_rows))]
        if all_float:
            out = _attend_floats(q, k, v, offset, query)
        elif n_rows <= self.most_rows:
            parts = [
                attend_rows(self.launcher, q[:, :, lo - offset : hi - offset], k, v, offset=lo, query=query)
                for lo, hi in pages
            ]
            out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        else:
            out = self.long_steps.attend(q, k, v, offset=offset, query=query)
        if reads is not None:
            for lo, hi in pages:
                reads.count_page(lo, hi, k.codec, v.codec, query.window, prefix_length(k, v))
        return out


def _attend_floats(q: mx.array, k: SideView, v: SideView, offset: int, query: Query) -> mx.array:
    """Float types on both sides: MLX's own attention over their rows."""
    start = PAGE * first_read_page(k, v, offset, query.window)
    dtype = k.rows.dtype if k.rows.dtype == v.rows.dtype else mx.float32
    keys, values = (side.rows[None, :, start - side.rows_start :].astype(dtype) for side in (k, v))
    out = mx.fast.scaled_dot_product_attention(
        q.astype(dtype),
        keys,
        values,
        scale=query.scale,
        mask=causal_mask(start, offset, offset + q.shape[2], query.window),
        sinks=None if query.sinks is None else query.sinks.astype(dtype),
    )
    return out.astype(q.dtype)


def _can_encode(codec: Codec, rows: mx.array) -> bool:
    return not codec.is_float and is_supported(codec) and rows.dtype in (mx.float16, mx.float32)
