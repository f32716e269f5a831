"""Snapshots of sessions: a restored run goes on bit by bit as the uninterrupted one, and reuse changes no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import kv_bytes
from tqgguf.formats.errors import RequestError
from tqgguf.formats.snapshots.fit import spec_of
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import SideSnapshot, Snapshot
from tqgguf.formats.snapshots.write import write_snapshot
from tqgguf.runtime.generation.prompt_pieces import PromptPieces
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import load_model
from tqgguf.runtime.models.loaded_model import LoadedModel

MODELS = {
    "llama": TinyModel(),
    "gemma3": TinyModel("gemma3", window=160, window_pattern=2, head_dim=128, n_layers=3),
}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 280, 900)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {name: load_model(write_tiny(folder / f"{name}.gguf", model)) for name, model in MODELS.items()}


def session(model: LoadedModel, spec: CacheSpec, **options: Any) -> Session:
    return Session(model, spec, keeps_pages=True, **options)


def saved(made: Session, path: Path) -> Snapshot:
    """The session's snapshot, by way of a file."""
    write_snapshot(path, made.snapshot())
    return open_snapshot(path)


def greedy(made: Session, logits: np.ndarray, n: int) -> tuple[list[int], list[np.ndarray]]:
    """n tokens decoded greedily, and the logits after each."""
    ids, after = [], []
    for _ in range(n):
        ids.append(int(logits.argmax()))
        logits = made.decode(ids[-1])
        after.append(logits)
    return ids, after


PAIRS = [(name, "q8_0" if name.startswith("turbo") else "turbo4") for name in CACHE_TYPE_NAMES]
SPECS = [CacheSpec(*pair) for pair in PAIRS] + [
    CacheSpec("turbo4", "turbo3", balance="off"),
    CacheSpec("turbo4", "turbo3", balance="page", n_prefix=0),
    CacheSpec("q4_0", "turbo2", balance="full", n_prefix=128),
    CacheSpec("turbo3,1:q8_0", "turbo3,0:f16"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_run_goes_on_as_the_uninterrupted_one(
    name: str, spec: CacheSpec, models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model = models[name]
    whole = session(model, spec)
    logits = whole.prefill(TOKENS[:360])
    snapshot = saved(whole, tmp_path / "s.gguf")
    expected = greedy(whole, logits, 30)  # over the page edge at 384
    again = session(model, spec)
    again.adopt(snapshot)
    assert again.tokens == TOKENS[:360]
    found = greedy(again, logits, 30)
    assert found[0] == expected[0]
    assert all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    n_layers = len(model.model.layers)
    assert spec_of(snapshot, n_layers).resolve(n_layers) == spec.resolve(n_layers)


@pytest.mark.parametrize("n_tokens", [1, 3, 100, 127, 128, 129, 256])
def test_short_prompts_are_restored_too(n_tokens: int, models: dict[str, LoadedModel], tmp_path: Path) -> None:
    """Page 0 may not be full: queries seen so far still decide its scale together with later ones."""
    model, spec = models["llama"], CacheSpec("turbo3", "turbo3")
    whole = session(model, spec)
    logits = whole.prefill(TOKENS[:n_tokens])
    snapshot = saved(whole, tmp_path / "s.gguf")
    expected = greedy(whole, logits, 140)
    again = session(model, spec)
    again.adopt(snapshot)
    found = greedy(again, logits, 140)
    assert all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        (TOKENS[:600], 512),
        (TOKENS[:550], 512),
        (TOKENS[:513], 512),
        (TOKENS[:512], 256),
        (TOKENS[:900], 512),
        (TOKENS[:300] + TOKENS[:400], 256),
        (TOKENS[:100] + TOKENS[:400], 0),
        (TOKENS[:1], 0),
    ],
    ids=["identical", "prefix", "to a chunk and one", "to a chunk", "longer", "diverging", "diverging early", "one"],
)
def test_a_warm_prompt_gives_exactly_the_cold_runs_logits(
    name: str, prompt: list[int], reused: int, models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model, spec = models[name], CacheSpec("turbo4", "turbo3")
    first = session(model, spec)
    first.prefill(TOKENS[:600])
    warm = session(model, spec)
    warm.adopt(saved(first, tmp_path / "s.gguf"))
    cold = session(model, spec)
    expected, found = cold.prefill(prompt), warm.prefill(prompt)
    assert np.array_equal(found, expected)
    assert (warm.timing.reused_tokens, warm.timing.reused_generated) == (reused, 0)
    assert warm.timing.prompt_tokens == len(prompt) - reused
    assert all(
        np.array_equal(a, b) for a, b in zip(greedy(warm, found, 5)[1], greedy(cold, expected, 5)[1], strict=True)
    )


def test_generated_tokens_that_were_kept_are_taken_up_and_counted(
    models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model, spec = models["llama"], CacheSpec("turbo4", "turbo3")
    first = session(model, spec)
    ids, _ = greedy(first, first.prefill(TOKENS[:300]), 20)
    warm = session(model, spec)
    warm.adopt(saved(first, tmp_path / "s.gguf"))
    warm.prefill([*TOKENS[:300], *ids, *TOKENS[:10]])
    assert (warm.timing.reused_tokens, warm.timing.reused_generated) == (320, 20)
    assert warm.timing.prompt_tokens == 10


def test_a_page_that_a_window_has_left_behind_can_be_gone_back_to(models: dict[str, LoadedModel]) -> None:
    """With keeps_pages; what later queries read is the same with and without."""
    model, spec = models["gemma3"], CacheSpec("turbo4", "turbo3")
    keeping, freeing = session(model, spec), Session(model, spec)
    assert np.array_equal(keeping.prefill(TOKENS[:800]), freeing.prefill(TOKENS[:800]))
    starts = [{cache.start for cache in made.cache} for made in (keeping, freeing)]
    assert starts == [{0}, {0, 640}]
    assert keeping.usage.reads == freeing.usage.reads
    cold = Session(model, spec)
    prompt = TOKENS[:400] + TOKENS[:50]
    keeping.prefill(prompt)
    assert keeping.timing.prompt_tokens == 800 + 450 - 384
    cold.prefill(prompt)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_tokens", [300, 800])
def test_a_window_that_begins_within_a_page_is_held_and_handed_on_as_it_is(
    cache_type: str, n_tokens: int, models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """llama.cpp's sequence files keep just the tokens that a window sees."""
    model, spec = models["gemma3"], CacheSpec(cache_type, cache_type)
    whole = session(model, spec)
    logits = whole.prefill(TOKENS[:n_tokens])
    snapshot = whole.snapshot()
    start = n_tokens - 160
    cut = [
        replace(layer, start=start, k=later(layer.k, start), v=later(layer.v, start)) if layer.window else layer
        for layer in snapshot.layers
    ]
    given = replace(snapshot, layers=tuple(cut))
    write_snapshot(tmp_path / "s.gguf", given)
    again = session(model, spec)
    again.adopt(open_snapshot(tmp_path / "s.gguf"))
    write_snapshot(tmp_path / "t.gguf", again.snapshot())
    assert (tmp_path / "s.gguf").read_bytes() == (tmp_path / "t.gguf").read_bytes()
    assert not all(cache.can_go_back(n_tokens - 20) for cache in again.cache)
    expected, found = greedy(whole, logits, 8), greedy(again, logits, 8)
    assert all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    again.prefill(TOKENS[:260])
    assert again.timing.prompt_tokens == 260


def later(side: SideSnapshot, start: int) -> SideSnapshot:
    return replace(side, rows=side.rows[start : side.rows.shape[0]])


def test_a_snapshot_holds_the_bytes_of_the_designs_formula(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    model, spec = models["llama"], CacheSpec("turbo4", "turbo3")
    made = session(model, spec)
    made.prefill(TOKENS)
    snapshot = saved(made, tmp_path / "s.gguf")
    expected = kv_bytes(model.config.layer_shapes(), spec.resolve(2), len(TOKENS))
    assert snapshot.n_bytes == expected
    assert (tmp_path / "s.gguf").stat().st_size < expected * 1.01 + (64 << 10)


def test_a_snapshot_of_other_types_settings_or_layers_is_refused(
    models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    first = session(models["llama"], CacheSpec("turbo4", "turbo3"))
    first.prefill(TOKENS[:300])
    snapshot = saved(first, tmp_path / "s.gguf")
    other = session(models["llama"], CacheSpec("turbo3", "turbo4"))
    cases = [
        (other, snapshot, "types of K and V: expected turbo3 and turbo4 as the cache has, found turbo4 and turbo3"),
        (
            session(models["gemma3"], CacheSpec("turbo4", "turbo3")),
            snapshot,
            "expected layers 0 to 2, 3 in all, found 0 to 1",
        ),
        (
            session(models["llama"], CacheSpec("turbo4", "turbo3"), chunk=128),
            snapshot,
            "chunks of 256 tokens, expected 128",
        ),
        (other, replace(snapshot, layers=snapshot.layers[:1]), "expected layers"),
    ]
    for made, given, message in cases:
        before = made.cache
        with pytest.raises(RequestError, match=message):
            made.adopt(given)
        assert made.tokens == []
        assert made.cache is before


def test_caches_of_other_kinds_cannot_be_saved(models: dict[str, LoadedModel]) -> None:
    from mlx_lm.models.cache import KVCache

    made = session(models["llama"], CacheSpec())
    made.prefill(TOKENS[:10])
    made.cache[1] = KVCache()
    made.cache[1].update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
    with pytest.raises(
        RequestError, match="layer 1: its cache is a KVCache, which a prompt cache in a file cannot hold"
    ):
        made.snapshot()


class TestPromptPieces:
    def test_pieces_on_the_grid_become_one_range(self) -> None:
        pieces = PromptPieces(256)
        for start, end in ((0, 256), (256, 512), (512, 600), (600, 768), (768, 900)):
            pieces.add(start, end)
        assert pieces.ranges == ((0, 600), (600, 900))
        assert pieces.n_whole() == 512

    def test_a_cut_chunk_that_was_filled_again_is_not_whole(self) -> None:
        pieces = PromptPieces(256, [(0, 512)])
        pieces.cut(384)
        pieces.add(384, 512)
        assert (pieces.ranges, pieces.n_whole()) == (((0, 384), (384, 512)), 256)

    def test_generated_tokens_are_those_in_no_range(self) -> None:
        pieces = PromptPieces(256, [(0, 300), (350, 400)])
        assert [pieces.n_generated(n) for n in (0, 300, 340, 380, 450)] == [0, 0, 40, 50, 100]

    def test_what_can_be_taken_up(self) -> None:
        pieces = PromptPieces(256, [(0, 300)])
        assert [pieces.reusable(n) for n in (0, 255, 256, 299, 300, 310)] == [0, 0, 256, 256, 256, 310]
