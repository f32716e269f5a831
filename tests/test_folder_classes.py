"""What mlx-lm's classes are told of config.json: they compute what transformers' do, or the folder is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny_folders import SIZES, write_folder, write_json

from tqgguf.formats.errors import FormatError, RequestError, UnsupportedModelError
from tqgguf.formats.models.config import resolve_context
from tqgguf.formats.models.folder_asked import Asked
from tqgguf.formats.models.folder_defaults import DEFAULTS, TIED, completed
from tqgguf.formats.models.folder_keys import FAMILIES, NULLS, language_part
from tqgguf.formats.models.folder_rope import FULL, SLIDING, chosen_rope
from tqgguf.runtime.models.folder_classes import unread_notices
from tqgguf.runtime.models.load import open_model

FOLDERS = {family: model_type for model_type, family in FAMILIES.items()}  # gemma3's last: gemma3_text
PROMPT = mx.array([[5, 17, 200, 31, 8, 90, 44, 3, 260, 12]])
GEMMA3 = {"sliding_window_pattern": 3, "sliding_window": 64}


def theirs(family: str, **config: Any) -> Any:
    """transformers' own reading of a configuration."""
    transformers = importlib.import_module("transformers")
    return type(transformers.AutoConfig.for_model(FOLDERS[family]))(**config)


def ours(family: str, **config: Any) -> dict[str, Any]:
    return completed(family, language_part(config, "config.json"))


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_config_json_does_not_say_is_what_transformers_assumes(family: str) -> None:
    found, expected = ours(family), theirs(family)
    for key in DEFAULTS[family].keys() - {"rope_traditional", "sliding_window", "mlp_bias", "attention_bias"}:
        assert found.get(key) == getattr(expected, key), key
    if family.startswith(("qwen",)):
        expected = theirs(family, use_sliding_window=True)
    assert found.get("sliding_window") == getattr(expected, "sliding_window", None)
    assert expected.tie_word_embeddings is (family in TIED)


@pytest.mark.parametrize("family", DEFAULTS)
def test_null_means_what_it_means_to_transformers(family: str) -> None:
    for key in (*NULLS, "head_dim"):
        try:
            expected = getattr(theirs(family, **{key: None}), key, None)
        except Exception:  # a value that the class refuses
            continue
        assert ours(family, **{key: None}).get(key) == expected or (family, key) == ("qwen2", "head_dim"), key


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": 500.0}),
    ("llama", {"rope_scaling": {**LINEAR, "rope_theta": 500.0}}),
    ("llama", {"rope_theta": 9.0, "rope_scaling": {**LINEAR, "rope_theta": 500.0}}),
    ("llama", {"rope_theta": 9.0, "rope_parameters": {"rope_theta": 500.0}}),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": LINEAR}),
    ("llama", {"rope_scaling": {}, "rope_parameters": LINEAR}),
    ("llama", {"rope_scaling": YARN, "max_position_embeddings": 640}),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 320}),
    ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 80}}),
    ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 80},
               "original_max_position_embeddings": 320}),
    ("qwen2", {}),
    ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    ("mistral", {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}),
    ("gemma", {"rope_theta": 300.0}),
    ("gemma2", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    ("gemma3", {}),
    ("gemma3", {"rope_theta": 2e5, "rope_local_base_freq": 300.0, "rope_scaling": LINEAR}),
    ("gemma3", {"rope_parameters": {FULL: LINEAR}}),
    ("gemma3", {"rope_parameters": {FULL: {**LINEAR, "rope_theta": 7.0}, SLIDING: {"rope_theta": 8.0}}}),
    ("gemma3", {"rope_parameters": {SLIDING: {"rope_theta": 8.0}}, "rope_theta": 5.0}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "config"), ROPES)
def test_ropes_settings_are_those_that_transformers_chooses(family: str, config: dict[str, Any]) -> None:
    copy = json.loads(json.dumps(config))
    configuration = theirs(family, **copy)
    configuration.standardize_rope_params()  # as every model of transformers does before it computes
    expected = configuration.rope_parameters
    if FULL not in expected:
        expected = {FULL: expected}
    found = chosen_rope(family, ours(family, **config), "config.json")
    assert found == {
        layers: {key: value for key, value in rope.items() if key != "type"} for layers, rope in expected.items()
    }


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "the same in both"),
        ("gemma3", {"rope_scaling": LINEAR, "rope_parameters": {FULL: {"rope_type": "default"}}}, "the same in both"),
        ("gemma3", {"rope_parameters": LINEAR}, f"expected an entry for {FULL}"),
        ("llama", {"rope_parameters": {FULL: LINEAR}}, "expected the same for all layers"),
        ("gemma3", {"rope_parameters": {FULL: [1]}}, "expected an object"),
    ],
)
def test_settings_of_rope_that_contradict_each_other_are_refused(
    family: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=f"config.json: rope_.*{message}"):
        chosen_rope(family, ours(family, **config), "config.json")


def folder_of(folder: Path, model_type: str, changed: dict[str, Any], **base: Any) -> Path:
    """A folder whose configuration is changed after its weights were made; "absent" removes a key."""
    write_folder(folder, model_type, config={**({"head_dim": 32} if model_type == "qwen2" else {}), **base})
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changed}
    write_json(path, {key: value for key, value in config.items() if value != "absent"})
    return folder


def logits(folder: Path) -> np.ndarray:
    return np.array(open_model(folder).load(form="dense").model(PROMPT)[0])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "olmo2"])
def test_an_output_layer_that_is_there_is_used_where_config_json_does_not_say(tmp_path: Path, model_type: str) -> None:
    absent = folder_of(tmp_path / "a", model_type, {"tie_word_embeddings": "absent"}, tie_word_embeddings=False)
    own = folder_of(tmp_path / "b", model_type, {}, tie_word_embeddings=False)
    assert np.array_equal(logits(absent), logits(own))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_without_an_output_layer_the_embeddings_are_used_where_config_json_does_not_say(
    tmp_path: Path, model_type: str
) -> None:
    absent = folder_of(tmp_path / "a", model_type, {"tie_word_embeddings": "absent"})
    assert np.array_equal(logits(absent), logits(folder_of(tmp_path / "b", model_type, {})))


@pytest.mark.parametrize("said", [True, "absent"])
def test_an_output_layer_that_the_class_does_not_use_is_left_out(tmp_path: Path, said: Any) -> None:
    with_head = folder_of(tmp_path / "a", "gemma3_text", {"tie_word_embeddings": said}, **GEMMA3)
    without = folder_of(tmp_path / "b", "gemma3_text", {"tie_word_embeddings": True}, **GEMMA3)
    weights = dict(mx.load(str(without / "model.safetensors")))
    mx.save_safetensors(
        str(without / "model.safetensors"), {name: value for name, value in weights.items() if "lm_head" not in name}
    )
    own = folder_of(tmp_path / "c", "gemma3_text", {"tie_word_embeddings": False}, **GEMMA3)
    assert np.array_equal(logits(with_head), logits(without))
    assert not np.allclose(logits(with_head), logits(own))


def test_gemma_2s_output_layer_is_left_out_as_well(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", "gemma2", {})
    expected = logits(folder)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    weights["lm_head.weight"] = mx.ones((SIZES["vocab_size"], SIZES["hidden_size"]))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert np.array_equal(logits(folder), expected)


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen2", {"rope_theta": 1e4}, {"rope_theta": "absent"}),
    ("llama", {"rope_theta": 500.0}, {"rope_theta": "absent", "rope_scaling": {**LINEAR, "rope_theta": 500.0,
                                                                               "rope_type": "default"}}),
    ("llama", {"rope_scaling": LINEAR}, {"rope_scaling": {"type": "default", **LINEAR}}),
    ("llama", {}, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
    ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 1024}}, {"rope_scaling": YARN}),
    ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 99}},
     {"rope_scaling": YARN, "original_max_position_embeddings": 99}),
    ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 99}},
     {"rope_scaling": {**YARN, "original_max_position_embeddings": 99, "mscale": 0.7}}),
    ("gemma2", {"query_pre_attn_scalar": 256}, {"query_pre_attn_scalar": "absent"}),
    ("gemma2", {"rope_theta": 300.0}, {"rope_theta": "absent", "rope_parameters": {"rope_theta": 300.0}}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "said", "other"), DIFFERENT)
def test_two_ways_to_say_the_same_give_the_same_model(
    tmp_path: Path, model_type: str, said: dict[str, Any], other: dict[str, Any]
) -> None:
    expected = logits(folder_of(tmp_path / "a", model_type, said))
    assert np.array_equal(logits(folder_of(tmp_path / "b", model_type, other)), expected)


def test_gemma_3_has_transformers_window_where_config_json_gives_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", "gemma3_text", {"sliding_window": "absent"}, **GEMMA3)
    assert [shape.window for shape in open_model(folder).config.layer_shapes()] == [4096, 4096, None]


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("gemma", {"hidden_act": "relu"}, "hidden_act"),
        ("gemma", {"rope_scaling": LINEAR}, "rope_type 'linear'"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma2", {"rope_parameters": YARN}, "rope_type 'yarn'"),
        ("gemma2", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}},
            "rope_type 'longrope'",
        ),
        ("qwen3", {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type 'proportional'"),
    ],
)
def test_what_mlx_lms_class_cannot_do_is_refused_by_name(
    tmp_path: Path, model_type: str, config: dict[str, Any], key: str
) -> None:
    folder = folder_of(tmp_path / "a", model_type, config)
    with pytest.raises((UnsupportedModelError, FormatError), match=rf"config\.json: {key}"):
        open_model(folder)


WINDOWS: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"model_type": "mistral", "sliding_window": 8}, 8),
    ("llama", {"model_type": "mistral", "sliding_window": 8, "layer_types": [FULL] * 3}, 8),
    ("llama", {"model_type": "mistral", "sliding_window": "absent", "max_position_embeddings": 9000}, 4096),
    ("llama", {"model_type": "mistral", "sliding_window": None}, 1024),
    ("llama", {"model_type": "mistral", "sliding_window": None, "layer_types": [SLIDING, FULL, FULL]}, 1024),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, 8),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "max_position_embeddings": 9000}, 4096),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}, 1024),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, FULL, SLIDING]}, 8),
    ("gemma2", {"sliding_window": 8}, 8),
    ("gemma2", {"sliding_window": 8, "layer_types": [FULL] * 3}, 1024),
    ("gemma2", {"sliding_window": "absent", "max_position_embeddings": 9000}, 4096),
]


@pytest.mark.parametrize(("model_type", "config", "context"), WINDOWS)
def test_a_context_goes_as_far_as_the_window_that_mlx_lms_class_lacks(
    tmp_path: Path, model_type: str, config: dict[str, Any], context: int
) -> None:
    opened = open_model(folder_of(tmp_path / "a", model_type, config))
    assert opened.config.context_length == context
    told = [line for line in opened.tokenizer.warnings if "sliding_window" in line]
    assert bool(told) == (context in (8, 4096)) and all(f"{context:,} tokens" in line for line in told)
    with pytest.raises(RequestError, match="needs a sliding window beyond" if told else "was trained for"):
        resolve_context(opened.config, context + 1)
    if context == 8:
        model = opened.load(form="dense").model
        assert model(PROMPT[:, :8]).shape[1] == 8
        with pytest.raises(RequestError, match="expected at most 8 tokens of context"):
            model(PROMPT)


def test_gemmas_gelu_is_the_one_that_transformers_computes(tmp_path: Path) -> None:
    layer = open_model(folder_of(tmp_path / "a", "gemma", {})).load(form="dense").model.layers[0].mlp
    x = mx.random.normal((3, SIZES["hidden_size"]), key=mx.random.key(1))
    gate, up = (x @ matrix.weight.T for matrix in (layer.gate_proj, layer.up_proj))
    tanh = 0.5 * gate * (1 + mx.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    assert mx.allclose(layer(x), (tanh * up) @ layer.down_proj.weight.T, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "config", "named"),
    [
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act ('gelu')"),
        ("olmo2", {"sliding_window": 64}, "sliding_window (64)"),
        ("olmo2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping (30.0)"),
        ("olmo2", {"hidden_act": "silu", "sliding_window": 4096, "attn_logit_softcapping": None}, None),
        ("olmo2", {"rope_scaling": LINEAR}, None),  # which the class reads
    ],
)
def test_one_line_names_what_a_class_that_is_in_no_table_does_not_read(
    tmp_path: Path, model_type: str, config: dict[str, Any], named: str | None
) -> None:
    warnings = open_model(folder_of(tmp_path / "a", model_type, config)).tokenizer.warnings
    found = [line for line in warnings if "does not read" in line]
    assert len(found) == (named is not None) and all(str(named) in line for line in found)


@pytest.mark.parametrize(
    ("model_type", "value", "is_named"),
    [("gemma3n", "gelu_pytorch_tanh", False), ("nemotron", "relu2", False), ("gpt_neox", "gelu", True)],
)
def test_an_activation_that_a_class_has_by_itself_is_not_named(model_type: str, value: str, is_named: bool) -> None:
    model = importlib.import_module(f"mlx_lm.models.{model_type}").Model
    asked = Asked({}, unknown={"hidden_act": value})
    assert bool(unread_notices(model.__new__(model), model_type, asked)) == is_named


def test_ropes_settings_in_newer_words_reach_a_class_that_knows_the_older_ones(tmp_path: Path) -> None:
    older = folder_of(tmp_path / "a", "olmo2", {"rope_theta": 300.0, "rope_scaling": LINEAR})
    newer = {"rope_parameters": {**LINEAR, "rope_theta": 300.0}, "rope_theta": "absent"}
    folder = folder_of(tmp_path / "b", "olmo2", newer)
    assert np.array_equal(logits(folder), logits(older))
    assert not [line for line in open_model(folder).tokenizer.warnings if "does not read" in line]


def test_every_weight_of_a_folder_is_what_it_was(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", "gemma2", {})
    stored = dict(mx.load(str(folder / "model.safetensors")))
    loaded = dict(tree_flatten(open_model(folder).load(form="dense").model.parameters()))
    assert loaded.keys() == stored.keys() and all(mx.array_equal(loaded[name], stored[name]) for name in stored)
