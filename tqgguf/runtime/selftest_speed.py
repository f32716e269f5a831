"""How fast attention from blocks is on this device beside MLX's own over f16: a few figures, for people to report.

Calls are chained in one evaluation, each fed with the answer before it; the graph is built before the clock starts.
benchmarks/gpu.py measures with more care. Knows nothing of what is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from tqgguf.formats.blocks.codec import Codec, resolve_codec
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.kv.pages import PAGE, Query, SideView

N_HEADS, N_KV_HEADS, HEAD_DIM = 32, 8, 128
PAIRS = (("turbo4", "turbo3"), ("turbo4", "turbo4"), ("q8_0", "q8_0"))
GPU_KEYS = (8192, 32768)
_CHAIN, _REPEATS = 20, 5


@dataclass(frozen=True)
class Speed:
    """Microseconds of a decode step's attention in one layer, from blocks and from f16."""

    types: str
    n_keys: int
    blocks_us: float
    f16_us: float


def measure(
    backend: Backend, keys: tuple[int, ...] = GPU_KEYS, pairs: tuple[tuple[str, str], ...] = PAIRS
) -> Iterator[Speed]:
    """One query row against that many keys, 32 query and 8 KV heads of 128."""
    for n_keys in keys:
        f16 = _f16_us(n_keys)
        for type_k, type_v in pairs:
            yield Speed(f"{type_k}/{type_v}", n_keys, _blocks_us(backend, type_k, type_v, n_keys), f16)


def random_side(
    codec: Codec, n_kv_heads: int, n_keys: int, n_own: int, balanced: bool, tiled: bool = False
) -> SideView:
    """Random blocks of whole pages and n_own rows of the page after them, made on the device."""
    pages = n_keys // PAGE
    shape = (pages, n_kv_heads, PAGE)
    words = mx.random.randint(0, 1 << 30, (*shape, codec.n_blocks * codec.code_bytes // 4)).astype(mx.uint32)
    codes = ((words << 2) | (words >> 28)).view(mx.uint8)
    scales = mx.random.uniform(8, 16, (*shape, codec.n_blocks * codec.n_scales))
    if codec.block_type.family == "ggml":
        scales = scales / 512
    scales = scales.astype(mx.float16)
    own = mx.random.normal((n_kv_heads, n_own, codec.head_dim)).astype(mx.float16)
    means = mx.random.normal((pages, n_kv_heads, codec.head_dim)).astype(mx.float16) if balanced else None
    scale = mx.random.uniform(0.5, 2, (n_kv_heads, codec.head_dim)) if balanced else None
    mx.eval([a for a in (codes, scales, own, means, scale) if a is not None])
    return SideView(
        codec, codes, scales, rows=own, rows_start=n_keys, page_means=means, channel_scale=scale, tiled=tiled
    )


def _blocks_us(backend: Backend, type_k: str, type_v: str, n_keys: int) -> float:
    k, v = (resolve_codec(t, HEAD_DIM, side) for t, side in ((type_k, "k"), (type_v, "v")))
    sides = [
        random_side(k, N_KV_HEADS, n_keys, PAGE // 2, type_k.startswith("turbo")),
        random_side(v, N_KV_HEADS, n_keys, PAGE // 2, False, backend.tiles_values(v)),
    ]

    def step(q: mx.array) -> mx.array:
        return backend.attend(q, *sides, offset=n_keys + PAGE // 2 - 1, query=Query(HEAD_DIM**-0.5))

    return _chained_us(step)


def _f16_us(n_keys: int) -> float:
    keys, values = (mx.random.normal((1, N_KV_HEADS, n_keys, HEAD_DIM)).astype(mx.float16) for _ in range(2))
    mx.eval(keys, values)
    return _chained_us(lambda q: mx.fast.scaled_dot_product_attention(q, keys, values, scale=HEAD_DIM**-0.5))


def _chained_us(step: Callable[[mx.array], mx.array]) -> float:
    """Microseconds of one of _CHAIN calls in an evaluation, the median of _REPEATS."""
    q = mx.random.normal((1, N_HEADS, 1, HEAD_DIM)).astype(mx.float16)
    times = []
    for _ in range(_REPEATS + 1):
        out = q
        for _ in range(_CHAIN):
            out = step(out)
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(out)
        mx.synchronize()
        times.append((time.perf_counter() - start) / _CHAIN * 1e6)
    return median(times[1:])
