"""Attention from blocks equals float64 attention on the decoded cache, for every mix of types, sizes and steps."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial

import mlx.core as mx
import numpy as np
import pytest
from attention_reference import as_blocks, as_float, attention
from c_paths import C_PATHS, c_backend
from covering import pairwise

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import MlxBackend, NumpyBackend
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.pages import Query, SideView

LIMIT = 1e-4  # of the output's norm
BACKENDS = {"numpy": NumpyBackend, "mlx": MlxBackend, **{f"c-{path}": partial(c_backend, path) for path in C_PATHS}}
WINDOW = 150  # longer than a page, so that windows cut pages
N_KV_HEADS = 2

PARAMETERS = (
    CACHE_TYPE_NAMES,
    CACHE_TYPE_NAMES,
    (64, 96, 128, 256),
    (1, 3, 4, 8),
    (1, 5, 127, 128, 129, 257, 1000),
    ("prefill", "decode", "window"),
)


def steps_of(length: int, mode: str) -> list[int]:
    """How the tokens arrive: in grid chunks, the last ones singly (and in small steps) when decoding."""
    singles = 0 if mode == "prefill" else min(length, 6)
    rest = length - singles
    return (
        [256] * (rest // 256) + ([rest % 256] if rest % 256 else []) + ([1, 3, 1, 1] if singles == 6 else [1] * singles)
    )


@lru_cache(maxsize=1)  # backends take turns with one case
def reference(
    type_k: str, type_v: str, head_dim: int, gqa: int, length: int, window: int | None, n_prefix: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """k and v [N_KV_HEADS, length, head_dim], q and its attention in float64 [n_heads, length, head_dim]."""
    rng = np.random.default_rng(length * 1000 + head_dim + gqa)
    k, v = (rng.standard_normal((N_KV_HEADS, length, head_dim)).astype(np.float32) for _ in range(2))
    k[:, :, 3] += 4.0  # a channel with a large mean, as real keys have
    q = rng.standard_normal((N_KV_HEADS * gqa, length, head_dim)).astype(np.float32)
    codecs = resolve_codec(type_k, head_dim, "k"), resolve_codec(type_v, head_dim, "v")
    stored = [
        f(codec, x, *a)
        for codec, x in zip(codecs, (k, v), strict=True)
        for f, a in ((as_blocks, (n_prefix,)), (as_float, ()))
    ]
    return k, v, q, attention(q, *stored, head_dim**-0.5, window)


def run_case(
    type_k: str,
    type_v: str,
    head_dim: int,
    gqa: int,
    length: int,
    mode: str,
    backend: str,
    *,
    dispatched: bool = True,
    n_prefix: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(attention through the cache, reference), both [n_heads, length, head_dim]."""
    window = WINDOW if mode == "window" else None
    cache = BlockKVCache(type_k, type_v, window=window, backend=BACKENDS[backend](), n_prefix=n_prefix, balance="off")
    k, v, q, expected = reference(type_k, type_v, head_dim, gqa, length, window, cache.settings.types.n_prefix)
    scale, outputs, at = head_dim**-0.5, [], 0
    for n in steps_of(length, mode):
        mask = cache.make_mask(n)
        part = slice(at, at + n)
        keys, values = cache.update_and_fetch(mx.array(k[None, :, part]), mx.array(v[None, :, part]))
        function = hook.scaled_dot_product_attention if dispatched else mx.fast.scaled_dot_product_attention
        extra = {"cache": cache} if dispatched else {}
        outputs.append(np.array(function(mx.array(q[None, :, part]), keys, values, scale=scale, mask=mask, **extra))[0])
        at += n
    assert cache.usage.by_fallback == 0 or not dispatched
    return np.concatenate(outputs, axis=1), expected


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def test_attention_equals_float64_attention_for_every_pair_of_parameters() -> None:
    failures = []
    for case in pairwise(*PARAMETERS, list(BACKENDS)):
        error = relative_error(*run_case(*case))
        if not error <= LIMIT:
            failures.append((case, error))
    assert failures == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["decode", "window"])
@pytest.mark.parametrize("length", [1024, 1025, 2050])
def test_float_rows_are_read_once_each_where_they_take_several_tiles(backend: str, mode: str, length: int) -> None:
    assert relative_error(*run_case("f32", "f16", 64, 1, length, mode, backend)) <= LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["prefill", "decode", "window"])
@pytest.mark.parametrize("n_prefix", [0, 1, 127, 128])
def test_the_exact_prefix_may_be_anything_up_to_a_whole_page(backend: str, mode: str, n_prefix: int) -> None:
    for types in (("turbo4", "q4_0"), ("f16", "turbo3")):
        for length in (128, 129, 257, 400):
            out, expected = run_case(*types, 64, 2, length, mode, backend, n_prefix=n_prefix)
            assert relative_error(out, expected) <= LIMIT, (types, length)


@pytest.mark.slow
@pytest.mark.parametrize("types", list(itertools.product(CACHE_TYPE_NAMES, CACHE_TYPE_NAMES)))
def test_attention_equals_float64_attention_for_the_full_product(types: tuple[str, str]) -> None:
    for case in itertools.product(*PARAMETERS[2:]):
        for backend in BACKENDS:
            if backend != "mlx":
                assert relative_error(*run_case(*types, *case, backend)) <= LIMIT, (case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("type_k", "type_v"), [("turbo4", "turbo3"), ("q8_0", "f16"), ("bf16", "turbo2"), ("f32", "f32")]
)
def test_steps_that_span_many_pages_keep_the_own_page_rule(type_k: str, type_v: str, backend: str) -> None:
    # mlx-lm's own loop evaluates prompts in steps of 2,048
    rng = np.random.default_rng(5)
    k, v, q = (rng.standard_normal((1, n, 700, 64)).astype(np.float32) for n in (1, 1, 2))
    cache = BlockKVCache(type_k, type_v, backend=BACKENDS[backend](), balance="off")
    keys, values = cache.update_and_fetch(mx.array(k), mx.array(v))
    out = hook.scaled_dot_product_attention(mx.array(q), keys, values, cache=cache, scale=0.125, mask="causal")
    codecs = resolve_codec(type_k, 64, "k"), resolve_codec(type_v, 64, "v")
    stored = [
        f(codec, x[0], *a)
        for codec, x in zip(codecs, (k, v), strict=True)
        for f, a in ((as_blocks, (cache.settings.types.n_prefix,)), (as_float, ()))
    ]
    assert relative_error(np.array(out)[0], attention(q[0], *stored, 0.125)) <= LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_logits_take_part_in_the_softmax_and_carry_no_value(backend: str) -> None:
    rng = np.random.default_rng(6)
    k, v, q = (rng.standard_normal((1, n, 200, 64)).astype(np.float32) for n in (2, 2, 4))
    sinks = np.array([0.5, 3.0, -2.0, 1.0], np.float32)
    cache = BlockKVCache("turbo4", "turbo4", backend=BACKENDS[backend](), balance="off")
    keys, values = cache.update_and_fetch(mx.array(k), mx.array(v))
    out = hook.scaled_dot_product_attention(
        mx.array(q), keys, values, cache=cache, scale=0.125, mask="causal", sinks=mx.array(sinks)
    )
    codecs = resolve_codec("turbo4", 64, "k"), resolve_codec("turbo4", 64, "v")
    stored = [
        f(c, x[0], *a) for c, x in zip(codecs, (k, v), strict=True) for f, a in ((as_blocks, (4,)), (as_float, ()))
    ]
    assert relative_error(np.array(out)[0], attention(q[0], *stored, 0.125, sinks=sinks)) <= LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_page_means_and_channel_scale_are_undone_exactly(backend: str) -> None:
    # stored is scale * (k - mean): the query is divided by the scale, and q . mean comes back as the page's offset
    rng = np.random.default_rng(7)
    heads, pages, head_dim, rows = 2, 3, 64, 20
    codec = resolve_codec("turbo4", head_dim, "k")
    k = rng.standard_normal((heads, pages * 128 + rows, head_dim)).astype(np.float32) + 2.0
    v = rng.standard_normal(k.shape).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, (heads, head_dim)).astype(np.float32)
    blocks = k[:, : pages * 128].reshape(heads, pages, 128, head_dim)
    means = blocks.mean(axis=2).astype(np.float16)
    stored = (blocks - means[:, :, None].astype(np.float32)) * scale[:, None, None]
    codes, scales = codec.split(codec.encode(stored.transpose(1, 0, 2, 3)))
    own = k[:, pages * 128 :].astype(np.float16)
    view_k = SideView(
        codec,
        mx.array(codes),
        mx.array(scales),
        rows=mx.array(own),
        rows_start=pages * 128,
        page_means=mx.array(means.transpose(1, 0, 2)),
        channel_scale=mx.array(scale),
    )
    view_v = SideView(resolve_codec("f32", head_dim, "v"), rows=mx.array(v))
    q = rng.standard_normal((heads * 3, rows, head_dim)).astype(np.float32)
    out = BACKENDS[backend]().attend(mx.array(q[None]), view_k, view_v, offset=pages * 128, query=Query(0.125))
    decoded = codec.decode(codec.encode(stored)).astype(np.float64) / scale[:, None, None] + means[:, :, None]
    k_blocks = np.concatenate([decoded.reshape(heads, -1, head_dim), own], axis=1).astype(np.float64)
    all_q = np.concatenate([np.zeros((6, pages * 128, head_dim)), q], axis=1)
    expected = attention(all_q, k_blocks, k_blocks, v.astype(np.float64), v.astype(np.float64), 0.125)
    assert relative_error(np.array(out)[0], expected[:, pages * 128 :]) <= LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_output_has_the_dtype_of_the_query(dtype: mx.Dtype, backend: str) -> None:
    x = mx.random.normal((1, 2, 150, 64), key=mx.random.key(1)).astype(dtype)
    cache = BlockKVCache("turbo3", "turbo3", backend=BACKENDS[backend]())
    keys, values = cache.update_and_fetch(x, x)
    assert keys.dtype == dtype
    out = hook.scaled_dot_product_attention(x, keys, values, cache=cache, scale=0.125, mask="causal")
    assert out.dtype == dtype and out.shape == x.shape
