"""Drafts are taken back as if they had never been fed: over the edges of pages, past windows, in copies and batches."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.launcher import EmulatedLauncher
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from tiny_models import TinyModel, write_tiny

import tqgguf
from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.backend import Backend, MlxBackend, NumpyBackend
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.cache.batch_cache import BatchBlockKVCache
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.kv.pages import ROLLBACK_TOKENS
from tqgguf.runtime.kv.sides import BlockSide
from tqgguf.runtime.models.load import open_model

DIM, HEADS, KV_HEADS = 64, 4, 2
ROPE = RopeLayout(DIM, True)
PAIRS = [("turbo4", "turbo3"), ("turbo3", "turbo2"), ("turbo2", "q8_0"), ("q8_0", "q4_0"), ("f16", "turbo4")]
PAIRS += [("q4_0", "f16"), ("f16", "f16")]


@cache
def data(seed: int = 0) -> tuple[np.ndarray, ...]:
    """K, V and queries [1, heads, 700, DIM] f32."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((1, h, 700, DIM)).astype(np.float32) for h in (KV_HEADS, KV_HEADS, HEADS))


def fed(made: BlockKVCache, n: int, seed: int = 0) -> np.ndarray:
    """The answer of a step of the next n rows; those of other seeds are a draft that will be rejected."""
    lo = made.offset
    k, v, q = (mx.array(x[:, :, lo : lo + n]) for x in data(seed))
    mask = made.make_mask(n)
    keys, values = made.update_and_fetch(k, v)
    return np.array(hook.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask))


def contents(made: BlockKVCache) -> list[Any]:
    """All that a step to come reads: the state but for the rows of the last page, from the first page that is seen."""
    arrays: list[Any] = [made.offset]
    for side in made.sides or ():
        first = made.first_needed(made.offset) - side.first_page
        assert first >= 0
        if isinstance(side, BlockSide):
            arrays += [np.array(plane.read())[first:].tobytes() if plane.length else b"" for plane in side.planes]
            scale = () if side.scale is None else (side.scale.value, side.scale.query_squares)
            prefix = side.prefix if made.first_needed(made.offset) == 0 else None
            arrays += [None if a is None else np.array(a) for a in (prefix, side.tail, *scale)]
        else:
            arrays.append(np.array(side.plane.read()[first * 128 :]))
    return arrays


def same(a: BlockKVCache, b: BlockKVCache) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(contents(a), contents(b), strict=True))


def begun(n: int, pair: tuple[str, str] = ("turbo4", "turbo3"), **settings: Any) -> BlockKVCache:
    made = BlockKVCache(*pair, **{"rope": ROPE, "backend": NumpyBackend(), **settings})
    if n:
        fed(made, n)
    return made


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("window", [None, 60, 128, 200])
@pytest.mark.parametrize("n", [1, 3, 100, 120, 126, 127, 128, 129, 250, 255, 256, 257, 327, 328, 400])
def test_a_draft_that_is_taken_back_was_never_fed(n: int, window: int | None, pair: tuple[str, str]) -> None:
    plain, cut = (begun(n, pair, window=window) for _ in range(2))
    for n_draft, n_kept in ((3, 0), (9, 2), (ROLLBACK_TOKENS, 0)):
        fed(cut, n_kept) if n_kept else None
        fed(plain, n_kept) if n_kept else None
        fed(cut, n_draft, seed=1)
        assert cut.is_trimmable() and cut.trims_exactly(plain.offset)
        assert cut.trim(n_draft) == n_draft
        assert same(cut, plain)
    for step in (1, 5, 130, 1):
        assert np.array_equal(fed(cut, step), fed(plain, step))
    assert same(cut, plain)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("balance", ["off", "page", "full"])
def test_drafts_of_single_tokens_are_taken_back_too(window: int | None, balance: str) -> None:
    """As a draft model feeds them: page 0, with its channel scale, and page 1 are opened again."""
    plain, cut = (begun(124, window=window, balance=balance) for _ in range(2))
    for _ in range(2):
        for n_draft in (2, 4, 6, 10):
            for _ in range(n_draft):
                fed(cut, 1, seed=2)
            assert cut.trim(n_draft) == n_draft and same(cut, plain)
        for n in (*[1] * 6, 120, *[1] * 4):
            assert np.array_equal(fed(cut, n), fed(plain, n))


@pytest.mark.parametrize("n", [1, 10, ROLLBACK_TOKENS])
@pytest.mark.parametrize("window", [None, 1, 60, 128, 129, 300])
def test_every_trim_of_up_to_a_page_is_exact(window: int | None, n: int) -> None:
    for length in (128, 129, 200, 255, 256, 300, 383, 384, 385):
        plain, cut = (begun(length - n, window=window) for _ in range(2))
        while cut.offset < length:
            fed(cut, min(7, length - cut.offset), seed=1)
        assert cut.trims_exactly(length - n)
        assert cut.trim(n) == n and same(cut, plain)
        assert np.array_equal(fed(cut, 3), fed(plain, 3))


def test_a_page_that_nobody_attended_to_is_opened_again() -> None:
    plain, cut = begun(120), begun(120)
    k, v, _ = (mx.array(x[:, :, 120:140]) for x in data(1))
    cut.update_and_fetch(k, v)  # page 0 waits for queries
    cut.trim(20)
    assert same(cut, plain)
    cut.usage.unattended.clear()
    assert np.array_equal(fed(cut, 20), fed(plain, 20)) and same(cut, plain)


def test_a_given_channel_scale_stays() -> None:
    given = mx.random.uniform(0.5, 2.0, (KV_HEADS, DIM))
    plain, cut = (begun(120, channel_scale=given) for _ in range(2))
    fed(cut, 20, seed=1)
    cut.trim(20)
    assert same(cut, plain) and np.array_equal(cut.sides[0].channel_scale, given)


@pytest.mark.parametrize("made_copy", [copy.copy, copy.deepcopy, BlockKVCache.copy])
@pytest.mark.parametrize("window", [None, 60])
def test_copies_take_a_draft_back_as_their_original_does(made_copy: Callable[..., Any], window: int | None) -> None:
    plain, cut = begun(250, window=window), begun(250, window=window)
    fed(cut, 10, seed=1)
    twin = made_copy(cut)
    twin.backend = cut.backend
    assert twin.trim(10) == 10 and same(twin, plain)
    assert cut.trim(10) == 10 and same(cut, plain)


def test_a_deeper_trim_of_blocks_is_decoded_and_one_of_freed_pages_is_refused() -> None:
    assert begun(500).trim(300) == 300
    made = begun(500, window=60)
    before = contents(made)
    with pytest.raises(ValueError, match=r"holds 500 tokens, those from 256 on as rows, and cannot go back to 300"):
        made.trim(200)
    assert all(map(np.array_equal, contents(made), before))


def test_a_cache_that_does_not_roll_back_holds_no_rows_for_it() -> None:
    """One page of f16 rows a side, and of page 0 the squares of its queries, are what rolling back takes."""
    lean, whole = begun(256, rolls_back=False), begun(256)
    assert whole.nbytes - lean.nbytes == 2 * 128 * KV_HEADS * DIM * 2
    lean, whole = begun(128, rolls_back=False), begun(128)
    assert whole.nbytes - lean.nbytes == 2 * 128 * KV_HEADS * DIM * 2 + 128 * KV_HEADS * DIM * 4
    lean, whole = (begun(700, window=60, rolls_back=of) for of in (False, True))
    assert (lean.start, whole.start) == (640, 512)
    assert not lean.is_trimmable() and whole.is_trimmable()


MODELS = {
    "llama": TinyModel(),
    "gemma3": TinyModel("gemma3", window=60, window_pattern=2, n_layers=3, tied=False),
}


@cache
def tiny(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(Path(folder) / "m.gguf", MODELS[name])
        return open_model(path).load(form="dense").model


IDS = np.random.default_rng(5).integers(0, 280, 700)


def test_no_layer_is_trimmed_where_one_cannot_be() -> None:
    model = tiny("gemma3")
    caches = tqgguf.make_prompt_cache(model, "turbo4", "turbo3")
    model(mx.array(IDS[None, :600]), cache=caches)
    assert caches[1].window is None
    for twin in (caches, copy.deepcopy(caches)):
        with pytest.raises(ValueError, match="cannot go back to 300"):
            trim_prompt_cache(twin, 300)
        with pytest.raises(ValueError, match="layer 1 holds 600 tokens"):
            twin[1].trim(300)
        assert [made.offset for made in twin] == [600] * 3
        assert can_trim_prompt_cache(twin) and trim_prompt_cache(twin, ROLLBACK_TOKENS) == ROLLBACK_TOKENS


def test_no_layer_is_trimmed_to_what_a_file_did_not_hold(tmp_path: Path) -> None:
    model = tiny("gemma3")
    caches = tqgguf.make_prompt_cache(model, "turbo4", "turbo3")
    model(mx.array(IDS[None, :600]), cache=caches)
    tqgguf.save_prompt_cache(tmp_path / "c.gguf", caches)
    loaded: Any = tqgguf.load_prompt_cache(tmp_path / "c.gguf", model)
    with pytest.raises(ValueError, match="cannot go back to 300"):
        trim_prompt_cache(loaded, 300)
    assert [made.offset for made in loaded] == [600] * 3
    model(mx.array(IDS[None, 600:650]), cache=loaded)
    assert trim_prompt_cache(loaded, 50) == 50
    assert all(same(a, b) for a, b in zip(loaded, caches, strict=True))


def test_a_snapshot_after_a_rollback_is_that_of_what_was_never_fed(tmp_path: Path) -> None:
    for name in MODELS:
        for n in (127, 250, 383):
            model, files = tiny(name), []
            for is_cut in (False, True):
                caches = tqgguf.make_prompt_cache(model, "turbo3", "turbo4")
                model(mx.array(IDS[None, :n]), cache=caches)
                if is_cut:
                    model(mx.array(IDS[None, 300:312]), cache=caches)
                    trim_prompt_cache(caches, 12)
                files.append(tmp_path / f"{is_cut}.gguf")
                tqgguf.save_prompt_cache(files[-1], caches, tokens=IDS[:n])
            assert files[0].read_bytes() == files[1].read_bytes()


class Drafting:
    """A model that is right in two steps of three."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers, self.n_steps = model, model.layers, 0

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.n_steps += 1
        logits = self.model(tokens, cache=cache)
        return logits if self.n_steps % 3 else mx.roll(logits, 1, axis=-1)


def check_text(name: str, n: int, pair: tuple[str, str], n_draft: int) -> None:
    """12 tokens after a prompt of n are chosen by drafts from what plain decoding of the same text gives, but for the
    rounding in steps of one row and of several, which may flip a code of a block."""
    model, prompt = tiny(name), mx.array(IDS[:n])
    drafting = Drafting(model)
    plain, caches, drafts = (tqgguf.make_prompt_cache(model, *pair) for _ in range(3))
    how: dict[str, Any] = {"num_draft_tokens": n_draft, "prompt_cache": [*caches, *drafts]}
    found = [*speculative_generate_step(prompt, model, drafting, max_tokens=12, **how)]
    model(prompt[None, :-1], cache=plain)
    token = int(prompt[-1])
    for i, (chosen, logprobs, _) in enumerate(found):
        logits = model(mx.array([[token]]), cache=plain)[0, -1]
        expected = logits - mx.logsumexp(logits)
        np.testing.assert_allclose(logprobs, expected, atol=0.2, err_msg=f"{n} + {i}")
        token = chosen
    assert len(found) == 12 and 0 < sum(by_draft for *_, by_draft in found) < 12


EDGES = [*range(120, 137), *range(250, 261)]


@pytest.mark.parametrize("name", MODELS)
def test_text_by_drafts_is_the_plain_text_around_every_edge(name: str) -> None:
    """The models take turns; the slow test has every edge with both."""
    for i, n in list(enumerate(EDGES))[list(MODELS).index(name) :: 2]:
        check_text(name, n, PAIRS[i % len(PAIRS)], n_draft=1 + i % 5)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", MODELS)
def test_text_by_drafts_is_the_plain_text_with_all_types(name: str, pair: tuple[str, str]) -> None:
    for n in EDGES:
        check_text(name, n, pair, n_draft=4)


def together(caches: list[BlockKVCache], n: int, seed: int = 0) -> Callable[[BatchBlockKVCache], np.ndarray]:
    """A step of the next n rows of each sequence, as `fed` has it."""
    offsets = [made.offset for made in caches]

    def step(batch: BatchBlockKVCache) -> np.ndarray:
        k, v, q = (mx.array(np.concatenate([x[:, :, lo : lo + n] for lo in offsets])) for x in data(seed))
        mask = batch.make_mask(n)
        keys, values = batch.update_and_fetch(k, v)
        return np.array(hook.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask))

    return step


@pytest.mark.parametrize("make", [NumpyBackend, lambda: KernelBackend(EmulatedLauncher())], ids=["numpy", "kernels"])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 60])
def test_a_batch_takes_drafts_back_as_each_sequence_alone(window: int | None, make: Callable[[], Backend]) -> None:
    backend = make()
    lonely = [begun(n, window=window) for n in (125, 254, 40)]
    for i, made in enumerate(lonely):
        lonely[i] = BlockKVCache(window=window, backend=backend)
        lonely[i].state = made.state
    batch = BlockKVCache.merge(lonely)
    assert batch.is_trimmable()
    together(lonely, 1)(batch)
    for made in lonely:
        fed(made, 1)
    for n_draft in (1, 1, 1):
        together([batch.extract(i) for i in range(3)], n_draft, seed=1)(batch)
    assert batch.trim(3) == 3
    assert all(same(batch.extract(i), made) for i, made in enumerate(lonely))
    for _ in range(4):
        together(lonely, 1)(batch)
        for made in lonely:
            fed(made, 1)
    assert all(same(batch.extract(i), made) for i, made in enumerate(lonely))


def test_compiled_steps_are_taken_back_over_an_edge() -> None:
    model, caches = tiny("llama"), []
    for _ in range(2):
        caches.append(tqgguf.make_prompt_cache(model, "turbo4", "turbo3", backend=MlxBackend()))
        model(mx.array(IDS[None, :250]), cache=caches[-1])
    compiled = tqgguf.compiled(model)
    for i in range(10):
        compiled(mx.array(IDS[None, 400 + i : 401 + i]), cache=caches[1])
    assert compiled.steps.n_steps > 0
    assert trim_prompt_cache(caches[1], 10) == 10
    assert all(same(a, b) for a, b in zip(*caches, strict=True))
