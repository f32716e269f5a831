"""A few keys or queries far outside all others decide neither the mean of a page nor the channel scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import plain_blocks as plain
import pytest
from c_paths import C_PATHS, c_backend
from calibrations import LLAMA
from emulator.launcher import EmulatedLauncher
from tiny_models import write_tiny

from tqgguf.formats.blocks.balance import (
    FAR_OUTSIDE,
    RopeLayout,
    balance_rows,
    centred_squares,
    counted_queries,
    counted_rows,
    page_mean,
    summed_queries,
)
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.measuring.evaluation.calibration_statistics import calibrate
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend, MlxBackend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.models.load import open_model

HEADS, GROUP, DIM, PREFIX = 2, 3, 64, 4
PAGE = 128
PLAIN_ERROR = 0.0095
"""Of turbo4 on normal keys: .0089, and a little room."""

Keys = np.ndarray


def normal(n_tokens: int = 3 * PAGE, constant: float = 0.0, seed: int = 0) -> tuple[Keys, Keys]:
    """Keys [HEADS, n_tokens, DIM] with a constant channel, queries [HEADS * GROUP, n_tokens, DIM]."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((HEADS, n_tokens, DIM)).astype(np.float32)
    keys[:, :, 7] += constant
    return keys, rng.standard_normal((HEADS * GROUP, n_tokens, DIM)).astype(np.float32)


def filled(keys: Keys, queries: Keys, backend: Backend | None = None, **settings) -> BlockKVCache:
    """A cache of turbo4 keys that saw these, two pages and then the rest."""
    cache = BlockKVCache("turbo4", "f16", rope=RopeLayout(DIM), backend=backend, **settings)
    for part in (slice(0, 2 * PAGE), slice(2 * PAGE, None)):
        k, q = mx.array(keys[None, :, part]), mx.array(queries[None, :, part])
        held = cache.update_and_fetch(k, k)
        mx.eval(hook.scaled_dot_product_attention(q, *held, cache=cache, scale=DIM**-0.5, mask=cache.make_mask(len(q))))
    return cache


def errors(cache: BlockKVCache, keys: Keys, left_out: list[int], constant: float = 0.0) -> list[float]:
    """The relative squared error of each page's keys without those `left_out`, of their detail around the constant."""
    k = cache.sides[0]
    decoded = np.asarray(k.pages.decoded(0, k.end_page))
    judged = np.setdiff1d(np.arange(PREFIX, keys.shape[1]), left_out)
    detail = keys.astype(np.float64)
    squares = ((decoded - detail) ** 2).sum(axis=2)
    detail[:, :, 7] -= constant
    pages = [judged[judged // PAGE == page] for page in range(k.end_page)]
    return [float(squares[:, page].sum() / (detail[:, page] ** 2).sum()) for page in pages]


BACKENDS = {
    "numpy": NumpyBackend,
    "mlx": MlxBackend,
    "kernels": lambda: KernelBackend(EmulatedLauncher()),
    **{f"c-{path}": lambda path=path: c_backend(path) for path in C_PATHS},
}

OUTLIERS = {
    "one in page 0": [50],
    "the first behind the exact prefix": [4],
    "one in page 1": [200],
    "one in each page": [127, 128, 300],
    "a tenth of a page": list(range(20, 33)),
    "nearly half of a page": list(range(6, 65)),
}


@pytest.mark.parametrize("factor", [30.0, 1e3, 8e3, 1e30])
@pytest.mark.parametrize("which", OUTLIERS)
def test_keys_that_are_many_times_the_others_leave_the_others_error_as_it_is(which: str, factor: float) -> None:
    keys, queries = normal()
    with np.errstate(over="ignore"):
        keys[:, OUTLIERS[which]] = np.clip(keys[:, OUTLIERS[which]] * np.float32(factor), -3e38, 3e38)
    assert max(errors(filled(keys, queries), keys, OUTLIERS[which])) < PLAIN_ERROR


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_leaves_them_out(backend: str) -> None:
    keys, queries = normal(seed=3)
    keys[0, 50] *= 1000
    keys[1, 200, 5] = 1.2e5  # beyond what the f16 tail holds
    cache = filled(keys, queries, BACKENDS[backend]())
    assert max(errors(cache, keys, [50, 200])) < PLAIN_ERROR


@pytest.mark.parametrize("factor", [8.0, 1e3])
def test_a_key_far_from_a_constant_that_all_share_is_far_outside_too(factor: float) -> None:
    keys, queries = normal(constant=500.0)
    keys[:, 50] *= factor
    assert max(errors(filled(keys, queries), keys, [50], constant=500.0)) < PLAIN_ERROR


def test_a_constant_that_all_keys_share_is_still_taken_out() -> None:
    keys, queries = normal(constant=2000.0)
    assert max(errors(filled(keys, queries), keys, [], constant=2000.0)) < 0.011  # f16 itself rounds at 2,000


@pytest.mark.parametrize("factor", [2.0, 5.0, 10.0, 15.0, 20.0])
def test_keys_around_the_limit_cost_the_others_little_on_either_side(factor: float) -> None:
    keys, queries = normal()
    keys[:, 50] *= factor
    assert max(errors(filled(keys, queries), keys, [50])) < 1.1 * PLAIN_ERROR


def test_one_query_far_outside_does_not_decide_the_channel_scale() -> None:
    keys, queries = normal()
    usual = np.asarray(filled(keys, queries).sides[0].scale.value)
    queries[:, 50] = 0.0
    queries[:, 50, 9] = 1e6
    found = np.asarray(filled(keys, queries).sides[0].scale.value)
    np.testing.assert_allclose(found, usual, rtol=0.05)


@pytest.mark.parametrize("n", [1, 60, 127])
def test_a_cache_that_is_saved_before_page_0_is_full_leaves_out_the_same(n: int) -> None:
    keys, queries = normal(2 * PAGE)
    keys[:, [20, 100]] *= 1000
    queries[:, [21, 101]] *= 1000
    made = []
    for restored in (False, True):
        cache = BlockKVCache("turbo4", "f16", rope=RopeLayout(DIM))
        for part in (slice(0, n), slice(n, 2 * PAGE)):
            k = mx.array(keys[None, :, part])
            held = cache.update_and_fetch(k, k)
            q = mx.array(queries[None, :, part])
            hook.scaled_dot_product_attention(q, *held, cache=cache, scale=DIM**-0.5, mask="causal")
            cache = BlockKVCache.from_state(cache.state) if restored else cache
        assert max(errors(cache, keys, [20, 100])) < PLAIN_ERROR
        made.append(np.asarray(cache.sides[0].scale.value))
    assert np.array_equal(*made)


# The rule


def pages() -> dict[str, np.ndarray]:
    """f16 [HEADS, PAGE, DIM]: pages on which the rule could go wrong."""
    rng = np.random.default_rng(1)
    usual = rng.standard_normal((HEADS, PAGE, DIM))
    edge = np.zeros((HEADS, PAGE, DIM))  # middle 0, middle reach 1
    edge[:, :, 0] = np.where(np.arange(PAGE) % 2, 1, -1)
    edge[:, :, 1] = np.where(np.arange(PAGE) % 3, 0.25, -0.25)
    edge[0, 40, 2], edge[1, 40, 2] = FAR_OUTSIDE, np.nextafter(np.float16(FAR_OUTSIDE), np.float16(99))
    made = {"normal": usual, "at the limit and just above it": edge}
    for n in (1, 40, 61, 62, 63, 64, 65, 90, 127):
        made[f"{n} rows far outside"] = usual.copy()
        made[f"{n} rows far outside"][:, PAGE - n :] += 3000
    made["zeros"] = np.zeros_like(usual)
    made["all the same but one"] = np.full_like(usual, 3.0)
    made["all the same but one"][:, 9] = -4.0
    made["denormals"] = usual * 2e-7
    made["denormals"][:, 70] *= 1e3
    made["up to the ends of f16"] = usual * 0.1
    made["up to the ends of f16"][0, 30], made["up to the ends of f16"][1, 31, 3] = 65504, -65504
    made["signs of zero"] = np.where(usual > 0, 0.0, -0.0)
    return {name: page.astype(np.float16) for name, page in made.items()}


@pytest.mark.parametrize("name", pages())
@pytest.mark.parametrize("n_prefix", [0, 4, 127, 128])
def test_the_rows_that_count_are_those_of_the_spec_whoever_looks(name: str, n_prefix: int) -> None:
    page = pages()[name]
    by_loops = [plain.counted_rows(of_head, n_prefix) for of_head in page.astype(float).tolist()]
    counts = counted_rows(page, n_prefix)
    assert [(np.flatnonzero(of_head) + n_prefix).tolist() for of_head in counts] == by_loops
    mean = page_mean(page, n_prefix)
    assert mean.tolist() == [plain.page_mean(of_head, n_prefix) for of_head in page.astype(float).tolist()]
    for backend in (MlxBackend(), KernelBackend(EmulatedLauncher())):
        _, _, found = backend.encode_pages(
            resolve_codec("turbo4", DIM, "k"), mx.array(page), n_skipped=n_prefix, centred=True, scale=None
        )
        # a row more or less would move the mean by much more than the order of additions does
        np.testing.assert_allclose(np.asarray(found)[0], mean, rtol=2e-3, atol=2e-7)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_kernels_encode_pages_with_rows_far_outside_as_numpy_does(dim: int, dtype: type) -> None:
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((HEADS, 2 * PAGE, dim)) + 3 * (np.arange(dim) == 5)
    rows[0, [7, 130]] *= -1000
    rows[1, 255, 3] = 6e4
    given = mx.array(rows.astype(np.float16).astype(dtype))
    scale = mx.array(rng.uniform(0.5, 2, (HEADS, dim)).astype(np.float32))
    for cache_type in ("turbo4", "turbo3", "q8_0"):
        codec = resolve_codec(cache_type, dim, "k")
        found, expected = (
            [np.asarray(a) for a in by.encode_pages(codec, given, n_skipped=PREFIX, centred=True, scale=scale)]
            for by in (KernelBackend(EmulatedLauncher()), NumpyBackend())
        )
        assert found[2].tobytes() == expected[2].tobytes()
        assert np.mean(found[0] != expected[0]) < 1e-3
        assert np.abs(found[1].view(np.int16).astype(int) - expected[1].view(np.int16)).max() <= 1


def test_pages_without_rows_far_outside_have_the_mean_and_squares_of_all_rows() -> None:
    for seed in range(5):
        rows = np.random.default_rng(seed).standard_t(5, (HEADS, PAGE, DIM)).astype(np.float16)
        assert counted_rows(rows, PREFIX).all()
        total = np.zeros((HEADS, DIM), np.float32)
        for token in range(PREFIX, PAGE):
            total += rows[:, token].astype(np.float32)
        mean = (total * np.float32(1 / (PAGE - PREFIX))).astype(np.float16)
        assert page_mean(rows, PREFIX).tobytes() == mean.tobytes()
        centred = balance_rows(rows, mean, None)[:, PREFIX:].astype(np.float64)
        assert np.array_equal(centred_squares(rows, mean, PREFIX), (centred**2).sum(axis=1))


QUERIES = {
    "usual": lambda x: None,
    "one far outside": lambda x: x.__setitem__((slice(None), 40), 1e9),
    "one in one channel of one head": lambda x: x.__setitem__((1, 40, 3), 1e5),
    "infinite": lambda x: x.__setitem__((0, 40, 3), np.inf),
    "not a number": lambda x: x.__setitem__((0, 40, 3), np.nan),
    "hardly any": lambda x: x.__setitem__((slice(None), slice(0, 120)), 0.0),
    "none": lambda x: x.fill(0.0),
}


@pytest.mark.parametrize("name", QUERIES)
def test_the_queries_that_count_are_those_of_the_spec(name: str) -> None:
    squares = np.random.default_rng(2).chisquare(GROUP, (HEADS, PAGE, DIM))
    QUERIES[name](squares)
    numbers = np.where(np.isnan(squares), np.inf, squares)  # neither counts
    by_loops = [plain.counted_queries(of_head) for of_head in numbers.tolist()]
    assert [np.flatnonzero(of_head).tolist() for of_head in counted_queries(squares)] == by_loops
    expected = [squares[head, tokens].sum(axis=0) for head, tokens in enumerate(by_loops)]
    np.testing.assert_allclose(summed_queries(squares), expected, rtol=1e-12)
    if name == "usual":
        assert by_loops == [list(range(PAGE))] * HEADS


# Calibration


class Enlarging:
    """A projection that makes the token at position 70 `factor` times as large as it is."""

    def __init__(self, projection: Any, factor: float) -> None:
        self.projection, self.factor = projection, factor

    def __call__(self, x: mx.array) -> mx.array:
        out = self.projection(x)
        return mx.where((mx.arange(out.shape[1]) == 70)[:, None], out * self.factor, out)


def test_one_outlier_token_of_a_text_does_not_decide_a_calibration(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    window = np.random.default_rng(4).integers(0, 250, (1, 2 * PAGE))
    found = []
    for factor in (1.0, 1000.0):
        loaded = open_model(path).load()
        attention = loaded.model.layers[0].self_attn  # what later layers see of the text changes in earnest
        attention.q_proj, attention.k_proj = (Enlarging(p, factor) for p in (attention.q_proj, attention.k_proj))
        found.append(calibrate(loaded, window)[0])
    np.testing.assert_allclose(found[1], found[0], rtol=0.02)
