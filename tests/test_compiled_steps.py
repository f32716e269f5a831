"""Steps compiled for a page answer as the model's own steps do, and give caches their rows back when asked."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.launcher import EmulatedLauncher
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from tiny_models import TinyModel, write_tiny

import tqgguf
from tqgguf.runtime.attention.backend import Backend, MlxBackend, NumpyBackend
from tqgguf.runtime.attention.hook import scaled_dot_product_attention
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.cache.compiled_steps import CompiledSteps
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.generation.compiled_model import CompiledModel
from tqgguf.runtime.models.load import open_model

MODELS = {
    "llama": TinyModel("llama"),
    "qwen3": TinyModel("qwen3", head_dim=128),
    "gemma3": TinyModel("gemma3", n_layers=3, window=64, window_pattern=2),
}
IDS = np.random.default_rng(21).integers(0, 280, 400).astype(np.int32)
START, END = 250, 262  # a page fills on the way


@lru_cache
def tiny(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return open_model(write_tiny(Path(folder) / "m.gguf", MODELS[name])).load(form="packed").model


PAIRS = [("turbo4", "turbo3"), ("f16", "f16"), ("f16", "turbo3"), ("q8_0", "f16")]


def filled(
    model: Any, backend: Backend, n: int = START, types: tuple[str, str] = PAIRS[0], **options: Any
) -> list[Any]:
    caches = make_prompt_cache(model, *types, backend=backend, **options)
    mx.eval(model(mx.array(IDS[None, :n]), cache=caches))
    return caches


def token(i: int) -> mx.array:
    return mx.array(IDS[None, i : i + 1])


def steps_of(model: Any) -> CompiledSteps:
    return CompiledSteps(lambda tokens, caches: model(tokens, cache=caches))


def decoded(model: Any, caches: list[Any], first: int, end: int, steps: CompiledSteps | None) -> tuple[np.ndarray, int]:
    """Logits of the steps first .. end - 1, and how many of them were compiled."""
    outs, n_compiled = [], 0
    for i in range(first, end):
        out = None if steps is None else steps.step(token(i), caches)
        n_compiled += out is not None
        out = model(token(i), cache=caches) if out is None else out
        outs.append(np.array(out[0, -1].astype(mx.float32)))
    return np.array(outs), n_compiled


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())


@pytest.mark.parametrize("types", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", MODELS)
def test_steps_answer_as_the_model_does(name: str, types: tuple[str, str]) -> None:
    model = tiny(name)
    plain, compiled = filled(model, MlxBackend(), types=types), filled(model, MlxBackend(), types=types)
    expected, _ = decoded(model, plain, START, END, None)
    found, n_compiled = decoded(model, compiled, START, END, steps_of(model))
    assert n_compiled == END - START - 1  # but for the one that fills the page
    assert distance(found, expected) < 1e-2  # a row that differs in its last bit may get another code
    assert distance(found[:5], expected[:5]) < 1e-4
    assert [cache.offset for cache in compiled] == [END] * len(compiled)
    assert compiled[0].usage == plain[0].usage


@pytest.mark.parametrize("types", PAIRS, ids="/".join)
def test_steps_by_the_kernels_answer_as_the_model_does(types: tuple[str, str]) -> None:
    model = tiny("llama")
    plain = filled(model, KernelBackend(EmulatedLauncher()), types=types)
    expected, _ = decoded(model, plain, START, START + 2, None)
    launcher = EmulatedLauncher()
    caches = filled(model, KernelBackend(launcher), types=types)
    launcher.launched.clear()
    found, n_compiled = decoded(model, caches, START, START + 2, steps_of(model))
    assert n_compiled == 2 and launcher.launched["decode_attention"] == 4  # two layers
    # RoPE at a position that is an array rounds otherwise on a CPU; of f16 alone, the others are MLX's steps in f16
    assert distance(found, expected) < (4e-3 if types == ("f16", "f16") else 1e-3)


def test_one_graph_serves_all_pages_that_planes_have_room_for() -> None:
    model, traced = tiny("llama"), []
    caches = filled(model, MlxBackend())
    for cache in caches:
        for plane in (*cache.sides[0].planes, *cache.sides[1].planes):
            plane.step = 8

    def evaluate(tokens: mx.array, layers: list[Any]) -> mx.array:
        traced.append(len(layers))
        return model(tokens, cache=layers)

    steps = CompiledSteps(evaluate)
    for i in range(START, START + 128 + 10):
        out = steps.step(token(i % 250), caches)
        mx.eval(model(token(i % 250), cache=caches) if out is None else out)
    assert len(traced) == 2  # planes grew once, when the first page filled
    copies = [cache.copy() for cache in caches]
    assert steps.step(token(0), copies) is not None and len(traced) == 2


def test_rows_of_compiled_steps_are_among_a_float_sides_rows() -> None:
    model, types = tiny("llama"), ("f16", "f16")
    plain, compiled = filled(model, MlxBackend(), types=types), filled(model, MlxBackend(), types=types)
    decoded(model, plain, START, START + 3, None)
    assert decoded(model, compiled, START, START + 3, steps_of(model))[1] == 3
    for cache, other in zip(compiled, plain, strict=True):
        for side, expected in zip(cache.sides, other.sides, strict=True):
            rows, wanted = (np.array(of.plane.read().astype(mx.float32)) for of in (side, expected))
            assert rows.shape == wanted.shape == (START + 3, *wanted.shape[1:])
            assert np.array_equal(rows[:START], wanted[:START])
            assert np.abs(rows - wanted).max() < 1e-2 * np.abs(wanted).max()


def test_steps_that_are_over_keep_no_cache_alive() -> None:
    model = tiny("llama")
    caches = filled(model, MlxBackend())
    steps = steps_of(model)
    decoded(model, caches, START, START + 2, steps)
    kept = weakref.ref(caches[0])
    gc.disable()
    try:
        del caches, steps
        assert kept() is None
    finally:
        gc.enable()


def test_a_turn_that_is_over_leaves_nothing_to_be_kept_or_copied() -> None:
    model = tiny("llama")
    caches = filled(model, MlxBackend())
    steps = steps_of(model)
    decoded(model, caches, START, START + 2, steps)
    held = weakref.ref(caches[0])
    pages = weakref.ref(caches[0].pages)
    assert caches[0].offset == START + 2
    del caches
    assert pages() is None
    assert held() is None  # though the steps are there still


def test_an_observer_sees_steps_from_the_next_one_on() -> None:
    model = tiny("llama")
    caches, seen = filled(model, MlxBackend()), []
    steps = steps_of(model)
    decoded(model, caches, START, START + 2, steps)
    caches[0].usage.observer = lambda step, q, scale: seen.append(step.layer)
    assert decoded(model, caches, START + 2, START + 3, steps)[1] == 0 and seen == [0, 1]


def test_threads_compile_steps_of_their_own() -> None:
    model = tiny("llama")
    mx.eval(model.parameters())

    def run(_: int) -> tuple[np.ndarray, int]:
        return decoded(model, filled(model, MlxBackend()), START, START + 3, steps_of(model))

    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(run, range(2)))
    assert [n for _, n in outs] == [3, 3] and np.array_equal(outs[0][0], outs[1][0])


def test_other_caches_that_cannot_be_compiled_leave_block_caches_compiled() -> None:
    model = tiny("llama")
    steps = steps_of(model)
    assert steps.step(token(0), [KVCache(), KVCache()]) is None and steps.refusal
    assert decoded(model, filled(model, MlxBackend()), START, START + 2, steps)[1] == 2


def test_a_compiled_model_can_be_copied() -> None:
    model = tiny("llama")
    copied = copy.deepcopy(tqgguf.compiled(model))
    assert copied.layers is not model.layers and len(copied.layers) == len(model.layers)


def trimmed(caches: list[Any]) -> int:
    for cache in caches:
        cache.trim(3)
    return START


def saved_and_restored(caches: list[Any]) -> int:
    for cache in caches:
        cache.state = cache.state
    return START + 3


def a_step_of_two(caches: list[Any]) -> int:
    tiny("llama")(mx.array(IDS[None, START + 3 : START + 5]), cache=caches)
    return START + 5


def replaced(caches: list[Any]) -> int:
    caches[:] = [BlockKVCache.from_state(cache.state) for cache in caches]
    for cache in caches:
        cache.backend = MlxBackend()
    return START + 3


@pytest.mark.parametrize("types", PAIRS[:3], ids="/".join)
@pytest.mark.parametrize("change", [trimmed, saved_and_restored, a_step_of_two, replaced])
def test_whoever_changes_a_cache_between_steps_finds_their_rows(
    change: Callable[[list[Any]], int], types: tuple[str, str]
) -> None:
    model = tiny("llama")
    answers = []
    for steps in (None, steps_of(model)):
        caches = filled(model, MlxBackend(), types=types)
        decoded(model, caches, START, START + 3, steps)
        at = change(caches)
        answers.append(decoded(model, caches, at, at + 1, steps)[0])
    assert distance(answers[0], answers[1]) < 1e-4


def test_nothing_is_compiled_before_page_0_is_full_or_while_somebody_watches() -> None:
    model = tiny("llama")
    assert decoded(model, filled(model, MlxBackend(), 40), 40, 43, steps_of(model))[1] == 0
    caches, seen = filled(model, MlxBackend()), []
    caches[0].usage.observer = lambda step, q, scale: seen.append(step.layer)
    assert decoded(model, caches, START, START + 2, steps_of(model))[1] == 0
    assert seen == [0, 1, 0, 1]


class OwnAttention:
    """A model that computes attention by itself, of which `how` is left to the test."""

    def __init__(self, how: Callable[[mx.array, mx.array, mx.array], mx.array]) -> None:
        self._how, self.layers = how, [None]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = mx.broadcast_to(tokens.astype(mx.float32)[:, None, :, None] / 300, (1, 2, tokens.shape[1], 64))
        return self._how(x, *cache[0].update_and_fetch(x, x + 1))


def by_products(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return mx.softmax(q @ k.swapaxes(2, 3), axis=-1) @ v


def by_both(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    mask = "causal" if q.shape[2] > 1 else None
    return scaled_dot_product_attention(q, k, v, mask=mask) + k.sum(axis=2, keepdims=True)


def by_branches(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return scaled_dot_product_attention(q, k, v, mask="causal" if q.shape[2] > 1 or q.max() > 2 else None)


@pytest.mark.parametrize("how", [by_products, by_both, by_branches])
def test_a_model_that_cannot_be_compiled_is_evaluated_as_ever(how: Callable[..., mx.array]) -> None:
    model = OwnAttention(how)
    answers = []
    for steps in (None, steps_of(model)):
        caches = [BlockKVCache("turbo4", "turbo3", backend=MlxBackend())]
        mx.eval(model(mx.array(IDS[None, :130]), caches))
        found, n_compiled = decoded(model, caches, 130, 133, steps)
        answers.append(found)
        assert n_compiled == 0
    assert np.array_equal(answers[0], answers[1])


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        (lambda model: filled(model, NumpyBackend()), "this backend does not compile steps of turbo4/turbo3"),
        (
            lambda model: filled(model, MlxBackend(), types=("bf16", "turbo3")),
            "this backend does not compile steps of bf16/turbo3",
        ),
        (lambda model: [KVCache(), KVCache()], "a layer has a KVCache"),
        (lambda model: make_prompt_cache(model, "turbo4", "turbo3", tail=False), "a cache has no tail"),
    ],
)
def test_a_refusal_says_why(caches: Callable[[Any], list[Any]], reason: str) -> None:
    steps = steps_of(tiny("llama"))
    assert steps.step(token(0), caches(tiny("llama"))) is None
    assert steps.refusal == reason


def test_mlx_lm_generates_with_a_compiled_model() -> None:
    answers = []
    for model in (tiny("llama"), tqgguf.compiled(tiny("llama"))):
        caches = filled(model, MlxBackend())
        made = generate_step(mx.array(IDS[START:END]), model, max_tokens=8, prompt_cache=caches)
        answers.append([int(found) for found, _ in made])
        assert caches[0].offset in (END + 7, END + 8)
    assert isinstance(model, CompiledModel) and model.steps.refusal is None
    assert answers[0] == answers[1]
