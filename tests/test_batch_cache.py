"""Block caches of several sequences in mlx-lm's batch generation: each goes on as it would alone."""

from __future__ import annotations

import copy
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from c_paths import C_PATHS, c_backend
from emulator.launcher import EmulatedLauncher
from mlx_lm.generate import BatchGenerator, generate_step
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.errors import EncodeError, RequestError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.models.load import open_model

MODELS = {"llama": TinyModel("llama"), "gemma3": TinyModel("gemma3", n_layers=3, window=64, window_pattern=2)}
LENGTHS = (3, 130, 300, 124)
N_TOKENS = 8  # the last prompt's go on into its second page
IDS = np.random.default_rng(31).integers(0, 280, (4, 400))
PROMPTS = [row[:n].tolist() for row, n in zip(IDS, LENGTHS, strict=True)]


@cache
def tiny(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return open_model(write_tiny(Path(folder) / "m.gguf", MODELS[name])).load(form="dense").model


@lru_cache
def kernels() -> KernelBackend:
    return KernelBackend(EmulatedLauncher())


def caches_for(model: Any, n: int, backend: Backend | None, **options: Any) -> list[list[Any]]:
    return [make_prompt_cache(model, "turbo4", "turbo3", backend=backend, **options) for _ in range(n)]


def in_a_batch(model: Any, caches: list[list[Any]], n_tokens: list[int], **how: Any) -> tuple[list[Any], list[Any]]:
    """Tokens and final caches of the prompts by mlx-lm's batch generation, in which some wait for others' places."""
    generator = BatchGenerator(model, **how)
    uids = generator.insert(PROMPTS, n_tokens, caches=caches)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    final = {}
    while found := generator.next_generated():
        for response in found:
            tokens[response.uid].append(response.token)
            if response.finish_reason:
                final[response.uid] = response.prompt_cache
    return [tokens[uid] for uid in uids], [final[uid] for uid in uids]


def alone(model: Any, caches: list[Any], prompt: list[int], n: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=caches)]


@pytest.mark.parametrize(
    ("name", "how", "by_kernels"),
    [
        ("llama", {}, False),
        ("gemma3", {"prefill_step_size": 100, "prefill_batch_size": 2}, False),
        pytest.param("llama", {}, True, marks=pytest.mark.slow),
    ],
)
def test_mlx_lms_batches_answer_as_each_prompt_alone(name: str, how: dict[str, Any], by_kernels: bool) -> None:
    model, backend = tiny(name), kernels() if by_kernels else None
    n_tokens = [N_TOKENS, 3, N_TOKENS, N_TOKENS]
    tokens, final = in_a_batch(model, caches_for(model, 4, backend, strict=True), n_tokens, **how)
    for prompt, n, found, caches in zip(PROMPTS, n_tokens, tokens, final, strict=True):
        lonely = caches_for(model, 1, backend)[0]
        assert found == alone(model, lonely, prompt, n)
        assert [cache.offset for cache in caches] == [len(prompt) + n] * len(caches)
        assert all(isinstance(cache, BlockKVCache) for cache in caches)


HEAD_DIM, N_HEADS, N_KV_HEADS = 64, 4, 2
ROPE = RopeLayout(HEAD_DIM, True)
Rows = tuple[mx.array, mx.array, mx.array]


def rows_of(sequence: int, n: int) -> Rows:
    """What a model would make of a sequence's first n tokens: k, v, q [1, heads, n, head_dim]."""
    rng = np.random.default_rng(sequence)
    heads = (N_KV_HEADS, N_KV_HEADS, N_HEADS)
    k, v, q = (mx.array(rng.standard_normal((1, 600, h, HEAD_DIM)).astype(np.float16)).swapaxes(1, 2) for h in heads)
    return k[:, :, :n], v[:, :, :n], q[:, :, :n]


def empty(window: int | None = None, backend: Backend | None = None, **options: Any) -> BlockKVCache:
    types = {"type_k": "turbo4", "type_v": "turbo3", "rope": ROPE, **options}
    return BlockKVCache(window=window, backend=backend or NumpyBackend(), **types)


def attended(cache: Any, rows: Rows, by_fallback: bool = False) -> np.ndarray:
    k, v, q = rows
    mask = cache.make_mask(k.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    attend = mx.fast.scaled_dot_product_attention if by_fallback else hook.scaled_dot_product_attention
    return np.array(attend(q, keys, values, scale=0.125, mask=mask))


class Alone:
    """Sequences that have run alone, in the same steps."""

    def __init__(self, n: int, **options: Any) -> None:
        self.caches = {i: empty(**options) for i in range(n)}

    def step(self, i: int, n: int, by_fallback: bool = False) -> np.ndarray:
        start = self.caches[i].offset
        return attended(self.caches[i], tuple(x[:, :, start:] for x in rows_of(i, start + n)), by_fallback)


class Together:
    """The same sequences in one batch cache; `who` says which, in order."""

    def __init__(self, n: int, **options: Any) -> None:
        self.who = list(range(n))
        self.cache = BlockKVCache.merge([empty(**options) for _ in range(n)])

    def step(self, lengths: list[int], by_fallback: bool = False) -> list[np.ndarray]:
        """Of as many columns as the longest has; the others' are padded on the right."""
        n, offsets = max(lengths), self.cache.offset.tolist()
        parts = []
        for i, start, length in zip(self.who, offsets, lengths, strict=True):
            rows = (x[:, :, start:] for x in rows_of(i, start + length))
            parts.append([mx.pad(x, [(0, 0), (0, 0), (0, n - length), (0, 0)], constant_values=9.0) for x in rows])
        if min(lengths) < n:
            self.cache.prepare(lengths=lengths, right_padding=[n - length for length in lengths])
        out = attended(self.cache, tuple(map(mx.concatenate, zip(*parts, strict=True))), by_fallback)
        self.cache.finalize()
        return [out[j : j + 1, :, :length] for j, length in enumerate(lengths)]


def same_state(a: BlockKVCache, b: BlockKVCache) -> bool:
    """Whether two caches hold the same bytes; nothing may be an empty array."""
    flat: tuple[list[Any], list[Any]] = [], []
    for held, into in zip((a, b), flat, strict=True):
        for item in held.state:
            arrays = item if isinstance(item, list) else [item]
            into += [np.array([] if x is None or (isinstance(x, mx.array) and not x.size) else x) for x in arrays]
    return len(flat[0]) == len(flat[1]) and all(map(np.array_equal, *flat))


STEPS = ([3, 130, 124], [1, 1, 1], [2, 3, 0], [1, 1, 3], [1, 1, 1], [2, 200, 4], [1, 1, 1])


@pytest.mark.parametrize(("by_fallback", "by_kernels"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("window", [None, 60])
def test_every_step_answers_and_stores_as_alone(window: int | None, by_fallback: bool, by_kernels: bool) -> None:
    backend = kernels() if by_kernels else NumpyBackend()
    alone_, together = Alone(3, window=window, backend=backend), Together(3, window=window, backend=backend)
    for lengths in STEPS:
        kernels().launcher.launched.clear()
        found = together.step(lengths, by_fallback)
        if by_kernels and max(lengths) <= 3:  # all at once
            assert [kernels().launcher.launched[name] for name in ("join_rows", "decode_attention")] == [1, 1]
        for i, n in enumerate(lengths):
            if n:
                expected = alone_.step(i, n, by_fallback)
                limit = 2e-3 * by_fallback + 1e-3 * by_kernels
                assert np.allclose(found[i], expected, atol=limit, rtol=0), (lengths, i)
    for i, lonely in alone_.caches.items():
        assert same_state(together.cache.extract(i), lonely)
    assert together.cache.size() == 337 and together.cache.offset.tolist() == [11, 337, 134]


def test_who_attends_otherwise_reads_the_pools_rows() -> None:
    window = 60
    usages = [Usage() for _ in range(3)]
    alone_, together = Alone(3, window=window, backend=kernels()), Together(3)
    together.cache = BlockKVCache.merge([empty(window, kernels(), usage=usage) for usage in usages])
    for lengths, by_fallback in zip(STEPS[:4], (False, False, True, False), strict=True):
        found = together.step(lengths, by_fallback)
        for i, n in enumerate(lengths):
            if n:
                assert np.allclose(found[i], alone_.step(i, n, by_fallback), atol=2e-3, rtol=0)
    for i, usage in enumerate(usages):
        together.cache.extract(i)
        expected = alone_.caches[i].usage
        assert (usage.reads, usage.by_fallback) == (expected.reads, expected.by_fallback)


def test_a_pools_step_can_be_attended_from_twice_and_no_page_is_held_twice() -> None:
    # models share a layer's keys and values with later layers
    together = Together(2, backend=kernels())
    together.step([127, 130])
    k, v, q = (mx.concatenate([rows_of(i, n + 1)[x][:, :, n:] for i, n in enumerate((127, 130))]) for x in range(3))
    keys, values = together.cache.update_and_fetch(k, v)
    first, second = (np.array(hook.scaled_dot_product_attention(q, keys, values, scale=0.1)) for _ in range(2))
    assert np.array_equal(first, second) and together.cache.offset.tolist() == [128, 131]
    pool = together.cache._pool
    assert pool is not None and all(side.nbytes == 0 for side in pool.kinds)


def test_a_page_that_fills_takes_a_place_that_became_free_and_copies_nothing() -> None:
    together = Together(3, backend=kernels())
    together.step([127, 126, 128])
    together.step([1, 1, 1])
    together.cache.filter([0, 1])
    together.who = [0, 1]

    def planes() -> list[tuple[tuple[int, ...], int]]:
        assert together.cache._pool is not None
        arrays = [plane.array for of in together.cache._pool._planes for plane in of]
        return [(array.shape, np.asarray(array).ctypes.data) for array in arrays]

    before = planes()
    together.step([1, 1])
    together.step([1, 1])  # the step that filled it holds planes until then
    assert planes() == before and before[0][0][0] == 2
    assert together.cache.offset.tolist() == [130, 129]


@pytest.mark.parametrize("by_kernels", [False, True])
def test_sequences_come_and_go(by_kernels: bool) -> None:
    backend = kernels() if by_kernels else NumpyBackend()
    alone_, together, later = (make(n, backend=backend) for make, n in ((Alone, 4), (Together, 3), (Together, 1)))
    together.step([139, 20, 260])
    together.step([1, 1, 0])
    later.who = [3]
    later.step([130])
    together.cache.filter([2, 0])
    together.who = [2, 0]
    together.step([1, 1])
    together.cache.extend(later.cache)
    together.who = [2, 0, 3]
    split = copy.deepcopy(together.cache)
    together.step([1, 1, 1])
    for i, steps in ((2, (260, 1)), (0, (139, 1, 1)), (3, (130,))):
        for n in steps:
            alone_.step(i, n)
    assert all(same_state(split.extract(j), alone_.caches[i]) for j, i in enumerate(together.who))
    for j, i in enumerate(together.who):
        alone_.step(i, 1)
        assert same_state(together.cache.extract(j), alone_.caches[i])
    merged = BlockKVCache.merge([together.cache.extract(0), empty()])
    assert merged.offset.tolist() == [262, 0] and same_state(merged.extract(0), alone_.caches[2])
    assert not merged.empty() and BlockKVCache.merge([empty(), empty()]).empty()
    assert together.cache.trim(1) == 1
    assert together.cache.offset.tolist() == split.offset.tolist()
    assert together.cache.nbytes == sum(cache.nbytes for cache in map(together.cache.extract, range(3)))


def test_columns_of_left_padding_are_not_stored() -> None:
    alone_, cache = Alone(2), BlockKVCache.merge([empty(), empty()])
    cache.prepare(left_padding=[5, 0])
    assert cache.offset.tolist() == [-5, 0]
    padded = (mx.pad(x, [(0, 0), (0, 0), (5, 0), (0, 0)], constant_values=9.0) for x in rows_of(0, 125))
    rows = tuple(mx.concatenate(pair) for pair in zip(padded, rows_of(1, 130), strict=True))
    found = attended(cache, rows)
    assert np.array_equal(found[:1, :, 5:], alone_.step(0, 125)) and np.array_equal(found[1:], alone_.step(1, 130))
    assert all(same_state(cache.extract(i), alone_.caches[i]) for i in range(2))
    with pytest.raises(ValueError, match="empty batch"):
        cache.prepare(left_padding=[1, 0])


def test_reads_and_fallbacks_count_where_the_sequences_came_from() -> None:
    usages = [Usage(), Usage()]
    alone_ = Alone(2)
    cache = BlockKVCache.merge([empty(usage=usage) for usage in usages])
    k, v, q = (mx.concatenate(pair) for pair in zip(rows_of(0, 130), rows_of(1, 130), strict=True))
    attended(cache, (k, v, q))
    cache.update_and_fetch(*(rows[:, :, :1] for rows in (k, v)))  # nobody attends
    alone_.step(0, 130)
    for i, usage in enumerate(usages):
        cache.extract(i)
        assert usage.reads == alone_.caches[0].usage.reads and usage.by_fallback == 131


def test_what_cannot_be_in_one_batch_is_refused_and_nothing_changes() -> None:
    with pytest.raises(RequestError, match="same types"):
        BlockKVCache.merge([empty(), empty(type_k="q8_0")])
    cache = BlockKVCache.merge([empty(), empty()])
    k, v, _ = (mx.concatenate([x, x]) for x in rows_of(0, 130))
    with pytest.raises(RequestError, match="2 sequences"):
        cache.update_and_fetch(k[:1], v[:1])
    k[1, 0, 7, 3] = float("nan")
    with pytest.raises(EncodeError, match="layer 0, K"):
        cache.update_and_fetch(k, v)
    assert cache.empty() and cache.offset.tolist() == [0, 0]
    with pytest.raises(ValueError, match="lengths"):
        cache.prepare(right_padding=[1, 0])


@pytest.mark.skipif(not C_PATHS, reason="only the C library has pools on a CPU")
@pytest.mark.parametrize("window", [None, 150])
def test_a_pool_keeps_what_its_sequences_see_while_pages_fill_and_windows_pass(window: int | None) -> None:
    # first pages, and an exact prefix, fill in the pool, and pages take the places of those that a window has passed
    rng, backend, width = np.random.default_rng(41), c_backend(C_PATHS[-1]), 64

    def rows(n_sequences: int, n_heads: int, n_rows: int) -> mx.array:
        return mx.array(rng.standard_normal((n_sequences, n_heads, n_rows, width)).astype(np.float32))

    def answer(held: Any, q: mx.array, k: mx.array, v: mx.array) -> np.ndarray:
        mask = held.make_mask(q.shape[2])
        keys, values = held.update_and_fetch(k, v)
        return np.array(hook.scaled_dot_product_attention(q, keys, values, held, width**-0.5, mask))

    alone = []
    for length in (250, 120, 380, 2):
        held = BlockKVCache("turbo4", "turbo3", window=window, balance="off", backend=backend, rolls_back=False)
        answer(held, rows(1, 4, length), rows(1, 2, length), rows(1, 2, length))
        alone.append(held)
    batch = BlockKVCache.merge([copy.copy(held) for held in alone])
    for _ in range(300):
        q, k, v = rows(4, 4, 1), rows(4, 2, 1), rows(4, 2, 1)
        together = answer(batch, q, k, v)
        for i, held in enumerate(alone):
            part = slice(i, i + 1)
            assert np.array_equal(together[part], answer(held, q[part], k[part], v[part]))
