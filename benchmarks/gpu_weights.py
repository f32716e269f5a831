"""Products with matrices of ggml's blocks on a GPU, and a GGUF model from loading to decoding.

    python benchmarks/gpu_weights.py types [--types Q4_K ...] [--rows 1 8] [--walks] [--out results.json]
    python benchmarks/gpu_weights.py model FILE [--depths 0 8192 32768] [--caches f16/f16 turbo4/turbo3]

types   one product for each type and number of rows: times of its kernel, and the bytes of the matrix over that time
        as a share of the copy's bandwidth. --walks: ways to spread it, instead of the one that geometry.py has
model   seconds until the file is loaded and until a first token is there; prompts of 512 and decode steps behind a
        number of tokens, a cache of each type; kernels of a step, and the bytes of all weights over its time
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from gpu_timing import Work, copy_bandwidth, kernels_of, n_sets, print_head, print_row, timed
from mlx.utils import tree_flatten

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.runtime.backends import describe, gpu_launcher
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.kernels.geometry import ProductWalk
from tqgguf.runtime.kernels.matrices import MATRIX_TYPES, MULTIPLY, BlockMatrix, arrange, multiply
from tqgguf.runtime.layers import block_layers
from tqgguf.runtime.models.load import open_model
from tqgguf.runtime.selftest_matrices import NUMBERS, random_blocks, values_of

PROMPT, STEPS, ROUNDS = 512, 64, 3


def walks(matrix: BlockMatrix) -> list[ProductWalk]:
    ways = itertools.product((1, 2), (2, 4, 8, 16), (0, 32))
    found = [ProductWalk(tiles, n, matrix.steps_at_once, resident // n) for tiles, n, resident in ways]
    return [walk for walk in found if walk.simdgroups * walk.steps <= matrix.n_steps]


def types(args: argparse.Namespace) -> list[dict[str, Any]]:
    found, launcher, (n_rows, n_columns) = [], gpu_launcher(), args.shape
    print_head("type", "rows", "walk", "kernel us", "GB/s", "share of the copy's", "wall us", "error")
    for name, n in itertools.product(args.types, args.rows):
        blocks = random_blocks(name, n_rows, n_columns)
        values = values_of(name, blocks[:64])
        matrices = [arrange(launcher, NUMBERS[name], n_columns, mx.array(blocks)) for _ in range(n_sets(blocks.nbytes))]
        x = mx.random.normal((n, n_columns)).astype(mx.bfloat16)
        mx.eval(x, [m.planes for m in matrices])
        expected = np.array(x.astype(mx.float32)).astype(np.float64) @ values.astype(np.float64).T
        for walk in walks(matrices[0]) if args.walks else [None]:
            product = np.array(multiply(launcher, x, matrices[0], walk=walk)[:, :64].astype(mx.float32))
            error = float(np.linalg.norm(product - expected) / np.linalg.norm(expected))
            work = Work(partial(_chained, launcher, x, matrices, walk), len(matrices))
            timing = timed({"product": work})["product"]
            us = sum(t for kernel, t in timing.kernels_us.items() if MULTIPLY.name in kernel) or timing.wall_us
            rate = blocks.nbytes / us * 1e6
            cells = (
                f"{us:.1f}",
                f"{rate / 1e9:.0f}",
                f"{rate / copy_bandwidth():.2f}",
                f"{timing.wall_us:.1f}",
                f"{error:.1e}",
            )
            shown = "-" if walk is None else f"{walk.tiles}/{walk.simdgroups}/{walk.steps}/{walk.resident}"
            print_row(name, n, shown, *cells)
            found.append({"type": name, "rows": n, "walk": shown, "us": us, "bytes": blocks.nbytes, "error": error})
    return found


def _chained(launcher: Any, x: mx.array, matrices: list[BlockMatrix], walk: ProductWalk | None) -> mx.array:
    for matrix in matrices:
        x = x + 0 * multiply(launcher, x, matrix, walk=walk)[:, :1]
    return x


def model(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.no_norms:
        block_layers.MOST_NORMED = 0
    start = time.perf_counter()
    opened = open_model(args.file)
    loaded = opened.load()
    weights = sum(value.nbytes for _, value in tree_flatten(loaded.model.parameters()))
    print(
        f"loaded in {time.perf_counter() - start:.2f} s: {weights / 1e9:.2f} GB, peak {mx.get_peak_memory() / 1e9:.2f}",
        flush=True,
    )
    rng, found = np.random.default_rng(1), []
    first = True
    columns = (
        "depth",
        "K/V",
        "prompt tokens/s",
        "decode ms",
        "best",
        "slowest",
        "tokens/s",
        "share of the copy's",
        "compiled",
        "kernels",
    )
    print_head(*columns)
    for depth, types_of_cache in itertools.product(args.depths, args.caches):
        session = Session(loaded, CacheSpec(*types_of_cache.split("/")), n_ctx=depth + 4096)
        ids = rng.integers(0, 200, depth + 2 * PROMPT).tolist()
        if depth:
            session.prefill(ids[:depth])
        speeds = []
        for end in (depth + PROMPT, depth, depth + PROMPT, depth, depth + PROMPT):
            if end == depth:
                session._go_back(depth)
                continue
            before = time.perf_counter()
            session.prefill(ids[:end])
            speeds.append(PROMPT / (time.perf_counter() - before))
            if first:
                print(f"first token after {time.perf_counter() - start:.2f} s of all", flush=True)
                session.decode(7)
                print(f"second after {time.perf_counter() - start:.2f} s", flush=True)
                first = False
        if args.kernels:
            session._go_back(depth)
            of_prompt = kernels_of([partial(session.prefill, ids[: depth + PROMPT])])[0]
            n_kernels, us = sum(n for _, n in of_prompt.values()), sum(t for t, _ in of_prompt.values())
            print(f"prompt: {n_kernels} kernels in {us:.0f} us")
            for kernel, (t, n_calls) in sorted(of_prompt.items(), key=lambda item: -item[1][0])[:8]:
                print(f"    {t:8.1f} us {n_calls:5d} {kernel[:90]}", flush=True)
        for _ in range(4):
            session.decode(7)
        rounds = []
        for _ in range(ROUNDS):
            times = []
            for _ in range(STEPS):
                before = time.perf_counter()
                session.decode(7)
                times.append((time.perf_counter() - before) * 1e3)
            rounds.append(times)
        kernels = kernels_of([partial(session.decode, 7)])[0] if args.kernels else {}
        ms = median(sum(times) / len(times) for times in rounds)
        everything = [t for times in rounds for t in times]
        cells = (f"{ms:.2f}", f"{median(everything):.2f}", f"{max(everything):.1f}", f"{1e3 / ms:.1f}")
        share = weights / (ms / 1e3) / copy_bandwidth()
        n_kernels, us = sum(n for _, n in kernels.values()), sum(t for t, _ in kernels.values())
        report = session.report()
        print_row(
            depth,
            types_of_cache,
            " ".join(f"{speed:.0f}" for speed in speeds),
            *cells,
            f"{share:.2f}",
            f"{report.compiled_steps} {report.not_compiled or ''}",
            f"{n_kernels} in {us:.0f} us",
        )
        if args.kernels:
            for kernel, (t, n_calls) in sorted(kernels.items(), key=lambda item: -item[1][0])[:14]:
                print(f"    {t:8.1f} us {n_calls:5d} {kernel[:90]}", flush=True)
        found.append(
            {"depth": depth, "caches": types_of_cache, "prompt": speeds, "rounds_ms": rounds, "kernels": kernels}
        )
        del session
        mx.clear_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="matrices of ggml's blocks on a GPU")
    tasks = parser.add_subparsers(dest="task", required=True)
    of_types = tasks.add_parser("types")
    of_types.add_argument("--types", nargs="*", default=list(MATRIX_TYPES), choices=MATRIX_TYPES)
    of_types.add_argument("--rows", nargs="*", type=int, default=[1])
    of_types.add_argument("--shape", nargs=2, type=int, default=[14336, 4096])
    of_types.add_argument("--walks", action="store_true")
    of_model = tasks.add_parser("model")
    of_model.add_argument("file")
    of_model.add_argument("--depths", nargs="*", type=int, default=[0, 8192, 32768])
    of_model.add_argument("--caches", nargs="*", default=["f16/f16", "turbo4/turbo3"])
    of_model.add_argument("--no-norms", action="store_true", help="norms by kernels of their own")
    of_model.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    for task in (of_types, of_model):
        task.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    print(describe(), flush=True)
    found = {"types": types, "model": model}[args.task](args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
