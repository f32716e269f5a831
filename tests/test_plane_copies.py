"""Decoding over a page's edge copies no plane: MLX writes the page into it, since nobody else holds the plane then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.launcher import EmulatedLauncher

from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend, MlxBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.cache.compiled_steps import CompiledSteps
from tqgguf.runtime.cache.kv_cache import BlockKVCache

HEAD_DIM, N_HEADS = 64, 2
PAGES = 64  # held at first: so many that planes grow by two pages at a time
BACKENDS: dict[str, Callable[[], Backend]] = {
    "MLX": MlxBackend,
    "kernels": lambda: KernelBackend(EmulatedLauncher()),
}


def evaluate(tokens: mx.array, caches: list[Any]) -> mx.array:
    """A model of one layer with one KV head: attention of what a token's number makes."""
    channels = mx.arange(N_HEADS * HEAD_DIM).reshape(N_HEADS, 1, HEAD_DIM) + 1
    q = mx.cos(tokens[0][None, :, None] * channels)[None].astype(mx.float16)
    keys, values = caches[0].update_and_fetch(q[:, :1], q[:, 1:])
    mask = "causal" if q.shape[2] > 1 else None
    return hook.scaled_dot_product_attention(q, keys, values, cache=caches[0], scale=0.1, mask=mask)


def planes(cache: BlockKVCache) -> list[tuple[tuple[int, ...], int]]:
    """Shape and address of each plane of K and V."""
    assert cache.sides is not None
    arrays = [plane.array for side in cache.sides for plane in side.planes]
    mx.eval(arrays)
    return [(array.shape, np.asarray(array).ctypes.data) for array in arrays]


def copies_while(cache: BlockKVCache, steps: list[Callable[[], mx.array]]) -> tuple[int, int]:
    """How often a plane was elsewhere after a step, and how often because it had to grow."""
    copied = grown = 0
    for step in steps:
        before = planes(cache)
        mx.eval(step())
        after = planes(cache)
        moved = [a[0] == b[0] for a, b in zip(before, after, strict=True) if a != b]
        copied, grown = copied + sum(moved), grown + len(moved) - sum(moved)
    return copied, grown


def add(cache: BlockKVCache, n: int) -> None:
    """Tokens from which nobody attends."""
    rows = (mx.random.normal((1, 1, n, HEAD_DIM)).astype(mx.float16) for _ in "kv")
    cache.update(*rows)
    mx.eval(cache.state)
    cache.usage.unattended.clear()


def with_a_spare_page(backend: Backend) -> BlockKVCache:
    """A cache whose planes have room for one more page, two tokens before it fills."""
    cache = BlockKVCache("turbo4", "turbo3", backend=backend)
    add(cache, PAGES * 128)
    add(cache, 128)
    add(cache, 126)
    return cache


@pytest.mark.parametrize("by", ["MLX", pytest.param("kernels", marks=pytest.mark.slow)])
def test_pages_are_written_into_their_planes(by: str) -> None:
    cache = with_a_spare_page(BACKENDS[by]())
    # five planes: codes and scales, and K's means; the second step goes over the page's edge
    steps = [lambda n=n: evaluate(mx.arange(n)[None], [cache]) for n in (1, 3)]
    assert copies_while(cache, steps) == (0, 0)
    add(cache, 126 - cache.offset % 128)
    assert copies_while(cache, steps) == (0, 5)


def test_compiled_steps_hold_no_plane_when_a_page_fills() -> None:
    cache = with_a_spare_page(MlxBackend())
    compiled, n_compiled = CompiledSteps(evaluate), 0

    def step() -> mx.array:
        nonlocal n_compiled
        token = mx.array([[7]])
        out = compiled.step(token, [cache])
        n_compiled += out is not None
        return evaluate(token, [cache]) if out is None else out

    def ahead() -> mx.array:
        """Ten steps, each begun before the one before it has ended, as answers are generated."""
        last = step()
        for _ in range(9):
            following = step()
            mx.async_eval(following)
            mx.eval(last)
            last = following
        return last

    # to the page's end, where the cache takes its tails back, and into the next page
    assert copies_while(cache, [ahead]) == (0, 0)
    assert n_compiled == 9
