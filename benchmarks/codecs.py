"""Speed of the numpy codecs in millions of values per second, best of several runs on one core.

    python benchmarks/codecs.py [--head-dim 128] [--rows 8192] [--seconds 0.3] [cache types ...]

`planes` is decode_planes, what attention reads; `decode` adds interleaved blocks and the rotation back to original
axes. It knows nothing of attention or of the kernels written in C or Metal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.errors import RequestError


def million_per_second(call: Callable[[], object], values: int, seconds: float) -> float:
    """Values per microsecond of the fastest of at least three calls within `seconds`."""
    best, n_calls, end = float("inf"), 0, time.perf_counter() + seconds
    while n_calls < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        n_calls += 1
    return values / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of the numpy codecs")
    parser.add_argument("types", nargs="*", default=CACHE_TYPE_NAMES, metavar="type")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each figure")
    args = parser.parse_args()
    x = np.random.default_rng(0).standard_normal((args.rows, args.head_dim)).astype(np.float32)
    out = np.empty_like(x)
    print(f"million values/s, {args.rows} head vectors of {args.head_dim}")
    print(f"{'type':8}{'bytes/row':>10}{'error':>10}{'encode':>9}{'decode':>9}{'planes':>9}")
    for name in args.types:
        try:
            codec = resolve_codec(name, args.head_dim, "k")
        except RequestError as refusal:
            print(f"{name:8}{refusal}")
            continue
        blocks = codec.encode(x)
        codes, scales = codec.split(blocks)
        error = float(((codec.decode(blocks) - x) ** 2).sum() / (x**2).sum())
        calls = (
            partial(codec.encode, x),
            partial(codec.decode, blocks),
            partial(codec.decode_planes, codes, scales, out=out),
        )
        speeds = "".join(f"{million_per_second(call, x.size, args.seconds):9.0f}" for call in calls)
        print(f"{name:8}{codec.row_bytes:10}{error:10.5f}{speeds}")


if __name__ == "__main__":
    main()
