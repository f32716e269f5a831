"""Whole pages to blocks, one layer of 8 KV heads of 128: one page as decoding fills it, and many. Part of gpu.py.

K is balanced, V lies as the kernels read it. What appending a page to a cache costs beside it shows gpu_model.py.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from gpu_timing import Work, print_head, print_row, timed

from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.runtime.backends import default_backend
from tqgguf.runtime.kv.pages import PAGE

SIDES = (("turbo4", "k"), ("turbo4", "v"), ("turbo3", "v"), ("turbo2", "v"), ("q8_0", "v"), ("q4_0", "v"))
N_KV_HEADS, HEAD_DIM, N_PREFIX = 8, 128, 4
N_SETS = 3  # of rows that are encoded in turn


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("encode")
    group.add_argument("--encoded", nargs="*", type=int, default=[PAGE, 131072], help="tokens encoded at a time")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    scale = mx.random.uniform(0.5, 2, (N_KV_HEADS, HEAD_DIM))
    print_head("encoding tokens", "type", "kernels us", "wall us", "million tokens/s of a layer's side")
    for n_tokens in args.encoded:
        rows = [mx.random.normal((N_KV_HEADS, n_tokens, HEAD_DIM)).astype(mx.float16) for _ in range(N_SETS)]
        mx.eval(rows, scale)
        works = {f"{name} {side}": Work(partial(_encoded, name, side, rows, scale), N_SETS) for name, side in SIDES}
        for name, timing in timed(works).items():
            rate = n_tokens / (timing.gpu_us or timing.wall_us)
            print_row(n_tokens, name, f"{timing.gpu_us:.1f}", f"{timing.wall_us:.1f}", f"{rate:.0f}")
            found.append({"type": name, "tokens": n_tokens, "timing": asdict(timing), "tokens_a_second": rate * 1e6})
    return found


def _encoded(cache_type: str, side: str, rows: list[mx.array], scale: mx.array) -> list[mx.array]:
    codec = resolve_codec(cache_type, HEAD_DIM, "k" if side == "k" else "v")
    backend, balanced = default_backend(), side == "k"
    tiled = not balanced and backend.tiles_values(codec)
    made = [
        backend.encode_pages(
            codec, r, n_skipped=N_PREFIX, centred=balanced, scale=scale if balanced else None, tiled=tiled
        )
        for r in rows
    ]
    return [array for arrays in made for array in arrays if array is not None]
