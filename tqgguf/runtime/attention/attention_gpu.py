"""Attention, decoding and encoding by the GPU kernels: the reading of a GPU.

Steps of a few rows are answered by decode attention straight from blocks, longer ones in `long_steps`; rows of float
types are left to MLX's own attention. What kernels do not read (types or head sizes) is left to MLX operations, whose
fast twin this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.long_steps import MASK_BYTES, WORKSPACE_BYTES, LongSteps, causal_mask
from tqgguf.runtime.attention.partial import PartialAttention
from tqgguf.runtime.attention.readings import MlxReading, Reads
from tqgguf.runtime.kernels.batch_attention import attend_batch, grow_and_attend_batch, join_batch, refusal_of
from tqgguf.runtime.kernels.decode_attention import attend_blocks, attend_in_page, grow_and_attend, n_shares
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.pages import decode_all, decode_rows, encode_pages, join_in_page, join_rows
from tqgguf.runtime.kernels.tiles import can_be_tiled, to_tiles
from tqgguf.runtime.kernels.types import is_supported
from tqgguf.runtime.kv.page_pool import PoolGrowth
from tqgguf.runtime.kv.side_view import PAGE, SideView, cuts, first_read_page, prefix_length

MOST_ROWS = {"metal": 8, "cuda": 32}
"""Rows of a step up to which blocks are read by decode attention, by family of devices; longer steps decode them first.
CUDA's is measured (benchmarks/LOG.md), Metal's is a guess."""

_QUERY_TYPES = (mx.float16, mx.bfloat16, mx.float32)


class KernelReading(MlxReading):
    """MLX's reading with kernels in the places that count. most_rows, workspace_bytes, mask_bytes: instead of the
    constants. partial: for long steps, instead of what MLX has here."""

    def __init__(
        self,
        launcher: Launcher,
        most_rows: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        mask_bytes: int = MASK_BYTES,
        partial: PartialAttention | None = None,
    ) -> None:
        self.launcher = launcher
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

    def join_sides(
        self, tails: tuple[mx.array | None, mx.array | None], new: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        return join_rows(self.launcher, tails, new)

    def decode(self, side: SideView, first: int, last: int) -> Any:
        if not is_supported(side.codec):
            return super().decode(side, first, last)
        return decode_rows(self.launcher, side, first * PAGE, last * PAGE, dtype=mx.float32, unrotated=False)

    def dequantise(self, side: SideView, offset: int, dtype: mx.Dtype) -> mx.array:
        if side.codec.is_float or not is_supported(side.codec) or dtype not in _QUERY_TYPES:
            return super().dequantise(side, offset, dtype)
        coded_end = max(offset // PAGE, side.pages_start) * PAGE
        return decode_all(self.launcher, side, coded_end, dtype)

    def grows_late(self, k: Codec, v: Codec, n_rows: int) -> bool:
        return n_rows <= self.most_rows and is_supported(k) and is_supported(v)

    def compiles(self, k: Codec, v: Codec) -> bool:
        return refusal_of(k, v) is None

    def compiled(self, function: Any) -> Any:
        return self.launcher.compiled(function)

    def join_in_page(
        self, tails: tuple[mx.array, mx.array], new: tuple[mx.array, mx.array], n_held: mx.array
    ) -> tuple[mx.array, mx.array]:
        return join_in_page(self.launcher, tails, new, n_held)

    def answer_in_page(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        *,
        n_pages: int,
        position: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        if q.dtype not in _QUERY_TYPES:
            raise RequestError(f"expected queries of f16, bf16 or f32, found {q.dtype}")
        return attend_in_page(
            self.launcher, q, k, v, n_pages=n_pages, position=position, scale=scale, window=window, sinks=sinks
        )

    def n_shares(self, k: Codec, v: Codec, n_kv_heads: int, group_size: int, n_pages: int) -> int:
        return n_shares(self.launcher.family, k, v, n_kv_heads, group_size, n_pages)

    def takes_batches(self, k: Codec, v: Codec, n_rows: int) -> bool:
        return n_rows <= self.most_rows and refusal_of(k, v) is None

    def join_batch(
        self,
        tails: tuple[mx.array, mx.array],
        new: tuple[mx.array, mx.array],
        offsets: Sequence[int],
        n_own: Sequence[int],
    ) -> tuple[mx.array, mx.array]:
        return join_batch(self.launcher, tails, new, offsets, n_own)

    def answer_batch(
        self, q: mx.array, growth: PoolGrowth, *, scale: float, window: int | None, sinks: mx.array | None
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        queries = q.astype(_kernel_type(q.dtype))
        how: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
        how |= {"offsets": growth.offsets, "n_own": growth.n_own}
        if growth.joined is not None:
            out, tails = attend_batch(self.launcher, queries, growth.joined, growth.pages, **how), growth.joined
        else:
            out, *joined = grow_and_attend_batch(self.launcher, queries, growth.tails, growth.new, growth.pages, **how)
            tails = joined[0], joined[1]
        return out.astype(q.dtype), tails

    def dequantise_pages(self, side: SideView, end: int, dtype: mx.Dtype) -> mx.array:
        rows = decode_rows(self.launcher, side, side.pages_start * PAGE, end, dtype=_kernel_type(dtype))
        return rows[None].astype(dtype)

    def dequantise_late(self, side: SideView, offset: int, new: mx.array) -> mx.array:
        dtype, start = new.dtype, side.pages_start * PAGE
        tail = side.rows[None].astype(dtype)
        if start == side.rows_start:
            return mx.concatenate([tail, new], axis=2)
        blocks = side.kept.get(dtype)
        if blocks is None:  # for the whole page, since hardly anybody evaluates it
            blocks = side.kept[dtype] = self.dequantise_pages(side, side.rows_start, dtype)
        return mx.concatenate([blocks, tail, new], axis=2)

    def answer_late(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        new: tuple[mx.array, mx.array],
        *,
        offset: int,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        reads: Reads,
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        if q.dtype not in _QUERY_TYPES:
            return None
        found = grow_and_attend(self.launcher, q, k, v, new, offset=offset, scale=scale, window=window, sinks=sinks)
        reads.count_page(offset, offset + q.shape[2], k.codec, v.codec, window, prefix_length(k, v))
        return found

    def answer(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        *,
        offset: int,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        reads: Reads | None,
        own_from_blocks: bool,
    ) -> mx.array | None:
        """`attend.attend`, or None for a step that the kernels do not take."""
        n_rows = q.shape[2]
        all_float = k.codec.is_float and v.codec.is_float
        kernels = is_supported(k.codec) and is_supported(v.codec)
        if own_from_blocks or q.dtype not in _QUERY_TYPES or not (kernels or all_float):
            return None
        pages = [(lo, hi) for lo, hi in pairwise(cuts(offset, offset + n_rows))]
        if all_float:
            out = _attend_rows(q, k, v, offset, scale, window, sinks)
        elif n_rows <= self.most_rows:
            parts = [
                attend_blocks(
                    self.launcher,
                    q if len(pages) == 1 else q[:, :, lo - offset : hi - offset],
                    k,
                    v,
                    offset=lo,
                    scale=scale,
                    window=window,
                    sinks=sinks,
                )
                for lo, hi in pages
            ]
            out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        else:
            out = self.long_steps.attend(q, k, v, offset=offset, scale=scale, window=window, sinks=sinks)
        if reads is not None:
            for lo, hi in pages:
                reads.count_page(lo, hi, k.codec, v.codec, window, prefix_length(k, v))
        return out


def _attend_rows(
    q: mx.array, k: SideView, v: SideView, offset: int, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    """Float types on both sides: MLX's own attention over their rows."""
    start = PAGE * first_read_page(k, v, offset, window)
    dtype = k.rows.dtype if k.rows.dtype == v.rows.dtype else mx.float32
    keys, values = (side.rows[None, :, start - side.rows_start :].astype(dtype) for side in (k, v))
    out = mx.fast.scaled_dot_product_attention(
        q.astype(dtype),
        keys,
        values,
        scale=scale,
        mask=causal_mask(start, offset, offset + q.shape[2], window),
        sinks=None if sinks is None else sinks.astype(dtype),
    )
    return out.astype(q.dtype)


def _kernel_type(dtype: mx.Dtype) -> mx.Dtype:
    return dtype if dtype in _QUERY_TYPES else mx.float32


def _can_encode(codec: Codec, rows: mx.array) -> bool:
    return not codec.is_float and is_supported(codec) and rows.dtype in (mx.float16, mx.float32)
