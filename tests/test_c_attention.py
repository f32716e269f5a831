"""The C library attends like float64 on every path: types, sizes, heads, rows, windows, sinks, means."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attention_reference import as_blocks, as_float, attention
from c_paths import C_PATHS, HEAD_DIMS, c_backend

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.cache_spec import default_prefix
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.pages import PAGE, Query, SideView

pytestmark = pytest.mark.parametrize("path", C_PATHS)


@functools.lru_cache(maxsize=64)  # paths follow each other, case by case
def decoding_case(
    type_k: str,
    type_v: str,
    head_dim: int,
    heads: int,
    gqa: int,
    length: int,
    n_rows: int,
    window: int | None,
    sinks: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """k, v, q of the last rows and their float64 attention, the same for every path."""
    rng = np.random.default_rng(length + head_dim + gqa)
    k, v = (rng.standard_normal((heads, length, head_dim)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((heads * gqa, length, head_dim)).astype(np.float32)
    n_prefix = default_prefix([type_k, type_v])
    sides = [(resolve_codec(type_k, head_dim, "k"), k), (resolve_codec(type_v, head_dim, "v"), v)]
    stored = [f(codec, x, *a) for codec, x in sides for f, a in ((as_blocks, (n_prefix,)), (as_float, ()))]
    expected = attention(q, *stored, head_dim**-0.5, window, None if sinks is None else np.array(sinks))
    return k, v, q[:, length - n_rows :].copy(), expected[:, length - n_rows :].astype(np.float32)


def decoding(
    type_k: str,
    type_v: str,
    *,
    n_rows: int,
    path: str,
    length: int = 300,
    head_dim: int = 64,
    n_kv_heads: int = 2,
    gqa: int = 2,
    window: int | None = None,
    sinks: tuple[float, ...] | None = None,
    q_dtype: mx.Dtype = mx.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """A prefill, then one small step: (output, reference), both [n_heads, n_rows, head_dim]."""
    k, v, q, expected = decoding_case(type_k, type_v, head_dim, n_kv_heads, gqa, length, n_rows, window, sinks)
    cache = BlockKVCache(type_k, type_v, window=window, backend=c_backend(path), balance="off")
    before = length - n_rows
    for part in (slice(0, before), slice(before, length)):
        if part.stop > part.start:
            mask = cache.make_mask(part.stop - part.start)
            keys, values = cache.update_and_fetch(mx.array(k[None, :, part]), mx.array(v[None, :, part]))
    out = hook.scaled_dot_product_attention(
        mx.array(q[None]).astype(q_dtype),
        keys,
        values,
        cache=cache,
        scale=head_dim**-0.5,
        mask=mask,
        sinks=None if sinks is None else mx.array(sinks),
    )
    return np.array(out.astype(mx.float32))[0], expected


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("type_k", CACHE_TYPE_NAMES)
def test_a_decode_step_equals_float64_attention_for_every_mix_of_types(path: str, type_k: str) -> None:
    for type_v in CACHE_TYPE_NAMES:
        out, expected = decoding(type_k, type_v, n_rows=1, path=path)
        assert relative_error(out, expected) <= 1e-5, type_v


@pytest.mark.parametrize("gqa", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("n_rows", [1, 2, 16])
def test_any_number_of_rows_and_of_heads_in_a_group(path: str, gqa: int, n_rows: int) -> None:
    for types in (("turbo4", "turbo3"), ("turbo2", "f16"), ("q8_0", "q4_0"), ("q5_1", "bf16")):
        out, expected = decoding(*types, n_rows=n_rows, gqa=gqa, n_kv_heads=3, path=path)
        assert relative_error(out, expected) <= 1e-5, types


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size(path: str, head_dim: int) -> None:
    for types in (("turbo4", "turbo3"), ("turbo3", "turbo2"), ("turbo2", "turbo4"), ("q8_0", "q4_0"), ("q4_1", "f16")):
        if head_dim in (32, 320) and types[0].startswith("turbo"):
            continue  # turbo types have no blocks for these
        for n_rows in (1, 4):
            out, expected = decoding(*types, n_rows=n_rows, head_dim=head_dim, gqa=3, path=path)
            assert relative_error(out, expected) <= 1e-5, (types, n_rows)


@pytest.mark.parametrize("length", [1, 5, 128, 129, 257, 400])
@pytest.mark.parametrize("window", [None, 1, 128, 200])
def test_windows_prefix_and_page_edges(path: str, length: int, window: int | None) -> None:
    for types in (("turbo4", "turbo4"), ("f16", "turbo3"), ("q8_0", "f32"), ("f16", "f16")):
        for n_rows in (1, 6):
            out, expected = decoding(*types, n_rows=min(n_rows, length), length=length, window=window, gqa=3, path=path)
            assert relative_error(out, expected) <= 1e-5, (types, n_rows)


def test_sink_logits_take_part_in_the_softmax(path: str) -> None:
    sinks = (0.5, 9.0, -50.0, 1.0)
    for window in (None, 90):
        out, expected = decoding("turbo4", "turbo3", n_rows=3, sinks=sinks, window=window, path=path)
        assert relative_error(out, expected) <= 1e-5


@pytest.mark.parametrize("n_rows", [1, 5, 11])
def test_page_means_and_channel_scale_equal_the_numpy_backend(path: str, n_rows: int) -> None:
    rng = np.random.default_rng(7)
    heads, pages, head_dim = 2, 11, 128
    codec = resolve_codec("turbo4", head_dim, "k")
    value_codec = resolve_codec("turbo3", head_dim, "v")
    k, v = (rng.standard_normal((pages, heads, PAGE, head_dim)).astype(np.float32) for _ in range(2))
    means = rng.standard_normal((pages, heads, head_dim)).astype(np.float16)
    scale = rng.uniform(0.5, 2.0, (heads, head_dim)).astype(np.float32)
    own = mx.array(rng.standard_normal((heads, 20, head_dim)).astype(np.float16))
    view_k, view_v = (
        SideView(c, *(mx.array(plane) for plane in c.split(c.encode(x))), rows=own, rows_start=pages * PAGE)
        for c, x in ((codec, k), (value_codec, v))
    )
    view_k = SideView(
        codec,
        view_k.codes,
        view_k.scales,
        rows=own,
        rows_start=pages * PAGE,
        page_means=mx.array(means),
        channel_scale=mx.array(scale),
    )
    q = mx.array(rng.standard_normal((1, heads * 3, n_rows, head_dim)).astype(np.float32))
    step = {"offset": pages * PAGE + 20 - n_rows, "query": Query(0.1)}
    backends = c_backend(path), NumpyBackend()
    counts = Reads(), Reads()
    out, expected = (
        np.array(backend.attend(q, view_k, view_v, **step, reads=reads))
        for backend, reads in zip(backends, counts, strict=True)
    )
    assert np.linalg.norm(out - expected) <= 1e-5 * np.linalg.norm(expected)
    assert counts[0] == counts[1] and counts[0].keys_from_blocks == n_rows * pages * PAGE


@pytest.mark.parametrize("types", [("turbo4", "turbo3"), ("f16", "turbo4"), ("f16", "f16"), ("q8_0", "bf16")])
@pytest.mark.parametrize("window", [None, 150])
def test_reads_are_counted_as_the_numpy_backend_counts_them(
    path: str, types: tuple[str, str], window: int | None
) -> None:
    counted = []
    for backend in (c_backend(path), NumpyBackend()):
        cache = BlockKVCache(*types, window=window, backend=backend)
        x = mx.random.normal((1, 2, 400, 64), key=mx.random.key(0))
        for at, n in ((0, 126), (126, 4), (130, 1), (131, 3), (134, 200), (334, 1), (335, 60), (395, 5)):
            mask = cache.make_mask(n)
            part = x[:, :, at : at + n]
            hook.scaled_dot_product_attention(
                part, *cache.update_and_fetch(part, part), cache=cache, scale=1.0, mask=mask
            )
        counted.append(cache.usage.reads)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_queries_of_sixteen_bits_are_read_as_they_are(path: str, dtype: mx.Dtype) -> None:
    out, expected = decoding("turbo4", "turbo3", n_rows=2, q_dtype=dtype, path=path)
    assert relative_error(out, expected) <= 2e-2
