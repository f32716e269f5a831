"""A decode step's attention, one layer, from blocks beside what MLX has: part of gpu.py.

`f16`, `bf16`: mx.fast.scaled_dot_product_attention over rows held as mlx-lm's cache does, slices of a buffer that grows
by 256 rows, for which MLX takes its fastest way. `4 bit`: mlx-lm's quantised attention, 4 bits in groups of 64, over
contiguous arrays, which favours it. A step's last key is its last row's own, 64 rows after the last whole page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from gpu_timing import Timing, Work, chain, copy_bandwidth, n_sets, print_head, print_row, timed
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.backends import default_backend
from tqgguf.runtime.kv.pages import PAGE, Growth, Pages, Pair, Query, SidePages, SideView
from tqgguf.runtime.selftest_speed import random_side

PAIRS = ("turbo4/turbo3", "turbo4/turbo4", "turbo3/turbo3", "turbo2/turbo2", "q8_0/q8_0", "q4_0/q4_0")
HEADS = ((32, 8, 128), (64, 8, 128), (32, 8, 64), (8, 4, 256))
OWN_ROWS = PAGE // 2
MLX_LM_STEP = 256
BITS, GROUP = 4, 64
NO_TIME = Timing({}, 0, float("nan"), float("nan"))


@dataclass(frozen=True)
class Shape:
    """Sequences, query and KV heads, values of a head, and keys in whole pages that each sequence holds."""

    batch: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_keys: int

    def queries(self, n_rows: int, dtype: mx.Dtype) -> mx.array:
        return mx.random.normal((self.batch, self.n_heads, n_rows, self.head_dim)).astype(dtype)

    def codecs(self, pair: str) -> tuple[Codec, Codec]:
        k, v = pair.split("/")
        return resolve_codec(k, self.head_dim, "k"), resolve_codec(v, self.head_dim, "v")

    def block_bytes(self, pair: str) -> int:
        """Of the blocks that a step reads."""
        return self.batch * self.n_keys * self.n_kv_heads * sum(codec.row_bytes for codec in self.codecs(pair))


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decode")
    group.add_argument("--keys", nargs="*", type=int, default=[1024, 8192, 32768, 131072])
    group.add_argument("--rows", nargs="*", type=int, default=[1, 4], help="query rows of a step")
    group.add_argument("--batches", nargs="*", type=int, default=[1, 8], help="sequences")
    group.add_argument("--pairs", nargs="*", default=list(PAIRS), metavar="K/V", help="all: one row, the first shape")
    group.add_argument("--shapes", type=int, default=len(HEADS), help="how many of the head shapes")
    group.add_argument("--chain", type=int, default=50, help="calls in one evaluation, at most")
    group.add_argument("--plain", action="store_true", help="K without balance")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    copied, found = copy_bandwidth(), []
    ours = ("K/V", "attention + merge us", "block GB/s", "of copy", "wall us")
    theirs = ("f16 us", "bf16 us", "4 bit f16 us", "4 bit bf16 us")
    print(f"\ndecode: kernels us / wall us; copying reads and writes {copied / 1e9:.0f} GB/s")
    print_head("heads", "batch", "rows", "keys", *ours, *theirs, "f16 by ours, kernels", "wall")
    for shape in shapes(args):
        is_first = shape.batch == 1 and (shape.n_heads, shape.n_kv_heads, shape.head_dim) == HEADS[0]
        held = Floats(shape)
        for n_rows in args.rows:
            pairs = args.pairs if is_first and n_rows == 1 else args.pairs[:1]
            works = baselines(shape, held, n_rows, args.chain)
            for pair in pairs:
                work = block_work(shape, pair, n_rows, args.chain, args.plain)
                if work is not None:
                    works[pair] = work
            timings = timed(works)
            for pair in pairs:
                _print(shape, n_rows, pair, timings, copied)
            record = {"rows": n_rows, "timings": {name: asdict(timing) for name, timing in timings.items()}}
            found.append(asdict(shape) | record | {"block_bytes": {pair: shape.block_bytes(pair) for pair in pairs}})
            del works
        del held
        mx.clear_cache()
    return found


def shapes(args: argparse.Namespace) -> Iterator[Shape]:
    for heads in HEADS[: args.shapes]:
        for batch in args.batches:
            for n_keys in args.keys:
                yield Shape(batch, *heads, n_keys // PAGE * PAGE)


class Floats:
    """Keys and values as MLX's ways of attention want them: lists of inputs that calls rotate over."""

    def __init__(self, shape: Shape) -> None:
        n = shape.n_keys + OWN_ROWS
        in_steps = -(-n // MLX_LM_STEP) * MLX_LM_STEP
        values = shape.batch * shape.n_kv_heads * shape.head_dim
        self.floats: dict[mx.Dtype, list[list[mx.array]]] = {mx.float16: [], mx.bfloat16: []}
        for dtype, sets in self.floats.items():
            for _ in range(n_sets(4 * values * n)):
                rows = [
                    mx.random.normal((shape.batch, shape.n_kv_heads, in_steps, shape.head_dim)).astype(dtype)
                    for _ in range(2)
                ]
                mx.eval(rows)
                sets.append([side[:, :, :n] for side in rows])
                mx.eval(sets[-1])
        self.quantised: dict[mx.Dtype, list[list[tuple[mx.array, ...]]]] = {}
        for dtype, sets in self.floats.items():
            quantised = []
            for i in range(n_sets(2 * values * n * (BITS * GROUP + 32) // (8 * GROUP))):
                given = [mx.contiguous(side) for side in sets[i % len(sets)]]
                quantised.append([tuple(mx.quantize(side, group_size=GROUP, bits=BITS)) for side in given])
                mx.eval(quantised[-1])
            self.quantised[dtype] = quantised


def baselines(shape: Shape, held: Floats, n_rows: int, most: int) -> dict[str, Work]:
    """MLX's own attention and mlx-lm's, by name."""
    scale, mask = shape.head_dim**-0.5, "causal" if n_rows > 1 else None

    def by_floats(q: mx.array, kv: list[mx.array]) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, *kv, scale=scale, mask=mask)

    def by_bits(q: mx.array, kv: list[tuple[mx.array, ...]]) -> mx.array:
        queries = mx.array(q)  # an object of its own: the function multiplies it in place
        return quantized_scaled_dot_product_attention(queries, *kv, scale, mask, group_size=GROUP, bits=BITS)

    works = {}
    for name, dtype in (("f16", mx.float16), ("bf16", mx.bfloat16)):
        q = shape.queries(n_rows, dtype)
        works[name] = chain(by_floats, q, held.floats[dtype], most)
        try:
            works[f"4 bit {name}"] = chain(by_bits, q, held.quantised[dtype], most)
        except RuntimeError as error:  # MLX's CUDA backend has no such product for some shapes
            print(f"4 bit {name}: {error}", flush=True)
    return works


def block_work(shape: Shape, pair: str, n_rows: int, most: int, plain: bool) -> Work | None:
    """A step from blocks; None for several sequences where they are not answered at once."""
    backend, dtype = default_backend(), mx.float16
    balanced = resolve_codec(pair.split("/")[0], shape.head_dim, "k").block_type.family == "turbo" and not plain
    if shape.batch > 1 and not backend.answers_batches(*shape.codecs(pair), n_rows):
        return None
    held = [_held(shape, pair, balanced, backend) for _ in range(n_sets(shape.block_bytes(pair)))]
    return chain(partial(_attend, backend, shape), shape.queries(n_rows, dtype), held, most)


def _sides(shape: Shape, pair: str, balanced: bool, backend: Backend) -> tuple[SideView, SideView]:
    """The pages of all sequences, one after the other, and rows of one more page."""
    k, v = shape.codecs(pair)
    n_keys = shape.batch * shape.n_keys
    return (
        random_side(k, shape.n_kv_heads, n_keys, OWN_ROWS, balanced),
        random_side(v, shape.n_kv_heads, n_keys, OWN_ROWS, False, backend.tiles_values(v)),
    )


Held = tuple[Pair, Pages]


def _held(shape: Shape, pair: str, balanced: bool, backend: Backend) -> Held:
    """Tails of all sequences, and their pages: in order, of several in one pool."""
    sides: Sequence[SidePages] = _sides(shape, pair, balanced, backend)
    slots, n_pages = None, shape.n_keys // PAGE
    if shape.batch > 1:
        sides = [
            replace(
                side,
                channel_scale=None if side.channel_scale is None else mx.stack([side.channel_scale] * shape.batch),
            )
            for side in sides
        ]
        slots = [range(i * n_pages, (i + 1) * n_pages) for i in range(shape.batch)]
    tail_shape = (shape.batch, shape.n_kv_heads, PAGE, shape.head_dim)
    k_tail, v_tail = (mx.random.normal(tail_shape).astype(mx.float16) for _ in range(2))
    mx.eval(k_tail, v_tail, [side.channel_scale for side in sides if side.channel_scale is not None])
    return (k_tail, v_tail), Pages(*sides, slots)


def _attend(backend: Backend, shape: Shape, q: mx.array, held: Held) -> mx.array:
    tails, pages = held
    offsets, n_own = (shape.n_keys + OWN_ROWS - q.shape[2],) * shape.batch, (q.shape[2],) * shape.batch
    growth = Growth(tails, tails, offsets, n_own, joined=tails)
    return backend.append_and_attend(q, pages, growth, Query(shape.head_dim**-0.5))[0]


def _print(shape: Shape, n_rows: int, pair: str, timings: dict[str, Timing], copied: float) -> None:
    ours, f16 = timings.get(pair, NO_TIME), timings["f16"]
    rate = shape.block_bytes(pair) / ours.gpu_us * 1e6 if ours.gpu_us else 0.0
    theirs = (timings.get(name, NO_TIME) for name in ("f16", "bf16", "4 bit f16", "4 bit bf16"))
    print_row(
        f"{shape.n_heads}/{shape.n_kv_heads} x {shape.head_dim}",
        *(shape.batch, n_rows, shape.n_keys, pair),
        " + ".join(f"{us:.1f}" for us in ours.kernels_us.values()),
        *(f"{rate / 1e9:.0f}", f"{rate / copied:.2f}", f"{ours.wall_us:.1f}"),
        *(f"{timing.gpu_us:.1f} / {timing.wall_us:.1f}" for timing in theirs),
        f"{f16.gpu_us / ours.gpu_us:.2f}" if ours.gpu_us else "-",
        f"{f16.wall_us / ours.wall_us:.2f}",
    )
