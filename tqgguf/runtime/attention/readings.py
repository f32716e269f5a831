"""How a backend reads a cache's sides: decoding, rotating and loading into arrays of its own kind.

numpy on a CPU, MLX operations on a GPU; `attention_c` adds the C library. Which of them serves is decided in
`backends`, what is read by which query in `attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.products import product
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.balance import balance_rows, page_mean_mlx, page_mean_numpy
from tqgguf.runtime.kv.page_pool import PoolGrowth
from tqgguf.runtime.kv.side_view import PAGE, SideView


@dataclass
class Reads:
    """Keys and values that attention has read, summed over query rows and layers, by the way they were read."""

    keys_from_blocks: int = 0
    keys_in_float: int = 0
    values_from_blocks: int = 0
    values_in_float: int = 0

    def count(self, n: int, k_blocks: bool, v_blocks: bool) -> None:
        """Add n keys and the n values that belong to them."""
        self.keys_from_blocks += n * k_blocks
        self.keys_in_float += n * (not k_blocks)
        self.values_from_blocks += n * v_blocks
        self.values_in_float += n * (not v_blocks)

    def count_page(
        self, lo: int, hi: int, k: Codec, v: Codec, window: int | None, n_prefix: int, own_from_blocks: bool = False
    ) -> None:
        """Count what queries at positions lo .. hi - 1, all in one page, have read; as `attend.attend` does."""
        coded_end = 0 if k.is_float and v.is_float else hi if own_from_blocks else lo // PAGE * PAGE
        prefix = n_prefix if coded_end else 0
        seen = in_float = 0
        if not own_from_blocks and (window is None or hi <= window):  # every row sees from position 0 on
            seen = (lo + 1 + hi) * (hi - lo) // 2
            in_float = seen - (coded_end - prefix) * (hi - lo)
        else:
            for row in range(lo, hi):
                first = 0 if window is None else max(0, row - window + 1)
                seen += row + 1 - first
                in_float += max(0, row + 1 - max(first, coded_end)) + max(0, min(prefix, row + 1) - first)
        self.count(in_float, False, False)
        self.count(seen - in_float, not k.is_float, not v.is_float)


class Reading(Protocol):
    """How a backend turns a side's arrays into float32 arrays of its own kind (`xp`: numpy or mlx.core)."""

    xp: Any

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Rows f16 or f32 [n_kv_heads, tokens, head_dim] to codes uint8 and scales f16, [n_kv_heads, tokens, ...]."""

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        """As `sides.PageEncoder` has it."""

    def tiles_values(self, codec: Codec) -> bool:
        """Whether caches hold V's codes in the order of `kernels.tiles` for this backend."""
        return False

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
        """Rows f16 [n_kv_heads, pages * PAGE, head_dim] as whole pages: codes and scales [pages, n_kv_heads, PAGE,
        ...].

        centred: the mean of each page is taken out, and returned f16 [pages, n_kv_heads, head_dim], else None; scale:
        f32 [n_kv_heads, head_dim], multiplied into what is left. The first n_skipped rows become zero blocks.
        tiled: only where `tiles_values`.
        """
        starts = range(0, rows.shape[1], PAGE)
        pages = [
            self._encode_page(codec, rows[:, at : at + PAGE], 0 if at else n_skipped, centred, scale) for at in starts
        ]
        codes, scales, means = ([page[i] for page in pages] for i in range(3))
        if len(pages) == 1:
            return codes[0][None], scales[0][None], means[0][None] if centred else None
        return mx.stack(codes), mx.stack(scales), mx.stack(means) if centred else None

    def _encode_page(
        self, codec: Codec, rows: mx.array, n_skipped: int, centred: bool, scale: mx.array | None
    ) -> tuple[mx.array, mx.array, Any]:
        mean = None
        if centred:
            mean = self.page_mean(rows, n_skipped)
            rows = balance_rows(rows, mean, scale)
        if n_skipped:
            rows = mx.concatenate([mx.zeros_like(rows[:, :n_skipped]), rows[:, n_skipped:]], axis=1)
        return *self.encode(codec, rows), mean

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        """The mean f16 [n_kv_heads, head_dim] of rows f16 [n_kv_heads, tokens, head_dim] from n_skipped on."""

    def join(self, tail: mx.array | None, new: mx.array) -> mx.array:
        """f16 rows [n_kv_heads, tokens, head_dim], or none, and new ones [1, ...] of any float type after them: f16."""

    def host_rows(self, cache_type: str, new: mx.array) -> NDArray[Any] | None:
        """New rows of a float type as numpy, where rows are kept by numpy; else None."""
        return None

    def join_sides(
        self, tails: tuple[mx.array | None, mx.array | None], new: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """`join` for K and V, which hold equally many tokens."""
        return self.join(tails[0], new[0]), self.join(tails[1], new[1])

    def load(self, *arrays: mx.array) -> list[Any]:
        """float32 arrays of the backend."""

    def decode(self, side: SideView, first: int, last: int) -> Any:
        """Blocks of pages first .. last - 1, float32 [n_kv_heads, tokens, head_dim], rotated."""

    def dequantise(self, side: SideView, offset: int, dtype: mx.Dtype) -> mx.array:
        """Every held row [1, n_kv_heads, tokens, head_dim], lazily: decoded blocks, and float rows from `offset`'s page
        on.

        Models that compute attention by themselves read this; rows of a step that spans pages then see the step's
        earlier pages in f16 too, where attention from blocks would see them as blocks.
        """
        end_page = offset // PAGE
        if side.codes is None or end_page <= side.pages_start:
            return block_ops.as_float(side.rows, dtype)[None]
        blocks = side.decoded(side.pages_start, end_page)
        parts = [blocks, side.rows]
        if side.prefix is not None and side.pages_start == 0:
            parts = [side.prefix, blocks[:, side.prefix.shape[1] :], side.rows]
        return block_ops.as_float(mx.concatenate(parts, axis=1), dtype)[None]

    def grows_late(self, k: Codec, v: Codec, n_rows: int) -> bool:
        """Whether steps that only make tails longer are joined to them by `answer_late`, together with attention."""
        return False

    def dequantise_late(self, side: SideView, offset: int, new: mx.array) -> mx.array:
        """`dequantise` of a side to whose tail new rows are still to be joined."""
        return self.dequantise(side.with_rows(self.join(side.rows, new)), offset, new.dtype)

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
        """`answer`, and K's and V's tails with the new rows; None where `answer` is to be asked."""
        return None

    def compiles(self, k: Codec, v: Codec) -> bool:
        """Whether `join_in_page` and `answer_in_page` serve sides of these codecs."""
        return False

    def compiled(self, function: Any) -> Any:
        """A function of arrays whose shapes do not change from call to call, as MLX compiles it where that can be."""
        return function

    def join_in_page(
        self, tails: tuple[mx.array, mx.array], new: tuple[mx.array, mx.array], n_held: mx.array
    ) -> tuple[mx.array, mx.array]:
        """K's and V's tails of fixed length, f16 [n_kv_heads, PAGE, head_dim], with one new row [1, n_kv_heads, 1,
        head_dim] each after the rows that are held; n_held: int32 [8], of which the first counts."""
        raise RequestError("this backend does not compile steps")

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
        """`attend.attend` of one row whose position is int32 [8] (the first counts). Reads nothing on the host.

        The sides' planes hold the pages before the row's own, of which it sees n_pages, and maybe room for more; their
        rows are tails as `join_in_page` has them.
        """
        raise RequestError("this backend does not compile steps")

    def n_shares(self, k: Codec, v: Codec, n_kv_heads: int, group_size: int, n_pages: int) -> int:
        """What `answer_in_page` makes of n_pages: the same graph serves all that have the same. group_size: query heads
        of a KV head."""
        return 0

    def takes_batches(self, k: Codec, v: Codec, n_rows: int) -> bool:
        """Whether steps of that many rows are answered for several sequences at once, by the next three."""
        return False

    def join_batch(
        self,
        tails: tuple[mx.array, mx.array],
        new: tuple[mx.array, mx.array],
        offsets: Sequence[int],
        n_own: Sequence[int],
    ) -> tuple[mx.array, mx.array]:
        """As `page_pool.BatchJoiner` has it."""
        raise RequestError("this backend answers batches sequence by sequence")

    def answer_batch(
        self, q: mx.array, growth: PoolGrowth, *, scale: float, window: int | None, sinks: mx.array | None
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """Attention of q [sequences, n_heads, rows, head_dim] over a pool's pages and tails, and the tails with the
        new rows. Answers of rows that are not a sequence's own mean nothing."""
        raise RequestError("this backend answers batches sequence by sequence")

    def dequantise_pages(self, side: SideView, end: int, dtype: mx.Dtype) -> mx.array:
        """What a side's pages before position `end` decode to, lazily: [1, n_kv_heads, tokens, head_dim]."""
        raise RequestError("this backend answers batches sequence by sequence")

    def matmul(self, a: Any, b: Any) -> Any:
        """float32 [n, rows, inner] @ [n, inner, columns]."""

    def rotate(self, side: SideView, x: Any) -> Any:
        """float32 [..., head_dim] into the side's rotated domain."""

    def unrotate(self, side: SideView, x: Any) -> Any:
        """float32 [..., head_dim] out of the side's rotated domain."""

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
        """What `attend` returns for the same arguments, where the backend does the whole step by itself; else None."""
        return None


class NumpyReading(Reading):
    """For the CPU: byte tables for decoding, BLAS for the products. Evaluates what it reads."""

    xp: Any = np

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        return block_ops.encode_page_numpy(codec, rows)

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        block_ops.check_finite_numpy(rows)

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        return page_mean_numpy(rows, n_skipped)

    def join(self, tail: mx.array | None, new: mx.array) -> mx.array:
        if new.dtype != mx.float32:
            return block_ops.join_rows(tail, new)
        values = block_ops.to_f16_numpy(new)[0]
        return mx.array(values if tail is None else np.concatenate([np.asarray(tail), values], axis=1))

    def host_rows(self, cache_type: str, new: mx.array) -> NDArray[Any] | None:
        if new.dtype != mx.float32 or cache_type == "bf16":
            return None
        return block_ops.to_f16_numpy(new) if cache_type == "f16" else np.asarray(new)

    def load(self, *arrays: mx.array) -> list[Any]:
        mx.eval(arrays)
        held = (np.asarray(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a) for a in arrays)
        return [a.astype(np.float32, copy=False) for a in held]

    def decode(self, side: SideView, first: int, last: int) -> Any:
        lo, hi = first - side.pages_start, last - side.pages_start
        codes = np.asarray(side.codes)[lo:hi].swapaxes(0, 1)
        scales = np.asarray(side.scales)[lo:hi].swapaxes(0, 1)
        values = side.codec.decode_planes(np.ascontiguousarray(codes), np.ascontiguousarray(scales))
        return values.reshape(len(values), -1, side.codec.head_dim)

    def matmul(self, a: Any, b: Any) -> Any:
        return product(a, b)

    def rotate(self, side: SideView, x: Any) -> Any:
        return side.codec.rotate(x)

    def unrotate(self, side: SideView, x: Any) -> Any:
        return side.codec.unrotate(x)


class MlxReading(Reading):
    """For GPUs until the kernels take over, and the numpy reading's twin in tests. Lazy."""

    xp: Any = mx

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        return block_ops.encode_page_mlx(codec, rows)

    def check_finite(self, codec: Codec, rows: mx.array) -> None:
        if not block_ops.can_encode(codec):  # its encoder would refuse them, but later
            block_ops.check_finite_numpy(rows)

    def page_mean(self, rows: mx.array, n_skipped: int) -> mx.array:
        return page_mean_mlx(rows, n_skipped)

    def join(self, tail: mx.array | None, new: mx.array) -> mx.array:
        return block_ops.join_rows(tail, new)

    def load(self, *arrays: mx.array) -> list[Any]:
        return [a.astype(mx.float32) for a in arrays]

    def decode(self, side: SideView, first: int, last: int) -> Any:
        assert side.codes is not None and side.scales is not None
        lo, hi = first - side.pages_start, last - side.pages_start
        rows = block_ops.decode_rotated(side.codec, side.codes[lo:hi], side.scales[lo:hi]).swapaxes(0, 1)
        return rows.reshape(rows.shape[0], -1, side.codec.head_dim)

    def matmul(self, a: Any, b: Any) -> Any:
        return mx.matmul(a, b)

    def compiles(self, k: Codec, v: Codec) -> bool:
        return not k.is_float and not v.is_float

    def compiled(self, function: Any) -> Any:
        return mx.compile(function)

    def join_in_page(
        self, tails: tuple[mx.array, mx.array], new: tuple[mx.array, mx.array], n_held: mx.array
    ) -> tuple[mx.array, mx.array]:
        is_new = (mx.arange(PAGE) == n_held[0])[None, :, None]
        k, v = (mx.where(is_new, block_ops.to_f16(row)[0], tail) for tail, row in zip(tails, new, strict=True))
        return k, v

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
        at = position[0]
        own_start = at // PAGE * PAGE
        first, last = max(k.pages_start, v.pages_start), min(k.end_page, v.end_page)
        places = mx.concatenate([mx.arange(first * PAGE, last * PAGE), own_start + mx.arange(PAGE)])
        seen = (places <= at) & ((mx.arange(places.size) >= (last - first) * PAGE) | (places < own_start))
        if window is not None:
            seen &= places > at - window
        keys, values = (self._rows_in_page(side, first, last) for side in (k, v))
        out = mx.fast.scaled_dot_product_attention(
            q.astype(mx.float32),
            keys[None],
            mx.where(seen[:, None], values, 0.0)[None],  # rows that are not there yet may hold anything
            scale=scale,
            mask=seen[None],
            sinks=None if sinks is None else sinks.astype(mx.float32),
        )
        return block_ops.as_float(out, q.dtype)

    def _rows_in_page(self, side: SideView, first: int, last: int) -> mx.array:
        """float32 [n_kv_heads, tokens, head_dim] in original axes: pages first .. last - 1 as blocks, then the tail."""
        if first == last:
            return side.rows.astype(mx.float32)
        blocks = side.decoded(first, last)
        parts = [blocks, side.rows]
        if side.prefix is not None and first == 0:
            parts = [side.prefix, blocks[:, side.prefix.shape[1] :], side.rows]
        return mx.concatenate([part.astype(mx.float32) for part in parts], axis=1)

    def rotate(self, side: SideView, x: Any) -> Any:
        return block_ops.rotate(side.codec.rotation, x)

    def unrotate(self, side: SideView, x: Any) -> Any:
        return block_ops.unrotate(side.codec.rotation, x)
