"""What a batch of block caches cannot do is refused, and nothing changes; interrupts change nothing either."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_batch_cache import HEAD_DIM, N_HEADS, N_KV_HEADS, Alone, Together, empty, kernels, same_state

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.attention.steps import SequenceStep
from tqgguf.runtime.cache import batch_cache
from tqgguf.runtime.cache.batch_cache import BatchBlockKVCache
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.planes import Plane


def test_who_is_kept_in_a_pool_can_be_counted_from_the_end() -> None:
    alone_, together = (make(2, backend=kernels()) for make in (Alone, Together))
    together.step([130, 254])
    together.step([1, 1])
    together.cache.filter([-1])
    together.who = [1]
    for n in (254, 1):
        alone_.step(1, n)
    for _ in range(2):  # the second page fills, where the other sequence's was
        together.step([1])
        alone_.step(1, 1)
    assert together.cache._pool is not None and same_state(together.cache.extract(0), alone_.caches[1])


def test_a_filter_takes_arrays_and_refuses_whom_it_cannot_keep() -> None:
    cache = BlockKVCache.merge([empty() for _ in range(3)])
    cache.prepare(left_padding=[5, 6, 7])
    for indices in (
        [],
        mx.array([]),
        [0, 0],
        [2, -1],
        [1, 7],
        [-4],
        [True, False, True],
        [1.0],
        mx.array([0, 3]),
        np.array([0.5]),
    ):
        with pytest.raises(RequestError, match="expected at least one, and different indices of 3 sequences, found"):
            cache.filter(indices)
        assert cache.offset.tolist() == [-5, -6, -7]
    cache.filter(mx.array([-1, 0, 1]))
    cache.filter(np.array([2, -3]))
    assert cache.offset.tolist() == [-6, -7]


@pytest.mark.parametrize("other", [{"window": 60}, {"balance": "off"}, {"layer": 1}])
def test_a_batch_is_not_extended_by_what_it_could_not_have_been_merged_of(other: dict[str, Any]) -> None:
    cache = BlockKVCache.merge([empty()])
    with pytest.raises(RequestError, match="found 2 different settings"):
        cache.extend(BlockKVCache.merge([empty(**other)]))
    assert cache.offset.tolist() == [0]


def grown(n: int, heads: int, dim: int = 64, **settings: Any) -> BlockKVCache:
    cache = empty(**settings)
    cache.update_and_fetch(*(mx.random.normal((1, heads, n, dim)) for _ in "kv"))
    return cache


def test_sequences_of_other_heads_or_head_sizes_are_in_no_batch_together() -> None:
    scaled = {"channel_scale": mx.ones((4, 64))}
    for other in (grown(5, 4), grown(5, 2, 128), grown(200, 1), empty(**scaled)):
        for held in (grown(3, 2), grown(130, 2)):
            with pytest.raises(RequestError, match="as many KV heads and of one head size, found"):
                BlockKVCache.merge([held, other])
            batch = BlockKVCache.merge([held])
            with pytest.raises(RequestError, match="as many KV heads and of one head size, found"):
                batch.extend(BlockKVCache.merge([other]))
            assert batch.offset.tolist() == [held.offset]
            batch.extend(BlockKVCache.merge([empty()]))
            batch.update_and_fetch(*(mx.zeros((2, 2, 1, 64)) for _ in "kv"))
    with pytest.raises(RequestError, match="expected a batch of block caches, found BlockKVCache"):
        batch.extend(empty())  # type: ignore[arg-type]


def test_other_heads_do_not_join_a_pool() -> None:
    together = Together(2, backend=kernels())
    together.step([3, 5])
    together.step([1, 1])
    assert together.cache._pool is not None
    with pytest.raises(RequestError, match="as many KV heads"):
        together.cache.extend(BlockKVCache.merge([grown(5, 4, backend=kernels())]))
    assert together.cache._pool is not None
    together.step([1, 1])


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_batch_lives_apart(copied: Callable[[Any], Any], by_kernels: bool) -> None:
    backend = kernels() if by_kernels else NumpyBackend()
    together, alone_ = (make(2, backend=backend) for make in (Together, Alone))
    together.step([127, 5])
    together.step([1, 1])
    twin = copied(together.cache)
    twin.extend(BlockKVCache.merge([empty(backend=backend)]))
    twin.update_and_fetch(*(mx.ones((3, N_KV_HEADS, 1, HEAD_DIM)) for _ in "kv"))
    twin.filter([2])
    twin.trim(1)
    assert together.cache.offset.tolist() == [128, 6]
    together.step([1, 1])
    for i, steps in ((0, (127, 1, 1)), (1, (5, 1, 1))):
        for n in steps:
            alone_.step(i, n)
    assert all(same_state(together.cache.extract(i), alone_.caches[i]) for i in range(2))


@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_while_a_pool_takes_a_step_loses_and_doubles_nothing(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sequences fill a page in the step; the interrupt comes at one of the places where its blocks are written."""
    together = Together(2, backend=kernels())
    together.step([126, 254])
    together.step([1, 1])
    whole, seen = Plane.put, []

    def interrupted(plane: Plane, *of: Any) -> None:
        if len(seen) == 2 * at:
            seen.append(plane)
            raise KeyboardInterrupt
        seen.append(plane)
        whole(plane, *of)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Plane, "put", interrupted)
        together.step([1, 1])
        together.cache.extract(0)
        raise AssertionError("nothing was interrupted")
    assert together.cache.offset.tolist() == [128, 256]
    together.step([1, 1])
    assert all(same_state(together.cache.extract(i), lonely) for i, lonely in enumerate(uninterrupted()))


@lru_cache
def uninterrupted() -> list[BlockKVCache]:
    """The same steps of both sequences alone."""
    alone_ = Alone(2, backend=kernels())
    for i, n in ((0, 126), (1, 254)):
        for step in (n, 1, 1, 1):
            alone_.step(i, step)
    return [alone_.caches[i] for i in range(2)]


def test_an_interrupt_before_a_pool_has_a_step_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone_ = (make(2, backend=kernels()) for make in (Together, Alone))
    together.step([126, 5])
    together.step([1, 1])

    def interrupted(*of: Any) -> None:
        raise KeyboardInterrupt

    for module, name in ((batch_cache, "pooled_values"), (BatchBlockKVCache, "_taken")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, interrupted)
            together.step([1, 1])
        assert together.cache.offset.tolist() == [127, 6]
    together.step([1, 1])
    for i, n in ((0, 126), (1, 5)):
        for step in (n, 1, 1):
            alone_.step(i, step)
    assert all(same_state(together.cache.extract(i), alone_.caches[i]) for i in range(2))


@pytest.mark.parametrize("by_kernels", [False, True])
def test_values_of_other_sequences_heads_or_columns_than_keys_are_refused(by_kernels: bool) -> None:
    together = Together(2, backend=kernels() if by_kernels else NumpyBackend())
    together.step([3, 3])
    together.step([1, 1])
    keys = mx.zeros((2, N_KV_HEADS, 1, HEAD_DIM))
    for shape in ((2, 2, 2, 64), (3, 2, 1, 64), (1, 2, 1, 64), (2, 1, 1, 64), (2, 2, 64)):
        with pytest.raises(RequestError, match=r"K and V of 2 sequences .* as many heads and columns, found"):
            together.cache.update_and_fetch(keys, mx.zeros(shape))
    assert together.cache.offset.tolist() == [4, 4]


@pytest.mark.parametrize("name", ["left_padding", "lengths", "right_padding"])
@pytest.mark.parametrize("numbers", [[5, -1], [-3, 0], [1], [1, 2, 3], [0.5, 1]])
def test_padding_that_cannot_be_is_refused_before_a_step(name: str, numbers: list[Any]) -> None:
    cache = BlockKVCache.merge([empty(), empty()])
    with pytest.raises(ValueError, match=f"{name}: expected 2 numbers >= 0, one for each sequence, found"):
        cache.prepare(**{"left_padding": [1, 1], "lengths": [2, 1], "right_padding": [0, 1], name: numbers})
    assert cache.offset.tolist() == [0, 0]
    cache.update_and_fetch(*(mx.zeros((2, N_KV_HEADS, 4, HEAD_DIM)) for _ in range(2)))
    assert cache.offset.tolist() == [4, 4]  # nothing of it was padding


def test_no_sequence_is_trimmed_where_one_cannot_be() -> None:
    together = Together(2, window=60)
    together.step([100, 400])
    with pytest.raises(ValueError, match="cannot go back to 150"):
        together.cache.trim(250)
    assert together.cache.offset.tolist() == [100, 400]


def test_an_interrupted_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Together(2, usage=Usage(strict=True))
    together.step([3, 130])
    whole, seen = BlockKVCache.update, []

    def interrupted(cache: BlockKVCache, *rows: mx.array) -> SequenceStep:
        seen.append(cache)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return whole(cache, *rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockKVCache, "update", interrupted)
        together.step([20, 20])
    assert together.cache.offset.tolist() == [3, 130]
    together.step([20, 20])
    assert together.cache.offset.tolist() == [23, 150]


@pytest.mark.parametrize(
    "ask", [lambda cache: cache.state, lambda cache: cache.extract(1), lambda cache: cache.filter([1, 0])]
)
def test_strict_refuses_a_pools_next_step_whatever_was_asked_since_the_last(
    ask: Callable[[BatchBlockKVCache], Any],
) -> None:
    together = Together(2, backend=kernels(), usage=Usage(strict=True))
    together.step([3, 5])
    one = [mx.zeros((2, N_KV_HEADS, 1, HEAD_DIM)) for _ in range(2)]
    together.cache.update_and_fetch(*one)
    assert together.cache._pool is not None
    ask(together.cache)
    with pytest.raises(RequestError, match="by fallback"):
        together.cache.update_and_fetch(*one)
    assert sorted(together.cache.offset.tolist()) == [4, 6]


def test_a_pools_step_that_is_attended_from_late_was_no_fallback_to_strict() -> None:
    together = Together(2, backend=kernels(), usage=Usage(strict=True))
    together.step([3, 5])
    rows = [mx.zeros((2, heads, 1, HEAD_DIM)) for heads in (N_KV_HEADS, N_KV_HEADS, N_HEADS)]
    keys, values = together.cache.update_and_fetch(*rows[:2])
    assert len(together.cache.state) == 2
    hook.scaled_dot_product_attention(rows[2], keys, values, scale=0.1)
    together.step([20, 20])
    assert together.cache.offset.tolist() == [24, 26]
