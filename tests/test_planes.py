"""Planes grow at their end, written by MLX or by numpy, and copies of them do not see one another's rows."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tqgguf.runtime.attention.backend import MlxBackend, NumpyBackend
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.planes import GROWTH, Plane


def by_mlx(plane: Plane, rows: NDArray[np.float16]) -> None:
    plane.append(mx.array(rows))


def by_numpy(plane: Plane, rows: NDArray[np.float16]) -> None:
    plane.append_host(rows)


Append = Callable[[Plane, NDArray[np.float16]], None]
WAYS = [by_mlx, by_numpy]


def rows_of(start: int, n: int) -> NDArray[np.float16]:
    return np.arange(start, start + n, dtype=np.float16)[:, None].repeat(3, axis=1)


def held(plane: Plane) -> list[float]:
    rows = plane.read()
    assert rows is not None
    return np.asarray(rows)[:, 1].tolist()


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_what_is_appended_to_a_copy_shows_in_no_other(first: Append, second: Append) -> None:
    plane = Plane(step=32)
    first(plane, rows_of(0, 5))
    copies = [plane.copy() for _ in range(3)]
    for i, copy in enumerate(copies):
        second(copy, rows_of(100 * (i + 1), 2 + i))
    first(plane, rows_of(50, 1))
    assert held(plane) == [0, 1, 2, 3, 4, 50]
    assert [held(copy)[5:] for copy in copies] == [[100, 101], [200, 201, 202], [300, 301, 302, 303]]
    assert all(held(copy)[:5] == [0, 1, 2, 3, 4] for copy in copies)


@pytest.mark.parametrize("append", WAYS)
def test_rows_after_a_cut_replace_those_that_were_cut_in_this_plane_only(append: Append) -> None:
    plane = Plane(step=32)
    append(plane, rows_of(0, 5))
    before = plane.copy()
    plane.truncate(3)
    append(plane, rows_of(9, 1))
    assert held(plane) == [0, 1, 2, 9]
    assert held(before) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("append", WAYS)
def test_what_was_read_stays_as_it_was(append: Append) -> None:
    plane = Plane(step=32)
    append(plane, rows_of(0, 3))
    lazy = plane.read()
    append(plane, rows_of(7, 2))
    assert np.asarray(lazy)[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("append", WAYS)
def test_spare_rows_are_a_share_of_what_is_held(append: Append) -> None:
    plane = Plane(step=32)
    for i in range(0, 4000, 100):
        append(plane, rows_of(i % 1000, 100))
    assert plane.array is not None
    assert 4000 <= plane.array.shape[0] <= 4000 + 4000 // GROWTH + 32


@pytest.mark.parametrize("append", WAYS)
def test_a_plane_goes_on_after_its_front_was_freed(append: Append) -> None:
    plane = Plane(step=32)
    append(plane, rows_of(0, 40))
    plane.drop_front(30)
    append(plane, rows_of(40, 2))
    assert held(plane) == list(range(30, 42))


@pytest.mark.parametrize("cache_type", ["f16", "f32", "bf16"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_numpy_keeps_the_rows_that_mlx_keeps(cache_type: str, dtype: mx.Dtype) -> None:
    random = np.random.default_rng(1)
    backends = NumpyBackend(), MlxBackend()
    caches = [BlockKVCache(cache_type, cache_type, window=200, backend=backend) for backend in backends]
    for n in (130, 1, 1, 200, 3):
        rows = [mx.array(random.standard_normal((1, 2, n, 32)) * 1e5).astype(dtype) for _ in "kv"]
        views = [cache.update(*rows) for cache in caches]
        for side in ("k", "v"):
            ours, theirs = (getattr(view, side).rows.astype(mx.float32) for view in views)
            assert np.array_equal(np.asarray(ours), np.asarray(theirs))
