"""A cache whose backend is the kernels' (on the emulator) answers as one by numpy does, step by step."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest
from emulator.launcher import EmulatedLauncher

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.selftest import attention_cases

HEAD_DIM, N_HEADS, N_KV_HEADS = 128, 8, 2
STEPS = (120, 1, 5, 4, 1, 130, 1, 1)  # through page 0's end in a step of four, through page 1's in a long one


def answers(backend: Backend, type_k: str, type_v: str, window: int | None, by_fallback: bool) -> list[np.ndarray]:
    """Attention of every step, by the dispatcher or by MLX's own on what the cache says that it holds."""
    rng = np.random.default_rng(11)
    rope = RopeLayout(HEAD_DIM, True)
    cache = BlockKVCache(type_k, type_v, window=window, rope=rope, backend=backend)
    outs = []
    for n in STEPS:
        k, v, q = (
            mx.array(rng.standard_normal((1, heads, n, HEAD_DIM)).astype(np.float16))
            for heads in (N_KV_HEADS, N_KV_HEADS, N_HEADS)
        )
        mask = cache.make_mask(n)
        keys, values = cache.update_and_fetch(k, v)
        if by_fallback:
            out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1, mask=mask)
        else:
            out = hook.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.1, mask=mask)
        outs.append(np.array(out.astype(mx.float32)))
    mx.eval(cache.state)  # with the rows of a last step that nobody attended from
    return outs


@pytest.mark.parametrize(
    ("type_k", "type_v", "window", "by_fallback"),
    [("turbo4", "turbo3", None, False), ("turbo4", "turbo3", 100, False), ("turbo4", "turbo3", None, True)],
)
def test_every_step_answers_as_by_numpy(type_k: str, type_v: str, window: int | None, by_fallback: bool) -> None:
    launcher = EmulatedLauncher()
    found = answers(KernelBackend(launcher), type_k, type_v, window, by_fallback)
    expected = answers(NumpyBackend(), type_k, type_v, window, by_fallback)
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < 3e-3, errors
    assert launcher.launched["join_rows"] == len(STEPS) and launcher.launched["encode_pages"]
    assert launcher.launched["decode_attention"] == (0 if by_fallback else 7)


def test_scores_may_be_so_large_that_one_key_takes_all() -> None:
    # weights are powers of two below a bound that follows the scores with some headroom
    outs = []
    for backend in (KernelBackend(EmulatedLauncher()), NumpyBackend()):
        cache, q = filled(backend, 300)
        k, v = (mx.array(np.random.default_rng(s).standard_normal((1, N_KV_HEADS, 1, HEAD_DIM))) for s in (5, 6))
        keys, values = cache.update_and_fetch(k, v)
        outs.append(np.array(hook.scaled_dot_product_attention(q[:, :, -1:], keys, values, cache=cache, scale=8.0)))
    assert np.linalg.norm(outs[0] - outs[1]) < 1e-2 * np.linalg.norm(outs[1])


def test_values_beyond_float16_become_its_largest_and_what_is_not_finite_stays() -> None:
    new = mx.array([1e6, -1e6, float("inf"), float("nan"), 1.5, 0, 0, 0] * 4)[None, None, None]
    backend = KernelBackend(EmulatedLauncher())
    k, v = backend.join_rows((None, None), (new, -new))
    assert k.shape == v.shape == (1, 1, 32) and k.dtype == v.dtype == mx.float16
    assert np.array_equal(np.array(k)[0, 0, :5], [65504, -65504, np.inf, np.nan, 1.5], equal_nan=True)
    assert np.array_equal(np.array(v)[0, 0, :5], [-65504, 65504, -np.inf, np.nan, -1.5], equal_nan=True)


def filled(backend: Backend, n: int) -> tuple[BlockKVCache, mx.array]:
    rng = np.random.default_rng(12)
    cache = BlockKVCache("turbo4", "turbo3", rope=RopeLayout(HEAD_DIM, True), backend=backend)
    k, v = (mx.array(rng.standard_normal((1, N_KV_HEADS, n, HEAD_DIM)).astype(np.float16)) for _ in range(2))
    q = mx.array(rng.standard_normal((1, N_HEADS, n, HEAD_DIM)).astype(np.float16))
    keys, values = cache.update_and_fetch(k, v)
    hook.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.1, mask="causal")
    return cache, q


def next_answer(cache: BlockKVCache) -> np.ndarray:
    x = mx.array(np.random.default_rng(13).standard_normal((1, N_HEADS, 1, HEAD_DIM)).astype(np.float16))
    keys, values = cache.update_and_fetch(x[:, :N_KV_HEADS], x[:, N_KV_HEADS : 2 * N_KV_HEADS])
    return np.array(hook.scaled_dot_product_attention(x, keys, values, cache=cache, scale=0.1))


def test_a_state_is_the_same_whoever_reads_the_cache() -> None:
    # the kernels hold V's codes in tiles, and states have them as they are held
    by_kernels, _ = filled(KernelBackend(EmulatedLauncher()), 300)
    by_numpy, _ = filled(NumpyBackend(), 300)
    restored = BlockKVCache(backend=NumpyBackend())
    restored.state = by_kernels.state
    for a, b in zip(restored.state[-1], by_numpy.state[-1], strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
    back = BlockKVCache(backend=KernelBackend(EmulatedLauncher()))
    back.state = restored.state
    expected = next_answer(by_kernels)
    for cache in (restored, back):
        assert np.linalg.norm(next_answer(cache) - expected) < 3e-3 * np.linalg.norm(expected)


def test_a_cut_inside_an_encoded_page_keeps_its_decoded_values() -> None:
    caches = [filled(backend, 300)[0] for backend in (KernelBackend(EmulatedLauncher()), NumpyBackend())]
    for cache in caches:
        assert cache.trim(100) == 100
    found, expected = map(next_answer, caches)
    assert np.linalg.norm(found - expected) < 3e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("workspace_bytes", [1, 1 << 30])
@pytest.mark.parametrize("window", [None, 150])
def test_a_long_step_needs_no_more_than_its_workspace(workspace_bytes: int, window: int | None) -> None:
    # at least one KV head is decoded at a time, and rows in parts that bound the mask
    by_kernels = KernelBackend(EmulatedLauncher(), workspace_bytes=workspace_bytes, mask_bytes=2 * 256 * 1000)
    outs = []
    for backend in (by_kernels, NumpyBackend()):
        rng = np.random.default_rng(14)
        cache, _ = filled(backend, 200)
        cache.window = window
        k, v, q = (
            mx.array(rng.standard_normal((1, heads, 400, HEAD_DIM)).astype(np.float16))
            for heads in (N_KV_HEADS, N_KV_HEADS, N_HEADS)
        )
        keys, values = cache.update_and_fetch(k, v)
        outs.append(np.array(hook.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.1, mask="causal")))
    assert np.linalg.norm(outs[0] - outs[1]) < 3e-3 * np.linalg.norm(outs[1])


@pytest.mark.parametrize("types", [("f16", "f16"), ("bf16", "f32")])
def test_float_types_are_left_to_mlx(types: tuple[str, str]) -> None:
    launcher = EmulatedLauncher()
    outcomes = [case.run() for case in attention_cases(KernelBackend(launcher), 64, *types)]
    assert [(o.detail, o.error) for o in outcomes if o.error > (8e-3 if "bf16" in types else o.limit)] == []
    assert not launcher.launched


@lru_cache
def grown(by: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Answers and the state's arrays after steps of few rows, each joined to the tails as `by` says."""
    cache, _ = filled(KernelBackend(EmulatedLauncher()), 130)
    if by == "observer":  # who watches queries sees whole tails
        cache.usage.observer = lambda *_: None
    rng, outs = np.random.default_rng(15), []
    for n in (1, 3, 1):
        k, v, q = (
            mx.array(rng.standard_normal((1, heads, n, HEAD_DIM)).astype(np.float16))
            for heads in (N_KV_HEADS, N_KV_HEADS, N_HEADS)
        )
        keys, values = cache.update_and_fetch(k, v)
        if by == "state":
            assert cache.state[-1][3].shape[1] == cache.offset % 128
        if by == "fallback":
            outs.append(np.array(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1, mask="causal")))
        else:
            outs.append(np.array(hook.scaled_dot_product_attention(q, keys, values, scale=0.1, mask="causal")))
    return outs, [np.array(array) for arrays in cache.state[-2:] for array in arrays if array is not None]


@pytest.mark.parametrize("by", ["observer", "state", "fallback"])
def test_new_rows_reach_the_tails_whoever_needs_them_first(by: str) -> None:
    outs, state = grown(by)
    expected_outs, expected_state = grown("attention")
    assert all(map(np.array_equal, state, expected_state))
    limit = 3e-3 if by == "fallback" else 0
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(outs, expected_outs, strict=True)]
    assert max(errors) <= limit


def test_one_step_can_be_attended_from_twice() -> None:
    # models share a layer's keys and values with later layers
    cache, _ = filled(KernelBackend(EmulatedLauncher()), 300)
    x = mx.array(np.random.default_rng(13).standard_normal((1, N_HEADS, 1, HEAD_DIM)).astype(np.float16))
    keys, values = cache.update_and_fetch(x[:, :N_KV_HEADS], x[:, N_KV_HEADS : 2 * N_KV_HEADS])
    first, second = (np.array(hook.scaled_dot_product_attention(x, keys, values, scale=0.1)) for _ in range(2))
    assert np.array_equal(first, second)


def test_caches_of_one_launcher_keep_their_own_exact_prefixes() -> None:
    # they share compiled functions: what differs between them must come in by arrays
    launcher = EmulatedLauncher()
    for n_prefix in (4, 16, 0):
        found, expected = (
            decoded(BlockKVCache("turbo4", "turbo3", n_prefix=n_prefix, backend=backend))
            for backend in (KernelBackend(launcher), NumpyBackend())
        )
        assert np.linalg.norm(found - expected) < 3e-3 * np.linalg.norm(expected)


def decoded(cache: BlockKVCache) -> np.ndarray:
    """The answer to a token whose rows only make the tails longer."""
    rng = np.random.default_rng(16)
    for n in (256, 1, 1):
        k, v, q = (
            mx.array(rng.standard_normal((1, heads, n, HEAD_DIM)).astype(np.float16))
            for heads in (N_KV_HEADS, N_KV_HEADS, N_HEADS)
        )
        keys, values = cache.update_and_fetch(k, v)
        out = hook.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.1, mask=cache.make_mask(n))
    return np.array(out)
