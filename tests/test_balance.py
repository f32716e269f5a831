"""Balance of K: page means and a channel scale are taken out of the blocks and undone exactly, whatever the steps."""

from __future__ import annotations

import copy
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from attention_reference import as_balanced_blocks, as_blocks, as_float, attention
from c_paths import C_PATHS, c_backend

from tqgguf.formats.blocks.balance import (
    NOT_ROTATED,
    RopeLayout,
    balance_rows,
    channel_scale,
    page_mean,
    unbalance_rows,
)
from tqgguf.formats.blocks.cache_spec import resolve_balance
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import MlxBackend, NumpyBackend
from tqgguf.runtime.cache.kv_cache import BlockKVCache

LIMIT = 1e-4
BACKENDS = {"numpy": NumpyBackend, "mlx": MlxBackend, **{f"c-{path}": partial(c_backend, path) for path in C_PATHS}}
HEADS, GROUP, DIM = 2, 3, 64
HALVES = RopeLayout(DIM)


def data(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """k with channels of large and drifting mean, v, and q that uses channels unevenly: [heads, length, DIM]."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((HEADS, length, DIM)).astype(np.float32) for _ in range(2))
    k *= rng.uniform(0.2, 3.0, (HEADS, 1, DIM)).astype(np.float32)
    k[:, :, 3] += 6.0 + np.arange(length, dtype=np.float32) / 100
    q = rng.standard_normal((HEADS * GROUP, length, DIM)).astype(np.float32)
    return k, v, q * rng.uniform(0.1, 2.0, (1, 1, DIM)).astype(np.float32)


def scale_by_formula(k: np.ndarray, q: np.ndarray, n_prefix: int, dims: int) -> np.ndarray:
    """The channel scale from page 0, from the design's words: (E[q^2] / Var[k]) ** (1/4), one for the halves' pairs."""
    keys = k[:, n_prefix:128].astype(np.float16).astype(np.float64)
    mean = keys.mean(axis=1).astype(np.float16).astype(np.float64)
    variance = ((keys - mean[:, None]) ** 2).mean(axis=1)
    use = (q.astype(np.float64)[:, n_prefix:128] ** 2).mean(axis=1).reshape(HEADS, GROUP, DIM).mean(axis=1)
    for x in (variance, use):
        halves = (x[:, : dims // 2] + x[:, dims // 2 : dims]) / 2
        x[:, : dims // 2] = x[:, dims // 2 : dims] = halves
        x += 1e-4 * x.mean(axis=1, keepdims=True)
    a = (use / variance) ** 0.25
    return (a / np.exp(np.log(a).mean(axis=1, keepdims=True))).astype(np.float32)


def attended(cache: BlockKVCache, k: np.ndarray, v: np.ndarray, q: np.ndarray, steps: list[int]) -> np.ndarray:
    """Attention of all queries [n_heads, length, DIM], the tokens arriving in these steps."""
    outputs, at = [], 0
    for n in steps:
        part = slice(at, at + n)
        mask = cache.make_mask(n)
        keys, values = cache.update_and_fetch(mx.array(k[None, :, part]), mx.array(v[None, :, part]))
        out = hook.scaled_dot_product_attention(
            mx.array(q[None, :, part]), keys, values, cache=cache, scale=DIM**-0.5, mask=mask
        )
        outputs.append(np.array(out)[0])
        at += n
    return np.concatenate(outputs, axis=1)


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def expected_attention(
    type_k: str,
    type_v: str,
    k: np.ndarray,
    v: np.ndarray,
    q: np.ndarray,
    n_prefix: int,
    scale: np.ndarray | None,
    window: int | None = None,
    own_from_blocks: bool = False,
) -> np.ndarray:
    codec_k, codec_v = resolve_codec(type_k, DIM, "k"), resolve_codec(type_v, DIM, "v")
    stored = (
        as_balanced_blocks(codec_k, k, n_prefix, scale),
        as_float(codec_k, k),
        as_blocks(codec_v, v, n_prefix),
        as_float(codec_v, v),
    )
    return attention(q, *stored, DIM**-0.5, window, own_from_blocks=own_from_blocks)


STEPS = {
    "one step": [700],
    "the grid": [256, 256, 188],
    "short ones": [100, 28, 1, 127, 128, 3, 1, 200, 112],
    "decoding": [120, *[1] * 20, 244, 300, *[1] * 16],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("window", [None, 150])
def test_attention_from_balanced_blocks_equals_float64_attention(backend: str, steps: str, window: int | None) -> None:
    for type_k, type_v, mode, n_prefix in (
        ("turbo4", "turbo3", "full", 4),
        ("turbo2", "q8_0", "page", 0),
        ("q4_0", "f16", "full", 100),
        ("turbo3", "turbo4", "full", 128),
    ):
        k, v, q = data(700)
        cache = BlockKVCache(
            type_k,
            type_v,
            balance=mode,
            n_prefix=n_prefix,
            window=window,
            rope=HALVES,
            backend=BACKENDS[backend](),
        )
        out = attended(cache, k, v, q, STEPS[steps])
        a = scale_by_formula(k, q, n_prefix, DIM) if mode == "full" and n_prefix < 128 else None
        expected = expected_attention(type_k, type_v, k, v, q, n_prefix, a, window)
        # a code may flip where the float64 scale and the cache's differ in the last bit
        assert relative_error(out, expected) <= 20 * LIMIT, (type_k, type_v)
        if mode == "page":
            assert relative_error(out, expected) <= LIMIT
        assert cache.usage.by_fallback == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [[256, 256, 188], [128] * 5 + [60], [640, 60]])
def test_without_a_tail_queries_read_their_own_page_from_blocks(backend: str, steps: list[int]) -> None:
    k, v, q = data(700, seed=1)
    for type_k, type_v, mode, n_prefix, window in (
        ("turbo4", "turbo3", "page", 4, None),
        ("turbo3", "f16", "off", 0, 200),
        ("f16", "q4_0", "off", 128, None),
        ("q8_0", "turbo4", "page", 0, 130),
    ):
        cache = BlockKVCache(
            type_k,
            type_v,
            balance=mode,
            n_prefix=n_prefix,
            window=window,
            tail=False,
            backend=BACKENDS[backend](),
        )
        out = attended(cache, k, v, q, steps)
        codec_k, codec_v = resolve_codec(type_k, DIM, "k"), resolve_codec(type_v, DIM, "v")
        blocks = as_blocks(codec_k, k, n_prefix) if mode == "off" else as_balanced_blocks(codec_k, k, n_prefix, None)
        stored = blocks, as_float(codec_k, k), as_blocks(codec_v, v, n_prefix), as_float(codec_v, v)
        expected = attention(q, *stored, DIM**-0.5, window, own_from_blocks=True)
        assert relative_error(out, expected) <= LIMIT, (type_k, type_v)
        reads = cache.usage.reads
        whole = sum(min(n + 1, window or 700) for n in range(700))
        assert reads.keys_from_blocks + reads.keys_in_float == whole or type_k == "f16"


def test_without_a_tail_only_the_last_step_may_end_inside_a_page() -> None:
    k, v, q = data(300)
    cache = BlockKVCache("turbo4", "turbo4", tail=False)
    attended(cache, k, v, q, [256, 44])
    with pytest.raises(
        RequestError, match="a cache without a tail takes whole pages until its last step, it holds 300"
    ):
        attended(cache, k, v, q, [1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_calibrated_scale_holds_from_the_first_page_on(backend: str) -> None:
    k, v, q = data(400)
    scale = np.random.default_rng(3).uniform(0.3, 3.0, (HEADS, DIM)).astype(np.float32)
    cache = BlockKVCache("turbo4", "turbo3", channel_scale=mx.array(scale), backend=BACKENDS[backend]())
    out = attended(cache, k, v, q, [256, 144])
    assert relative_error(out, expected_attention("turbo4", "turbo3", k, v, q, 4, scale)) <= LIMIT


def test_a_scale_of_another_models_heads_is_refused_before_anything_changes() -> None:
    k, v, _ = data(10)
    cache = BlockKVCache("turbo4", "turbo3", channel_scale=mx.ones((HEADS, 128)))
    with pytest.raises(RequestError, match=r"expected a channel scale \(2, 64\) for these keys, found \(2, 128\)"):
        cache.update_and_fetch(mx.array(k[None]), mx.array(v[None]))
    assert cache.empty()


def keys_of(cache: BlockKVCache) -> list[bytes]:
    arrays = [a for a in cache.state[-2] if a is not None]
    return [bytes(memoryview(np.ascontiguousarray(a))) for a in arrays]


def test_the_scale_is_decided_by_the_queries_of_page_0_alone() -> None:
    k, v, q = data(300)
    other = q.copy()
    other[:, 128:] *= 5.0
    caches = [BlockKVCache("turbo4", "turbo3", rope=HALVES) for _ in range(2)]
    for cache, queries in zip(caches, (q, other), strict=True):
        attended(cache, k, v, queries, [256, 44])
    assert keys_of(caches[0]) == keys_of(caches[1])
    np.testing.assert_allclose(np.array(caches[0].sides[0].scale.value), scale_by_formula(k, q, 4, DIM), rtol=1e-5)


@pytest.mark.parametrize("n", [60, 127, 128, 300])
def test_nobody_attending_leaves_the_scale_at_one(n: int) -> None:
    k, v, _ = data(300)
    cache = BlockKVCache("turbo4", "turbo3", rope=HALVES, rolls_back=False)
    for part in (slice(0, n), slice(n, 300)):
        cache.update_and_fetch(mx.array(k[None, :, part]), mx.array(v[None, :, part]))
    page_only = BlockKVCache("turbo4", "turbo3", balance="page", rolls_back=False)
    page_only.update_and_fetch(mx.array(k[None]), mx.array(v[None]))
    assert keys_of(cache)[:-1] == keys_of(page_only)  # the scale comes last where no last page is kept
    assert (np.array(cache.sides[0].scale.value) == 1).all()


@pytest.mark.parametrize("n", [1, 100, 127, 128, 129, 300])
def test_restoring_and_copying_keep_what_page_0_has_taught_so_far(n: int) -> None:
    k, v, q = data(500)
    straight, cut = (BlockKVCache("turbo3", "turbo3", rope=HALVES) for _ in range(2))
    attended(straight, k, v, q, [n])
    attended(cut, k, v, q, [n])
    rest = [x[:, n:] for x in (k, v, q)]
    restored = BlockKVCache.from_state(cut.state)
    copied = copy.deepcopy(cut)
    expected = attended(straight, *rest, [500 - n])
    for other in (restored, copied):
        assert np.array_equal(attended(other, *rest, [500 - n]), expected)
        assert keys_of(other) == keys_of(straight)


def test_trimming_inside_page_0_forgets_the_queries_of_what_was_removed() -> None:
    k, v, q = data(200)
    straight, cut = (BlockKVCache("turbo4", "turbo3", rope=HALVES) for _ in range(2))
    attended(straight, k, v, q, [100, 100])
    attended(cut, k, v, q, [100])
    attended(cut, 3 * k[:, :20], v[:, :20], 9 * q[:, :20], [20])
    cut.trim(20)
    attended(cut, k[:, 100:], v[:, 100:], q[:, 100:], [100])
    assert keys_of(cut) == keys_of(straight)


@pytest.mark.parametrize("length", [1, 50, 128, 200, 256])
def test_trimming_into_a_balanced_page_brings_its_values_back(length: int) -> None:
    k, v, q = data(300)
    cache = BlockKVCache("q8_0", "q8_0", balance="full", rope=HALVES)
    attended(cache, k, v, q, [300])
    cache.trim(300 - length)
    one = mx.array(k[None, :, :1])
    keys, _ = cache.update_and_fetch(one, one)
    np.testing.assert_allclose(np.array(keys)[0, :, :length], k[:, :length], atol=0.1)


def test_a_step_that_is_attended_late_still_reads_its_own_keys() -> None:
    k, v, q = data(300)
    cache = BlockKVCache("turbo4", "turbo3", rope=HALVES)
    keys, values = cache.update_and_fetch(mx.array(k[None, :, :200]), mx.array(v[None, :, :200]))
    cache.update_and_fetch(mx.array(k[None, :, 200:]), mx.array(v[None, :, 200:]))
    out = hook.scaled_dot_product_attention(
        mx.array(q[None, :, :200]), keys, values, cache=cache, scale=DIM**-0.5, mask="causal"
    )
    expected = expected_attention("turbo4", "turbo3", k[:, :200], v[:, :200], q[:, :200], 4, None)
    assert relative_error(np.array(out)[0], expected) <= LIMIT


def test_keys_around_a_huge_constant_keep_their_detail() -> None:
    rng = np.random.default_rng(4)
    k = rng.standard_normal((HEADS, 256, DIM)).astype(np.float32)
    k[:, :, 7] += 500.0  # as some of Qwen2.5's layers have
    v, q = rng.standard_normal(k.shape).astype(np.float32), rng.standard_normal((HEADS * GROUP, 256, DIM))
    q[:, :, 7] *= 0.01

    def error(**settings) -> float:
        cache = BlockKVCache("turbo4", "f16", rope=HALVES, tail=False, **settings)
        exact = [x.astype(np.float16).astype(np.float64) for x in (k, k, v, v)]
        return relative_error(
            attended(cache, k, v, q.astype(np.float32), [256]), attention(q.astype(np.float32), *exact, DIM**-0.5)
        )

    assert error(balance="full") < 0.1 < error(balance="off")


# The arithmetic


def test_the_mean_of_a_page_is_a_float32_sum_in_token_order() -> None:
    rng = np.random.default_rng(5)
    for heads, dim in ((1, 32), (3, 64), (8, 128), (2, 96)):
        rows = (rng.standard_normal((heads, 128, dim)) * 10.0 ** rng.integers(-3, 4, (heads, 1, dim))).astype(
            np.float16
        )
        for strided in (rows, np.ascontiguousarray(rows.swapaxes(0, 1)).swapaxes(0, 1), rows[:, :, ::1]):
            for n_skipped in (0, 4, 127):
                total = np.zeros((heads, dim), np.float32)
                for token in range(n_skipped, 128):
                    total = total + strided[:, token].astype(np.float32)
                expected = (total * np.float32(1 / (128 - n_skipped))).astype(np.float16)
                assert np.array_equal(page_mean(strided, n_skipped), expected)
    assert not page_mean(rows, 128).any()


def test_balanced_rows_come_back() -> None:
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((2, 128, 64)).astype(np.float16)
    mean, scale = page_mean(rows), rng.uniform(0.5, 2, (2, 64)).astype(np.float32)
    for a in (None, scale):
        np.testing.assert_allclose(unbalance_rows(balance_rows(rows, mean, a), mean, a), rows, atol=1e-6)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [0, 32, 64])
def test_the_two_channels_that_rotate_together_have_one_scale(traditional: bool, dims: int) -> None:
    rng = np.random.default_rng(7)
    q, k = rng.uniform(0.1, 10, (2, 3, 64))
    scale = channel_scale(q, k, RopeLayout(dims, traditional))
    first, second = (scale[:, 0:dims:2], scale[:, 1:dims:2]) if traditional else np.split(scale[:, :dims], 2, axis=1)
    assert np.array_equal(first, second)
    assert len(np.unique(scale[0])) == 64 - dims // 2
    np.testing.assert_allclose(np.log(scale).mean(axis=1), 0, atol=1e-6)
    assert np.array_equal(channel_scale(7 * q, 0.1 * k, RopeLayout(dims, traditional)), scale)


def test_a_head_without_statistics_has_a_scale_of_one() -> None:
    q, k = np.ones((3, 8)), np.ones((3, 8))
    q[0], k[1] = 0, 0
    q[2, 0] = 16
    scale = channel_scale(q, k, NOT_ROTATED)
    assert (scale[:2] == 1).all() and scale[2, 0] > scale[2, 1]


@pytest.mark.parametrize(
    ("requested", "type_k", "mode"),
    [
        (None, "turbo4", "full"),
        (None, "q8_0", "off"),
        (None, "f16", "off"),
        ("page", "turbo2", "page"),
        ("full", "q4_0", "full"),
        ("off", "turbo3", "off"),
        ("full", "bf16", "off"),
    ],
)
def test_turbo_keys_are_balanced_unless_another_mode_is_requested(requested: str, type_k: str, mode: str) -> None:
    assert resolve_balance(requested, type_k) == mode


def test_an_unknown_mode_is_refused_with_the_list() -> None:
    with pytest.raises(RequestError, match="expected one of off, page, full, found 'half'"):
        resolve_balance("half", "turbo4")


# What does not fit


@pytest.mark.parametrize(
    "scale",
    [
        np.ones((HEADS, DIM), np.int32),
        np.ones(DIM, np.float32),
        np.zeros((HEADS, DIM), np.float32),
        np.full((HEADS, DIM), 1e-42, np.float32),
        np.full((HEADS, DIM), -1.0, np.float32),
        np.full((HEADS, DIM), np.nan, np.float32),
        mx.full((HEADS, DIM), 1e20),
        mx.ones((HEADS, DIM), mx.bfloat16),
        [[1.0]],
        "scale",
    ],
)
def test_a_scale_that_is_none_is_refused_when_the_cache_is_made(scale: object) -> None:
    with pytest.raises(RequestError, match="layer 3: expected a channel scale"):
        BlockKVCache("turbo4", "turbo4", layer=3, channel_scale=scale)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_scale_of_another_float_type_is_taken_as_float32(dtype: type) -> None:
    k, v, q = data(300)
    scale = np.random.default_rng(3).uniform(0.3, 3.0, (HEADS, DIM)).astype(np.float16)
    found = [
        attended(BlockKVCache("turbo4", "turbo3", channel_scale=scale.astype(t)), k, v, q, [300])
        for t in (np.float32, dtype)
    ]
    assert np.array_equal(*found)


@pytest.mark.parametrize("bad", [np.inf, 1e25, -np.inf])
def test_queries_beyond_all_measure_do_not_decide_the_scale(bad: float) -> None:
    k, v, q = data(300)
    q[1, 50, 5] = bad
    cache = BlockKVCache("turbo4", "turbo3", rope=HALVES)
    attended(cache, k, v, q, [100, 100, 100])
    assert np.isfinite(np.array(cache.sides[0].scale.value)).all()
    assert copy.deepcopy(cache).offset == 300


QUERY_SHAPES = [
    (1, 1, 1, DIM),
    (1, 0, 1, DIM),
    (1, 3, 1, DIM),
    (1, 4, 1, 32),
    (2, 4, 1, DIM),
    (1, 4, 2, DIM),
    (4, 1, DIM),
]


@pytest.mark.parametrize("shape", QUERY_SHAPES)
def test_queries_that_do_not_belong_to_the_keys_are_refused(shape: tuple[int, ...]) -> None:
    k, v, _ = data(1)
    cache = BlockKVCache("turbo4", "turbo3", layer=2)
    keys, values = cache.update_and_fetch(mx.array(k[None]), mx.array(v[None]))
    with pytest.raises(RequestError, match=r"layer 2: expected queries \[1, a multiple of 2, 1, 64\], found \["):
        hook.scaled_dot_product_attention(mx.ones(shape), keys, values, cache=cache, scale=0.1, mask=None)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_sink_logits_for_other_heads_are_refused(n: int) -> None:
    k, v, _ = data(1)
    cache = BlockKVCache("turbo4", "turbo3")
    keys, values = cache.update_and_fetch(mx.array(k[None]), mx.array(v[None]))
    with pytest.raises(RequestError, match=r"layer 0: expected 4 sink logits, found \["):
        hook.scaled_dot_product_attention(
            mx.ones((1, 4, 1, DIM)), keys, values, cache=cache, scale=0.1, mask=None, sinks=mx.ones(n)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1.5}, "window: expected a whole number of at least 1, found 1.5"),
        ({"window": -5}, "window: expected a whole number of at least 1, found -5"),
        ({"layer": -1}, "layer: expected a whole number of at least 0, found -1"),
        ({"rope": None}, "RoPE: expected a layout over an even number of channels, found None"),
        ({"rope": RopeLayout(63)}, "RoPE: expected a layout over an even number of channels"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_words(settings: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BlockKVCache("turbo4", "turbo4", **settings)


@pytest.mark.parametrize("layout", [HALVES, RopeLayout(32, traditional=True), NOT_ROTATED], ids=str)
@pytest.mark.parametrize("n_prefix", [0, 4])
@pytest.mark.parametrize("case", ["plain", "outliers", "few queries", "no queries", "one head unused", "all alike"])
def test_mlxs_channel_scale_is_numpys(case: str, n_prefix: int, layout: RopeLayout) -> None:
    k, _, q = data(128, seed=7)
    squares = (q.reshape(HEADS, GROUP, 128, DIM) ** 2).sum(axis=1)
    if case == "outliers":
        k[0, 20], squares[1, 30] = 4e4, 1e6
        k[1, 21], squares[0, 31] = np.inf, np.inf
    if case == "few queries":
        squares[:, :100] = 0
    if case == "one head unused":
        squares[1] = 0
    if case == "all alike":
        k[:] = 1.5
    page = mx.array(k.astype(np.float16))
    given = None if case == "no queries" else mx.array(squares)
    mean = NumpyBackend().page_mean(page, n_prefix)
    expected, found = (
        np.asarray(of.page_scale(page, mean, given, n_prefix, layout)) for of in (NumpyBackend(), MlxBackend())
    )
    assert np.allclose(found, expected, rtol=1e-5, atol=0)
    assert (expected[1] == 1).all() if case == "one head unused" else True
