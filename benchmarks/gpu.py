"""Attention from blocks on a GPU beside MLX's own over f16, encoding, and long steps. Prints tables, writes JSON.

    python benchmarks/gpu.py [decode encode prefill] [--keys 8192 32768 131072] [--out results.json]

Decode attention is timed twice: the time of its kernels (through torch's profiler, where torch is there; else left
out), and wall time of a call inside a chain of calls in one evaluation, each fed with the answer before it. Inputs
rotate, so that the device's cache holds none of them. `f16` is mx.fast.scaled_dot_product_attention on the same
shapes, timed the same way in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.runtime.attention.attend import attend
from tqgguf.runtime.attention.attention_gpu import MASK_BYTES, MOST_ROWS, WORKSPACE_BYTES, KernelReading
from tqgguf.runtime.attention.readings import Reading
from tqgguf.runtime.backends import default_reading, describe
from tqgguf.runtime.kv.side_view import PAGE, SideView
from tqgguf.runtime.selftest_speed import random_side

ROTATED_BYTES = 150_000_000  # of inputs that calls rotate over: more than twice an H200's L2 cache
MOST_SETS = 24
PAIRS = ("turbo4/turbo3", "turbo4/turbo4", "turbo3/turbo3", "turbo2/turbo2", "q8_0/q8_0", "q4_0/q4_0")
HEADS = ((32, 8, 128), (64, 8, 128), (32, 8, 64), (8, 4, 256))
OWN_ROWS = 64
MLX_LM_STEP = 256  # rows by which mlx-lm's KVCache grows; MLX's fastest attention asks for it


@dataclass
class Timing:
    """kernels_us: of the GPU's kernels, by name, for one call; wall_us: of a call in a chain."""

    kernels_us: dict[str, float]
    wall_us: float

    @property
    def gpu_us(self) -> float:
        return sum(self.kernels_us.values())


Call = Callable[[mx.array, Any], mx.array]


def chained(call: Call, q: mx.array, inputs: list[Any], n: int) -> mx.array:
    for i in range(n):
        q = call(q, inputs[i % len(inputs)])
    return q


def wall_us(call: Call, q: mx.array, inputs: list[Any], n: int, repeats: int = 5) -> float:
    """Microseconds a call, the median of chains of n in one evaluation; building the graph is not in it."""
    mx.eval(chained(call, q, inputs, 3))
    times = []
    for _ in range(repeats):
        out = chained(call, q, inputs, n)
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(out)
        mx.synchronize()
        times.append((time.perf_counter() - start) / n * 1e6)
    return median(times)


def kernel_us(call: Call, q: mx.array, inputs: list[Any], n: int = 20) -> dict[str, float]:
    """Microseconds of each kernel for one call, by CUPTI through torch's profiler; empty without torch and CUDA."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    out = chained(call, q, inputs, n)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        mx.eval(out)
        mx.synchronize()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiled.events():
        if "CUDA" in str(event.device_type):
            times[event.name] = times.get(event.name, 0.0) + event.device_time / n
    return times


def timed(call: Call, q: mx.array, inputs: list[Any], n: int = 50) -> Timing:
    wall = wall_us(call, q, inputs, n)  # first: an idle GPU's first calls take up to twice their time
    return Timing(kernel_us(call, q, inputs), wall)


def n_sets(n_bytes: int) -> int:
    return max(2, min(MOST_SETS, ROTATED_BYTES // max(1, n_bytes) + 1))


def measure_decode(
    heads: tuple[int, int, int], n_keys: int, pair: str, n_rows: int, n: int, plain: bool = False
) -> tuple[Timing, int]:
    """A step of n_rows from blocks (a step of decoding has one), and the bytes of blocks that it reads."""
    n_heads, n_kv_heads, head_dim = heads
    k, v = (resolve_codec(t, head_dim, s) for t, s in zip(pair.split("/"), ("k", "v"), strict=True))
    balanced = k.block_type.family == "turbo" and not plain
    n_bytes = n_keys * n_kv_heads * (k.row_bytes + v.row_bytes)
    reading = default_reading()
    v_tiled = reading.tiles_values(v)
    sides = [
        (
            random_side(k, n_kv_heads, n_keys, OWN_ROWS, balanced),
            random_side(v, n_kv_heads, n_keys, OWN_ROWS, False, v_tiled),
        )
        for _ in range(n_sets(n_bytes))
    ]
    q = mx.random.normal((1, n_heads, n_rows, head_dim)).astype(mx.float16)

    def call(q: mx.array, views: tuple[SideView, SideView]) -> mx.array:
        return attend(q, *views, offset=n_keys + OWN_ROWS - n_rows, scale=head_dim**-0.5, reading=reading)

    return timed(call, q, sides, n), n_bytes


def measure_f16(heads: tuple[int, int, int], n_keys: int, n_rows: int, n: int) -> Timing:
    """MLX's attention over f16 keys and values, held as mlx-lm's cache does: slices of a buffer that grows by 256
    rows."""
    n_heads, n_kv_heads, head_dim = heads
    n_rows_held = -(-(n_keys + OWN_ROWS) // MLX_LM_STEP) * MLX_LM_STEP
    inputs = []
    for _ in range(n_sets(4 * n_kv_heads * n_keys * head_dim)):
        held = [mx.random.normal((1, n_kv_heads, n_rows_held, head_dim)).astype(mx.float16) for _ in range(2)]
        mx.eval(held)
        inputs.append([rows[:, :, : n_keys + OWN_ROWS] for rows in held])
        mx.eval(inputs[-1])
        del held
    q = mx.random.normal((1, n_heads, n_rows, head_dim)).astype(mx.float16)

    def call(q: mx.array, kv: list[mx.array]) -> mx.array:
        mask = "causal" if n_rows > 1 else None
        return mx.fast.scaled_dot_product_attention(q, *kv, scale=head_dim**-0.5, mask=mask)

    return timed(call, q, inputs, n)


def decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows_out = []
    names = ("heads", "rows", "keys", "K/V", "kernels us", "block GB/s", "wall us", "f16 kernels us", "f16 wall us")
    print("| " + " | ".join((*names, "gpu x", "wall x")) + " |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for heads in HEADS[: args.shapes]:
        for n_keys in args.keys:
            for n_rows in args.rows:
                f16 = measure_f16(heads, n_keys, n_rows, args.chain)
                mx.clear_cache()
                pairs = args.pairs if heads == HEADS[0] and n_rows == 1 else args.pairs[:1]
                for pair in pairs:
                    ours, n_bytes = measure_decode(heads, n_keys, pair, n_rows, args.chain, args.plain)
                    mx.clear_cache()
                    parts = " + ".join(f"{us:.1f}" for us in ours.kernels_us.values())
                    rate = n_bytes / ours.gpu_us / 1e3 if ours.gpu_us else 0.0
                    gpu_ratio = f16.gpu_us / ours.gpu_us if ours.gpu_us else 0.0
                    print(
                        f"| {heads[0]}/{heads[1]} x {heads[2]} | {n_rows} | {n_keys} | {pair} | {parts} | {rate:.0f} "
                        f"| {ours.wall_us:.1f} | {f16.gpu_us:.1f} | {f16.wall_us:.1f} | {gpu_ratio:.2f} "
                        f"| {f16.wall_us / ours.wall_us:.2f} |",
                        flush=True,
                    )
                    rows_out.append(
                        {
                            "heads": heads,
                            "rows": n_rows,
                            "keys": n_keys,
                            "pair": pair,
                            "ours": asdict(ours),
                            "f16": asdict(f16),
                            "block_bytes": n_bytes,
                        }
                    )
    return rows_out


def encode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole pages of K with balance, and of V, 8 KV heads of 128, many at a time: rows a second."""
    n_heads, head_dim, found = 8, 128, []
    n_tokens = max(args.keys) // PAGE * PAGE
    reading = default_reading()
    rows = [mx.random.normal((n_heads, n_tokens, head_dim)).astype(mx.float16) for _ in range(3)]
    scale = mx.random.uniform(0.5, 2, (n_heads, head_dim))
    mx.eval(rows, scale)
    print(f"| encoding {n_tokens} tokens | us | million rows/s |\n|---|---|---|")
    for name, balanced in (("turbo4", True), ("turbo3", False), ("turbo2", False), ("q8_0", False), ("q4_0", False)):
        codec = resolve_codec(name, head_dim, "k" if balanced else "v")

        def call(codec: Codec = codec, balanced: bool = balanced) -> list[mx.array]:
            given = scale if balanced else None
            tiled = not balanced and reading.tiles_values(codec)
            made = (
                reading.encode_pages(codec, r, n_skipped=4, centred=balanced, scale=given, tiled=tiled) for r in rows
            )
            return [array for arrays in made for array in arrays if array is not None]

        us = evaluated_us(call) / len(rows)
        print(f"| {name}{', balanced' if balanced else ''} | {us:.0f} | {n_heads * n_tokens / us:.0f} |", flush=True)
        found.append({"type": name, "balanced": balanced, "tokens": n_tokens, "us": us})
    return found


def prefill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Attention of new rows after keys that are held (256 rows: one chunk of the grid), beside MLX's over f16."""
    n_heads, n_kv_heads, head_dim = HEADS[0]
    reading, found = default_reading(), []
    if isinstance(reading, KernelReading):
        reading = KernelReading(reading.launcher, args.most_rows, args.workspace, args.mask)
    print("| new rows | keys before | K/V | us | f16 us | of f16 |\n|---|---|---|---|---|---|")
    for n_rows, n_keys in itertools.product(args.new_rows, args.cached):
        q = mx.random.normal((1, n_heads, n_rows, head_dim)).astype(mx.float16)
        held = [mx.random.normal((1, n_kv_heads, n_keys + n_rows, head_dim)).astype(mx.float16) for _ in range(2)]
        mx.eval(q, held)
        f16 = evaluated_us(partial(f16_step, q, held))
        for pair in args.pairs[:2]:
            codecs = (resolve_codec(t, head_dim, s) for t, s in zip(pair.split("/"), ("k", "v"), strict=True))
            sides = []
            for codec, rows, name in zip(codecs, held, "kv", strict=True):
                balanced = name == "k" and codec.block_type.family == "turbo"
                tiled = name == "v" and default_reading().tiles_values(codec)
                side = random_side(codec, n_kv_heads, n_keys + n_rows, 1, balanced, tiled)
                sides.append(replace(side, rows=rows[0, :, n_keys:], rows_start=n_keys))
            mx.eval([side.rows for side in sides])
            ours = evaluated_us(partial(block_step, reading, q, sides, n_keys))
            print(f"| {n_rows} | {n_keys} | {pair} | {ours:.0f} | {f16:.0f} | {ours / f16:.2f} |", flush=True)
            found.append({"rows": n_rows, "keys": n_keys, "pair": pair, "us": ours, "f16_us": f16})
        del held
        mx.clear_cache()
    return found


def f16_step(q: mx.array, held: list[mx.array]) -> list[mx.array]:
    return [mx.fast.scaled_dot_product_attention(q, *held, scale=q.shape[-1] ** -0.5, mask="causal")]


def block_step(reading: Reading, q: mx.array, sides: list[SideView], offset: int) -> list[mx.array]:
    return [attend(q, *sides, offset=offset, scale=q.shape[-1] ** -0.5, reading=reading)]


def evaluated_us(call: Callable[[], list[mx.array]], repeats: int = 10) -> float:
    """Microseconds of evaluating what a call returns, the median; the graph is built before the clock starts."""
    times = []
    for turn in range(repeats + 2):
        made = call()
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(made)
        mx.synchronize()
        if turn >= 2:
            times.append((time.perf_counter() - start) * 1e6)
    return median(times)


TASKS: dict[str, Callable[[argparse.Namespace], Any]] = {"decode": decode, "encode": encode, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description="attention from blocks on a GPU beside MLX's over f16")
    parser.add_argument("what", nargs="*", metavar="what", help=", ".join(TASKS))
    parser.add_argument("--keys", nargs="*", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS), metavar="K/V")
    parser.add_argument("--rows", nargs="*", type=int, default=[1])
    parser.add_argument("--shapes", type=int, default=len(HEADS), help="how many of the head shapes")
    parser.add_argument("--chain", type=int, default=50, help="calls in one evaluation")
    parser.add_argument("--new-rows", nargs="*", type=int, default=[256, 2048], help="of prefill")
    parser.add_argument("--cached", nargs="*", type=int, default=[8192, 32768], help="keys before prefill's rows")
    parser.add_argument("--most-rows", type=int, default=MOST_ROWS, help="rows that decode attention takes")
    parser.add_argument("--workspace", type=int, default=WORKSPACE_BYTES, help="bytes of decoded keys and values")
    parser.add_argument("--mask", type=int, default=MASK_BYTES, help="bytes of a long step's mask")
    parser.add_argument("--plain", action="store_true", help="K without balance")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    print(describe(), flush=True)
    found = {what: TASKS[what](args) for what in args.what or TASKS}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
