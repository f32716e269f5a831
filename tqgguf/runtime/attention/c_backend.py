"""Attention, decoding and encoding by the C library: the backend of a CPU that has it.

Steps are answered in C straight from the planes; on the slow paths long ones go the way of `attend.attend`, with
pages decoded in C. What C does not do (some encoders, head sizes that 32 does not divide) is left to numpy, whose fast
twin this is. Knows nothing of how a cache stores its sides beyond their `SideView`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.attention.arithmetic import NumpyArithmetic
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.attention.c_steps import FLOAT_KINDS, ViewSteps, common_steps, growth_steps
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Pair, Query, SidePages, SideView, cuts
from tqgguf.runtime.native.library import Library, is_supported

MOST_ROWS = {"portable": 2, "neon": 16}
"""Rows of a step up to which C is faster than matrix products over decoded pages. Measured: the other paths always are;
neon's figure is a careful guess."""


class CArithmetic(NumpyArithmetic):
    """numpy's, with pages decoded in C."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def decode(self, side: SidePages, first: int, last: int) -> Any:
        if not is_supported(side.codec):
            return super().decode(side, first, last)
        lo, hi = first - side.first_page, last - side.first_page
        return self._library.decode_pages(side.codec, np.asarray(side.codes)[lo:hi], np.asarray(side.scales)[lo:hi])


class CBackend(NumpyBackend):
    """numpy's way with C in the places that count. most_rows replaces the path's own limit of MOST_ROWS."""

    def __init__(self, library: Library, most_rows: int | None = None) -> None:
        self.library, self.most_rows, self.arithmetic = library, most_rows, CArithmetic(library)

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        """A page's rows [n_kv_heads, tokens, head_dim] to planes; numpy refuses what cannot be encoded."""
        if rows.dtype not in (mx.float16, mx.float32):
            return block_ops.encode_page_numpy(codec, rows)
        values = np.asarray(rows)
        if values.strides[-1] != values.itemsize:
            values = np.ascontiguousarray(values)
        encoded = self.library.encode(codec, values)
        if encoded is None:
            return block_ops.encode_page_numpy(codec, rows)
        codes, scales = encoded
        return mx.array(codes), mx.array(scales)

    def append_and_attend(
        self, q: mx.array, pages: Pages, growth: Growth, query: Query, reads: Reads | None = None
    ) -> tuple[mx.array, Pair]:
        """As `Backend` has it; of several sequences too, whose work threads share."""
        k, v = pages.k.codec, pages.v.codec
        in_blocks, reads_new = not k.is_float and not v.is_float, all(new.dtype in FLOAT_KINDS for new in growth.new)
        if not (in_blocks and reads_new and self._takes(q, k, v)):
            return super().append_and_attend(q, pages, growth, query, reads)
        tails = growth.joined or self.own_tails(growth)
        common = common_steps(pages, growth, q.shape[1], query)
        structs, out, alive = growth_steps(common, q, growth, tails)
        self.library.attend(structs)
        del alive
        if reads is not None and pages.slots is None:
            first = growth.offset
            reads.count_page(first, first + growth.n_own[0], k, v, query.window, common.n_prefix)
        return _as(out, q.dtype), tails

    def answers_batches(self, k: Codec, v: Codec, n_rows: int) -> bool:
        return not k.is_float and not v.is_float and self._answers(k, v, n_rows)

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
        if not self._takes(q, k.codec, v.codec):
            return super().attend(q, k, v, offset=offset, query=query, reads=reads, own_from_blocks=own_from_blocks)
        steps = ViewSteps(q, k, v, query)
        n_encoded = min(k.end_page, v.end_page) * PAGE if own_from_blocks else 0
        pages = [(lo, hi, lo < n_encoded) for lo, hi in pairwise(cuts(offset, offset + q.shape[2]))]
        parts = []
        for lo, hi, own in pages:
            structs, out = steps.step(lo - offset, lo, hi - lo, own)
            self.library.attend(structs)
            parts.append(out)
            if reads is not None:
                reads.count_page(lo, hi, k.codec, v.codec, query.window, steps.n_prefix, own)
        return _as((parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))[None], q.dtype)

    def _takes(self, q: mx.array, k: Codec, v: Codec) -> bool:
        return q.dtype in FLOAT_KINDS and self._answers(k, v, q.shape[2])

    def _answers(self, k: Codec, v: Codec, n_rows: int) -> bool:
        most = self.most_rows or MOST_ROWS.get(self.library.path_name, n_rows)
        return n_rows <= most and is_supported(k) and is_supported(v)


def _as(out: NDArray[np.float32], dtype: mx.Dtype) -> mx.array:
    answer = mx.array(out)
    return answer if dtype == mx.float32 else block_ops.as_float(answer, dtype)
