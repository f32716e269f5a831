"""Rows at and beyond the ends of float types: what is finite stays finite in every cache type, the rest is refused."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from c_paths import C_PATHS, c_backend
from covering import pairwise
from emulator.launcher import EmulatedLauncher

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, CACHE_TYPE_NAMES
from tqgguf.formats.blocks.codec import resolve_codec
from tqgguf.formats.errors import EncodeError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import MlxBackend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kernels.types import is_supported
from tqgguf.runtime.kv import block_ops

HEADS, DIM, N = 2, 64, 256
DTYPES = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}
LARGEST = {"f16": 65504.0, "bf16": 2.0**127 * (2 - 2.0**-7), "f32": float(np.finfo(np.float32).max)}
BACKENDS = {
    "numpy": NumpyBackend,
    "mlx": MlxBackend,
    "kernels": lambda: KernelBackend(EmulatedLauncher()),
    **{f"c-{path}": lambda path=path: c_backend(path) for path in C_PATHS},
}
FINITE = [
    *(6e4, 6.5e4, 65472.0, 65504.0, 65519.0, 65520.0, 65536.0, 7e4, 1e5, 1.2e5, -1.2e5, 1e30, 3.4028234e38),
    *(6e-5, 6e-8, 3e-8, 1e-40, -1e-45),
]
VALUES = [*FINITE, math.inf, -math.inf, math.nan]
PLACES = {
    "one value": (0, 50, 3),
    "one value of the exact prefix": (0, 2, 3),
    "a row": (0, 50),
    "a channel": (slice(None), slice(None), 3),
    "every value": slice(None),
}
MOST_ERROR = {"turbo2": 0.15, "turbo3": 0.05}
"""Relative squared error of rows that are usual; .03 for all other types."""


def rows_with(value: float, place: str, dtype: str) -> mx.array:
    rows = np.random.default_rng(0).standard_normal((1, HEADS, N, DIM)).astype(np.float32)
    rows[0][PLACES[place]] = value
    return mx.array(rows).astype(DTYPES[dtype])


def refuses(cache_type: str, backend: str) -> bool:
    """Whether rows are encoded by somebody who looks at them: everybody on a CPU, and numpy for a GPU."""
    if BLOCK_TYPES[cache_type].family == "float":
        return False
    in_operations = {"mlx": block_ops.can_encode, "kernels": is_supported}.get(backend)
    return in_operations is None or not all(in_operations(resolve_codec(cache_type, DIM, side)) for side in "kv")


def as_kept(rows: np.ndarray, cache_type: str, dtype: str) -> np.ndarray:
    """What a cache can know of float32 rows: clamped to the cache's floats, and then to those that it answers in."""
    with np.errstate(invalid="ignore"):
        for name in (cache_type if BLOCK_TYPES[cache_type].family == "float" else "f16", dtype):
            rows = np.where(np.isfinite(rows), np.clip(rows, -LARGEST[name], LARGEST[name]), rows)
    return rows


ON_HOSTS = [name for name in BACKENDS if name != "kernels"]
SOME_VALUES, SOME_PLACES = [65504.0, -1.2e5, 1e30, 6e-8, math.inf, math.nan], ["one value", "a row", "every value"]
CASES = [
    *pairwise(list(CACHE_TYPE_NAMES), ON_HOSTS, VALUES, list(PLACES), list(DTYPES)),
    # few types, since each is a kernel that the emulator compiles
    *pairwise(["turbo4", "q5_1"], ["kernels"], SOME_VALUES, SOME_PLACES, ["f32"]),
    *pairwise(["q8_0"], ["kernels"], SOME_VALUES, SOME_PLACES, ["f16"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_is_finite_stays_finite_and_what_is_not_is_refused_or_stays(case: tuple) -> None:
    cache_type, backend, value, place, dtype = case
    given = rows_with(value, place, dtype)
    rows = np.array(given.astype(mx.float32))[0]
    cache = BlockKVCache(cache_type, cache_type, backend=BACKENDS[backend]())
    if not np.isfinite(rows).all() and refuses(cache_type, backend):
        with pytest.raises(
            EncodeError, match=r"layer 0, K: only finite float32 values can be encoded: found -?(inf|nan)"
        ):
            cache.update_and_fetch(given, given)
        assert cache.empty()
        return
    cache.update_and_fetch(given, given)
    one = mx.ones((1, HEADS, 1, DIM), dtype=DTYPES[dtype])
    keys, values = cache.update_and_fetch(one, one)
    if backend != "kernels" and np.isfinite(rows).all() and abs(value) < 1e6:  # products of larger floats overflow
        out = hook.scaled_dot_product_attention(one, keys, values, cache=cache, scale=0.125, mask=None)
        assert np.isfinite(np.array(out.astype(mx.float32))).all()
    expected = as_kept(rows, cache_type, dtype)
    for held in (keys, values):
        found = np.array(held.astype(mx.float32))[0, :, :N]
        if BLOCK_TYPES[cache_type].family == "float":
            assert np.array_equal(np.isfinite(found), np.isfinite(rows))
            if np.isfinite(rows).all():
                np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-7)
        else:
            assert np.isfinite(found[:, cache.settings.types.n_prefix :]).all()
    if np.isfinite(rows).all():
        usual = np.ones((HEADS, N), bool)
        usual[PLACES[place][:2] if isinstance(PLACES[place], tuple) else slice(None)] = False
        found = np.array(keys.astype(mx.float32))[0, :, :N]
        if usual.any():
            error = ((found - expected)[usual] ** 2).sum() / (expected[usual] ** 2).sum()
            assert error < MOST_ERROR.get(cache_type, 0.03)
        cache.trim(N + 1 - 100)
        kept = np.array(cache.update_and_fetch(one, one)[0].astype(mx.float32))
        assert np.isfinite(kept).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_over_the_largest_values_are_finite(backend: str) -> None:
    keys, values = rows_with(1.0, "a row", "f16"), rows_with(65504.0, "every value", "f16")
    cache = BlockKVCache("q8_0", "q8_0", backend=BACKENDS[backend]())
    cache.update_and_fetch(keys, values)
    one = mx.ones((1, HEADS, 1, DIM), dtype=mx.float16)
    fetched = cache.update_and_fetch(one, 65504 * one)
    out = hook.scaled_dot_product_attention(one, *fetched, cache=cache, scale=0.125, mask=None)
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), 65504, rtol=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_that_is_refused_leaves_the_cache_as_it_was(backend: str) -> None:
    cache = BlockKVCache("q8_0", "q5_1", backend=BACKENDS[backend]())
    good, bad = rows_with(1.0, "a row", "f32"), rows_with(math.inf, "one value", "f32")
    cache.update_and_fetch(good[:, :, :100], good[:, :, :100])
    with pytest.raises(EncodeError, match="layer 0, V: only finite"):
        cache.update_and_fetch(good[:, :, 100:128], bad[:, :, 40:68])
    assert cache.offset == 100
    cache.update_and_fetch(good[:, :, 100:], good[:, :, 100:])
    assert cache.offset == N


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_joined_to_the_tail_by_one_rule(backend: str, dtype: str) -> None:
    values = [*VALUES, *(-x for x in VALUES)]
    rows = np.resize(np.array(values, np.float32), (1, 2, 3, DIM))
    new = mx.array(rows).astype(DTYPES[dtype])
    given = np.array(new.astype(mx.float32))[0]
    with np.errstate(over="ignore"):
        expected = np.where(np.isfinite(given), np.clip(given, -65504, 65504), given).astype(np.float16)
    by = BACKENDS[backend]()
    tail = mx.ones((2, 5, DIM), dtype=mx.float16)
    for held in (None, tail):
        for found in by.join_rows((held, held), (new, new)):
            assert np.array_equal(np.array(found)[:, -3:], expected, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CACHE_TYPE_NAMES if BLOCK_TYPES[name].family != "float"])
@pytest.mark.parametrize("size", [6e4, 7e4, 1e6, 1e18, 1e30, 1e36, 1e-30, 1e-40])
def test_no_codec_makes_a_block_that_decodes_to_what_is_not_finite(name: str, size: float) -> None:
    rng = np.random.default_rng(1)
    rows = [np.full(DIM, size), rng.standard_normal(DIM) * size, size * (np.arange(DIM) == 3), -size * rng.random(DIM)]
    for side in ("k", "v"):
        codec = resolve_codec(name, DIM, side)
        assert np.isfinite(codec.decode(codec.encode(np.array(rows, np.float32)))).all()
