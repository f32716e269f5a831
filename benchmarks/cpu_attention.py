"""Decode attention from blocks beside dense float32 numpy, as ratios of one interleaved run.

    python benchmarks/cpu_attention.py [--keys 8192 65536] [--paths avx512 ...] [--rows 1] [--rounds 30] [K/V ...]

Every round measures everything once, in turn, so that a disturbance hits all alike. Two figures each: the median over
rounds and the best round, as ratios the median of the rounds' own ratios and best by best. `dense` is one np.matmul
per KV head on contiguous float32 K and V, with as many threads as numpy's BLAS takes (OPENBLAS_NUM_THREADS). Times
contain everything from mlx arrays in to an mlx array out. On a machine that is shared, take one thread on both sides
and the thread's own time: OPENBLAS_NUM_THREADS=1 and --cpu-time. It knows nothing of models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.formats.cores import cores
from tqgguf.runtime.attention.backend import Backend, NumpyBackend
from tqgguf.runtime.attention.c_backend import CBackend
from tqgguf.runtime.kv.float_side import FLOAT_DTYPES
from tqgguf.runtime.kv.pages import PAGE, Query, SideView
from tqgguf.runtime.native.library import Library, load_library

PAIRS = ["turbo4/turbo4", "turbo4/turbo3", "turbo3/turbo3", "turbo2/turbo2", "q8_0/q8_0", "q4_0/q4_0", "f16/f16"]
N_HEADS, N_KV_HEADS, HEAD_DIM = 32, 8, 128


def side(codec: Codec, n_keys: int, rng: np.random.Generator) -> SideView:
    """Random keys in whole pages, and one more row as the own page."""
    if codec.is_float:
        rows = rng.standard_normal((n_keys + PAGE, N_KV_HEADS, HEAD_DIM), np.float32)
        plane = mx.array(rows).astype(FLOAT_DTYPES[codec.cache_type])
        mx.eval(plane)
        return SideView(codec, rows=plane[: n_keys + 1].swapaxes(0, 1))
    pages = n_keys // PAGE
    codes = rng.integers(0, 256, (pages, N_KV_HEADS, PAGE, codec.n_blocks * codec.code_bytes), dtype=np.uint8)
    scales = np.full((pages, N_KV_HEADS, PAGE, codec.n_blocks * codec.n_scales), 0.1, np.float16)
    own = mx.array(rng.standard_normal((N_KV_HEADS, 1, HEAD_DIM)).astype(np.float16))
    return SideView(codec, mx.array(codes), mx.array(scales), rows=own, rows_start=n_keys)


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [n_kv_heads, group, head_dim], k and v [n_kv_heads, keys, head_dim], float32."""
    out = np.empty_like(q)
    for head in range(len(k)):
        scores = np.matmul(q[head], k[head].T)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        out[head] = np.matmul(scores, v[head]) / scores.sum(axis=1, keepdims=True)
    return out


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = timed(call, clock)
            if turn:
                times[name].append(seconds)
    return times


def attention_call(
    pair: str, path: str, n_keys: int, n_rows: int, library: Library | None, q: np.ndarray
) -> tuple[Callable[[], object], int]:
    """(a call that attends, the bytes of keys and values that it reads)"""
    rng = np.random.default_rng(0)
    codecs = [resolve_codec(t, HEAD_DIM, s) for t, s in zip(pair.split("/"), ("k", "v"), strict=True)]
    views = [side(codec, n_keys, rng) for codec in codecs]
    query = mx.array(q.reshape(1, N_HEADS, n_rows, HEAD_DIM))
    backend: Backend = NumpyBackend() if library is None or path == "numpy" else CBackend(library)

    def call() -> object:
        if library is not None and path != "numpy":
            library.select_path(path)
        out = backend.attend(query, *views, offset=n_keys, query=Query(HEAD_DIM**-0.5))
        mx.eval(out)
        return out

    return call, sum(codec.row_bytes for codec in codecs) * n_keys * N_KV_HEADS


def main() -> None:
    library = load_library()
    parser = argparse.ArgumentParser(description="decode attention from blocks beside dense float32 numpy")
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="K/V")
    parser.add_argument("--keys", nargs="*", type=int, default=[8192, 65536])
    parser.add_argument("--paths", nargs="*", default=library.runnable_paths() if library else ["numpy"])
    parser.add_argument("--rows", type=int, default=1, help="query rows of the step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="of the C library; 0: one per core")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and the time that it was running")
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    n_threads = 1 if args.cpu_time else args.threads or cores()
    if library is not None:
        library.set_threads(n_threads)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((N_KV_HEADS, N_HEADS // N_KV_HEADS * args.rows, HEAD_DIM), np.float32)
    print(f"{N_HEADS} query and {N_KV_HEADS} KV heads of {HEAD_DIM}, {args.rows} rows, {n_threads} threads")
    print(f"{'keys':>6} {'path':9}{'K/V':15}{'ms':>9}{'of dense':>10}{'best ms':>9}{'of dense':>10}{'GB/s':>7}")
    for n_keys in args.keys:
        k, v = (rng.standard_normal((N_KV_HEADS, n_keys, HEAD_DIM), np.float32) for _ in range(2))
        calls: dict[str, Callable[[], object]] = {"dense": lambda k=k, v=v: dense_attention(q, k, v)}
        n_bytes = {"dense": k.nbytes + v.nbytes}
        for path in args.paths:
            for pair in args.pairs:
                name = f"{path:9}{pair}"
                calls[name], n_bytes[name] = attention_call(pair, path, n_keys, args.rows, library, q)
        times = interleaved(calls, args.rounds, clock)
        for name, seconds in times.items():
            ratio = median(mine / dense for mine, dense in zip(seconds, times["dense"], strict=True))
            path_name, pair = (name[:9], name[9:]) if name != "dense" else ("dense", "f32/f32")
            best, of_best = min(seconds), min(seconds) / min(times["dense"])
            print(
                f"{n_keys:>6} {path_name:9}{pair:15}{median(seconds) * 1e3:9.3f}{ratio:10.3f}"
                f"{best * 1e3:9.3f}{of_best:10.3f}{n_bytes[name] / best / 1e9:7.1f}"
            )


if __name__ == "__main__":
    main()
