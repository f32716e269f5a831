"""A long step's attention, one layer: new rows after keys that are held, beside MLX's own over f16. Part of gpu.py.

Up to MOST_BOTH_WAYS rows, blocks are read by decode attention and by decoding pages first, whatever the threshold
between them is: what it should be shows there. Long steps begin to evaluate while they are built, so that building
is in the time of both.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from gpu_decode import HEADS
from gpu_timing import Timing, chain, print_head, print_row, timed

from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.backends import default_backend
from tqgguf.runtime.kv.pages import Query, SideView
from tqgguf.runtime.selftest_speed import random_side

N_PAIRS = 2  # of --pairs, of which more say nothing new here
N_CALLS = 4  # in one evaluation
MOST_BOTH_WAYS = 128


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefill")
    group.add_argument("--new-rows", nargs="*", type=int, default=[4, 8, 16, 64, 256, 2048, 8192])
    group.add_argument("--cached", nargs="*", type=int, default=[32768], help="keys before the new rows")
    group.add_argument("--most-rows", type=int, help="rows up to which decode attention is taken")
    group.add_argument("--workspace", type=int, help="bytes of keys and values that are decoded at a time")
    group.add_argument("--mask", type=int, help="bytes of a long step's mask, where it needs one")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    n_heads, n_kv_heads, head_dim = HEADS[0]
    found = []
    print_head("new rows", "keys before", "K/V", "kernels us", "wall us", "f16 kernels us", "wall us", "of f16", "wall")
    for n_rows, n_keys in itertools.product(args.new_rows, args.cached):
        q = mx.random.normal((1, n_heads, n_rows, head_dim)).astype(mx.float16)
        held = [mx.random.normal((1, n_kv_heads, n_keys + n_rows, head_dim)).astype(mx.float16) for _ in range(2)]
        mx.eval(q, held)
        works = {"f16": chain(_by_f16, q, [held], N_CALLS, is_lazy=False)}
        for pair in args.pairs[:N_PAIRS]:
            sides = _sides(pair, held, n_keys)
            for how, backend in _backends(args, n_rows).items():
                call = partial(_by_blocks, backend, n_keys)
                works[pair + how] = chain(call, q, [sides], N_CALLS, is_lazy=False)
        timings = timed(works)
        for name, timing in timings.items():
            if name != "f16":
                _print(n_rows, n_keys, name, timing, timings["f16"])
        times = {name: asdict(timing) for name, timing in timings.items()}
        found.append({"rows": n_rows, "keys": n_keys, "timings": times})
        del held, works
        mx.clear_cache()
    return found


def _print(n_rows: int, n_keys: int, pair: str, ours: Timing, f16: Timing) -> None:
    gpu = f"{ours.gpu_us / f16.gpu_us:.2f}" if f16.gpu_us else "-"
    times = (f"{us:.0f}" for us in (ours.gpu_us, ours.wall_us, f16.gpu_us, f16.wall_us))
    print_row(n_rows, n_keys, pair, *times, gpu, f"{ours.wall_us / f16.wall_us:.2f}")


def _backends(args: argparse.Namespace, n_rows: int) -> dict[str, Backend]:
    """The backend's, as asked for; of kernels both ways, where few rows leave the choice."""
    backend = default_backend()
    if not isinstance(backend, KernelBackend):
        return {"": backend}
    bounds = {"workspace_bytes": args.workspace, "mask_bytes": args.mask}
    given = {name: n for name, n in bounds.items() if n is not None}
    if args.most_rows is None and n_rows <= MOST_BOTH_WAYS:
        ways = {" by attention": n_rows, " decoded": 0}
    else:
        ways = {"": args.most_rows}
    return {how: KernelBackend(backend.launcher, most_rows=most, **given) for how, most in ways.items()}


def _sides(pair: str, held: list[mx.array], n_keys: int) -> list[SideView]:
    """Random blocks of all pages, and the new rows themselves in f16."""
    sides = []
    for cache_type, rows, name in zip(pair.split("/"), held, "kv", strict=True):
        _, n_kv_heads, n_tokens, head_dim = rows.shape
        codec = resolve_codec(cache_type, head_dim, "k" if name == "k" else "v")
        balanced = name == "k" and codec.block_type.family == "turbo"
        tiled = name == "v" and default_backend().tiles_values(codec)
        side = random_side(codec, n_kv_heads, n_tokens, 1, balanced, tiled)
        sides.append(replace(side, rows=mx.contiguous(rows[0, :, n_keys:]), rows_start=n_keys))
    mx.eval([side.rows for side in sides])
    return sides


def _by_f16(q: mx.array, held: list[mx.array]) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, *held, scale=q.shape[-1] ** -0.5, mask="causal")


def _by_blocks(backend: Backend, offset: int, q: mx.array, sides: list[SideView]) -> mx.array:
    return backend.attend(q, *sides, offset=offset, query=Query(q.shape[-1] ** -0.5))
