"""`tqgguf inspect` tells what a model is and what its KV cache costs, of models that it has never heard of too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_folders
from gguf_builder import Tensor
from inspecting import as_json, facts, model_of, shown, unknown
from tiny_models import TinyModel, model_tensors, write_tiny

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape, kv_bytes
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.inspection.facts import kv_costs
from tqgguf.formats.inspection.inspect import inspect
from tqgguf.formats.inspection.model import model_facts
from tqgguf.formats.models.config import read_model_config
from tqgguf.runtime.models.mlx_folder import OpenFolder

LLAMA = TinyModel(n_layers=3, head_dim=64, n_heads=4, n_kv_heads=2, weights="Q8_0")
GEMMA = TinyModel("gemma3", n_layers=7, window=256, window_pattern=3, head_dim=128)


def test_an_overview_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    text = shown(capsys, path)
    assert text.startswith(f"{path}: model, GGUF version 3, {path.stat().st_size / 1e6:.2f} MB\n")
    found = facts(text)
    assert found["architecture"] == "llama, 3 layers, 256 wide, feed forward 256"
    assert found["attention"] == "4 heads, 2 KV heads, 64 values each"
    assert found["context"] == "2,048 tokens"
    assert found["RoPE"] == "base 10,000, 64 values of a head"
    assert found["tokenizer"].startswith("gpt2, pre-tokenizer gpt-2, 288 tokens, 29 merges, chat template of ")
    assert found["special tokens"] == "bos 285 <|endoftext|>, eos 287 <|im_end|>, padding 285 <|endoftext|>"
    assert found["metadata"] == "23 entries (--metadata), 29 tensors (--tensors)"


def test_tensors_by_type_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, write_tiny(tmp_path / "m.gguf", LLAMA))
    tensors = model_tensors(LLAMA).values()
    types = {total["type"]: total for total in found["tensors"]["types"]}
    n_f32 = sum(isinstance(tensor, np.ndarray) for tensor in tensors)
    assert types["F32"]["n_tensors"] == n_f32 and types["Q8_0"]["n_tensors"] == len(tensors) - n_f32
    assert types["Q8_0"]["n_bytes"] == sum(len(t.data) for t in tensors if isinstance(t, Tensor))
    assert types["Q8_0"]["n_bytes"] * 32 == types["Q8_0"]["n_values"] * 34
    values = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    assert found["tensors"]["parameters"] == found["about"]["n_parameters"] == values


def test_what_a_kv_cache_costs_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = {
        cost["cache_type"]: cost
        for cost in as_json(capsys, write_tiny(tmp_path / "m.gguf", LLAMA))["kv_cache"]["types"]
    }
    rows = 3 * 2 * 1024  # layers, KV heads, tokens
    ids = 4 * 1024
    assert costs["f16"]["growth"] == rows * 2 * 64 * 2 + ids
    assert costs["q4_0"]["growth"] == rows * 2 * 36 + ids
    means = 3 * 2 * 64 * 2 * 1024 // 128
    assert costs["turbo4"]["growth"] == rows * 2 * 34 + means + ids
    prefix, scale = 3 * 2 * 64 * 2 * 4 * 2, 3 * 2 * 64 * 4
    assert costs["turbo4"]["total"] == 2 * costs["turbo4"]["growth"] + prefix + scale


@pytest.mark.parametrize("model", [LLAMA, GEMMA, TinyModel("qwen2"), TinyModel("qwen3", head_dim=128)])
def test_caches_are_those_that_run_would_have(model: TinyModel, tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "m.gguf", model)) as file:
        config = read_model_config(file)
        about, shapes, notes = model_facts(file)
    assert list(shapes) == config.layer_shapes() and not notes
    assert (about.n_layers, about.vocab_size) == (config.n_layers, config.vocab_size)
    types = CacheSpec("turbo3", "turbo3").resolve(len(shapes))
    cost = next(cost for cost in kv_costs(shapes, 1500) if cost.cache_type == "turbo3")
    assert cost.total == kv_bytes(shapes, types, 1500)


def test_layers_with_a_window_grow_no_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", GEMMA)
    assert facts(shown(capsys, path))["window"] == "256 keys in 5 of 7 layers"
    costs = {cost["cache_type"]: cost for cost in as_json(capsys, path)["kv_cache"]["types"]}
    assert costs["f16"]["growth"] == 1024 * (2 * GEMMA.n_kv_heads * 128 * 2 * 2 + 4)


FOUR = [LayerShape(3, 32, 32)] * 4
PARTIAL = [LayerShape(1, 32, 32), LayerShape(2, 32, 32)]


@pytest.mark.parametrize(
    ("keys", "shapes", "note"),
    [
        ({}, FOUR, None),
        ({"attention.head_count_kv": 1}, [LayerShape(1, 32, 32)] * 4, None),
        ({"attention.key_length": 64, "attention.value_length": 128}, [LayerShape(3, 64, 128)] * 4, None),
        ({"attention.head_count_kv": [0, 1, 2, 0]}, PARTIAL, "layers without KV heads are recurrent"),
        ({"attention.head_count_kv": [1, 2]}, [], "2 entries for 4 layers"),
        ({"ssm.state_size": 16}, [], "some layers are recurrent"),
        ({"attention.kv_lora_rank": 512}, [], "multi-head latent attention"),
        ({"attention.causal": False}, [], "not causal"),
        ({"attention.shared_kv_layers": 3}, FOUR[:1], None),
        ({"attention.sliding_window": 512}, FOUR, "which layers see a window of 512 keys is not known"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
         [LayerShape(3, 32, 32, w) for w in (8, None, 8, None)], None),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, False, True]},
         [LayerShape(3, 32, 32, w) for w in (8, 8, None, 8)], None),
        ({"block_count": 2**31, "attention.head_count": "three"}, [], None),
        ({"attention.head_count": None}, [], "does not give the sizes"),
        ({"embedding_length": 97}, [], "does not give the sizes"),
    ],
)  # fmt: skip
def test_models_of_any_architecture_are_read_leniently(
    keys: dict[str, Any], shapes: list[LayerShape], note: str | None, tmp_path: Path
) -> None:
    with open_gguf(model_of(tmp_path, unknown(**keys))) as file:
        about, found, notes = model_facts(file)
    assert list(found) == shapes and about.architecture == "xyz"
    assert (note is None and not notes) or (note is not None and note in notes[0])


def test_heads_of_a_size_that_a_type_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_of(tmp_path, unknown(**{"attention.key_length": 80, "attention.value_length": 80}))
    text = shown(capsys, path)
    assert "\nf16 " in text and "\nturbo4 " in text
    assert text.endswith(
        "-: q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, turbo4, turbo3, turbo2 cannot hold heads of this size\n"
    )


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        ({}, None),
        ({}, {"group_size": 32, "bits": 4}),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 100}, None),
    ],
)
def test_an_mlx_folder_as_mlx_lm_opens_it(
    config: dict[str, Any], quantization: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folders.write_folder(tmp_path / "folder", config=config, quantization=quantization)
    opened = OpenFolder(folder)
    about = inspect(folder).about
    assert (about.architecture, about.n_layers, about.context_length) == ("llama", 3, 1024)
    costs = {cost["cache_type"]: cost["total"] for cost in as_json(capsys, folder)["kv_cache"]["types"]}
    types = CacheSpec("turbo4", "turbo4").resolve(3)
    assert costs["turbo4"] == kv_bytes(opened.config.layer_shapes(), types, 1024)
    plain = tiny_folders.write_folder(tmp_path / "plain")
    assert about.n_parameters == inspect(plain).about.n_parameters
    found = facts(shown(capsys, folder))
    assert found["tokenizer"].startswith("tokenizer.json, chat template of ")
    assert ("quantised as" in found) == (quantization is not None)
