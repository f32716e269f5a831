"""config.json of model folders: every key that a class reads is known, typed, and refused where it would be dropped."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import CASES, checkpoint_tensors, write_checkpoint, write_safetensors
from tiny_folders import SIZES, write_folder, write_json

from tqgguf.cli.main import main
from tqgguf.conversion.hf_convert import plan_checkpoint
from tqgguf.formats.errors import FormatError, TqggufError, UnsupportedModelError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.inspection.folder import inspect_folder
from tqgguf.formats.models.folder_files import FILES
from tqgguf.formats.models.folder_keys import FAMILIES, KEYS
from tqgguf.runtime.models.load import open_model

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = {"sliding_window": 160, "sliding_window_pattern": 3}
GENERIC = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "output_attentions", "name_or_path", "model_type",
}  # fmt: skip
"""What every configuration of transformers has: nothing that a language model computes with."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_that_a_class_reads_is_in_the_table(model_type: str) -> None:
    transformers = importlib.import_module("transformers")
    configuration = type(transformers.AutoConfig.for_model(model_type))
    theirs = {field.name for field in fields(configuration)} - GENERIC
    module = importlib.import_module(f"mlx_lm.models.{'llama' if model_type == 'mistral' else model_type}")
    assert theirs - KEYS.keys() == set()
    assert {field.name for field in fields(module.ModelArgs)} - KEYS.keys() == set()


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, **settings}}


SIX = [SLIDING] * 5 + [FULL] + [SLIDING]
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"hidden_act": "relu"}, "hidden_act"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"layer_types": [FULL, SLIDING], "sliding_window": 64}, "layer_types"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "rope_type 'longrope'",
    ),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ("llama", rope(mscale=0.7), "mscale"),
    ("llama", rope(truncate=False), "truncate"),
    ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "rope_type 'mrope'"),
    ("llama", {"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "sliding_window"),
    (
        "llama",
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "layer_types": [FULL, FULL]},
        "sliding_window",
    ),
    ("llama", {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, "sliding_window"),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 8192},
        "use_sliding_window",
    ),
    ("qwen2", {"rope_traditional": True}, "rope_traditional"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}, "use_sliding_window"),
    ("qwen2", {"hidden_act": "gelu_new"}, "hidden_act"),
    ("qwen2", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type llama3"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": [FULL, SLIDING]}, "use_sliding_window"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("gemma3", {"sliding_window_pattern": 4}, "sliding_window_pattern"),
    ("gemma3", {"layer_types": [SLIDING, FULL] * 3 + [SLIDING]}, "layer_types"),
    ("gemma3", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma3", {"query_pre_attn_scalar": 128}, "query_pre_attn_scalar"),
    ("gemma3", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"attention_bias": True}, "attention_bias"),
    ("gemma3", {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}}, "rope_type of sliding"),
]


@pytest.mark.parametrize(("case", "config", "key"), REFUSED)
def test_a_key_that_a_gguf_would_drop_is_refused_by_name(
    tmp_path: Path, case: str, config: dict[str, Any], key: str
) -> None:
    folder = write_checkpoint(tmp_path / "a", CASES[case], **config)
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {key}"):
        plan_checkpoint(str(folder), str(tmp_path / "a.gguf"))


NEUTRAL = [
    ("llama", {"hidden_act": "swish", "partial_rotary_factor": 1, "attention_dropout": 0.1, "pretraining_tp": 2}),
    ("llama", {"sliding_window": 64, "hidden_activation": "relu", "made_up": [1]}),  # nothing of these is read
    ("llama", {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}),
    ("llama", {"layer_types": [FULL, FULL], "mlp_bias": False, "attention_bias": None}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": None}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ("gemma3", {"sliding_window_pattern": None, "layer_types": SIX}),
    ("gemma3", {"sliding_window_pattern": None, "_sliding_window_pattern": 6, "hidden_act": "silu"}),
]


@pytest.mark.parametrize(("case", "config"), NEUTRAL)
def test_a_value_that_changes_nothing_is_converted_to_the_same_model(
    tmp_path: Path, case: str, config: dict[str, Any]
) -> None:
    written = []
    for name, more in (("a", {}), ("b", config)):
        folder = write_checkpoint(tmp_path / name / "x", CASES[case], **more)
        assert main(["convert", str(folder), str(tmp_path / f"{name}.gguf")]) == 0
        with open_gguf(tmp_path / f"{name}.gguf") as file:
            written.append({key: repr(value) for key, value in file.metadata.items()})
    assert written[0] == written[1]


IN_TWO_WAYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope_theta": 500.0}, {"rope_theta": None, "rope_parameters": {"type": "default", "rope_theta": 500.0}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
     {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 4.0}}),
    ("llama", {}, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
    ("llama", rope(original_max_position_embeddings=1024),
     {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("llama", rope(original_max_position_embeddings=99), {**rope(), "original_max_position_embeddings": 99}),
    ("llama", {}, {"tie_word_embeddings": None}),
    ("gemma3", {"sliding_window": 4096}, {"sliding_window": None}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "said", "other"), IN_TWO_WAYS)
def test_two_ways_to_say_the_same_are_converted_to_the_same_model(
    tmp_path: Path, case: str, said: dict[str, Any], other: dict[str, Any]
) -> None:
    written = []
    for name, config in (("a", said), ("b", other)):
        folder = write_checkpoint(tmp_path / name / "x", CASES[case], **config)
        assert main(["convert", str(folder), str(tmp_path / f"{name}.gguf")]) == 0
        with open_gguf(tmp_path / f"{name}.gguf") as file:
            written.append((sorted(file.tensors),
                            {key: repr(value) for key, value in file.metadata.items()}))  # fmt: skip
    assert written[0] == written[1]


def test_where_all_layers_of_gemma_see_everything_no_window_is_written(tmp_path: Path) -> None:
    for name, config in (("a", {"sliding_window_pattern": 1}), ("b", {"layer_types": [FULL] * 7})):
        folder = write_checkpoint(tmp_path / name, CASES["gemma3"], **config)
        assert main(["convert", str(folder), str(tmp_path / f"{name}.gguf")]) == 0
        with open_gguf(tmp_path / f"{name}.gguf") as file:
            assert "gemma3.attention.sliding_window" not in file.metadata


def test_an_output_layer_of_its_own_must_be_there_and_one_that_is_not_used_is_left_out(tmp_path: Path) -> None:
    for case in ("llama3", "qwen3", "gemma3"):
        folder = write_checkpoint(tmp_path / case, CASES[case], tie_word_embeddings=False)
        with pytest.raises(FormatError, match=r"tie_word_embeddings: expected true, as there is no lm_head\.weight"):
            plan_checkpoint(str(folder), str(tmp_path / "a.gguf"))
    folder = write_checkpoint(tmp_path / "tied", CASES["llama"], tie_word_embeddings=True)  # has an lm_head.weight
    plan = plan_checkpoint(str(folder), str(tmp_path / "a.gguf"))
    assert "output.weight" not in {tensor.name for tensor in plan.tensors}


@pytest.mark.parametrize(
    ("config", "biases", "message"),
    [
        ({"attention_bias": True}, (), r"attention_bias is true: expected a bias blk\.0\.attn_q\.bias, found none"),
        ({"mlp_bias": True}, (), r"mlp_bias is true: expected a bias blk\.0\.ffn_gate\.bias, found none"),
        ({}, ("self_attn.q_proj",), r"attention_bias is false: expected no bias blk\.0\.attn_q\.bias, found one"),
    ],
)
def test_biases_are_there_if_the_class_adds_them_and_only_then(
    tmp_path: Path, config: dict[str, Any], biases: tuple[str, ...], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "a", CASES["llama"], **config)
    tensors = checkpoint_tensors(CASES["llama"])
    tensors |= {f"model.layers.0.{name}.bias": np.zeros(256, np.float32) for name in biases}
    write_safetensors(folder / "model.safetensors", tensors, "BF16")
    with pytest.raises(FormatError, match=message):
        plan_checkpoint(str(folder), str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial"),
        ("qwen2", {"head_dim": 64}, "head_dim"),
        ("gemma3_text", {**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {**GEMMA, "hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3_text", {**GEMMA, "layer_types": [FULL, SLIDING, SLIDING]}, "layer_types"),
    ],
)
def test_a_key_that_mlx_lm_drops_is_refused_by_name(
    tmp_path: Path, model_type: str, config: dict[str, Any], key: str
) -> None:
    folder = write_folder(tmp_path / "a", model_type, config=config)
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {key}"):
        open_model(folder)


def test_transformers_own_words_for_rope_and_layers_reach_mlx_lms_class(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    write_json(folder / "config.json", {"model_type": "llama", **SIZES, "rope_parameters": linear})
    args = open_model(folder)._model.args
    assert args.rope_theta == 5e5 and args.rope_scaling["factor"] == 2.0
    folder = write_folder(tmp_path / "b", "gemma3_text", config=GEMMA)
    layers = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 160}
    both = {FULL: {"rope_theta": 2e6}, SLIDING: {"rope_theta": 2e4}}
    write_json(folder / "config.json", {"model_type": "gemma3_text", **SIZES, **layers, "rope_parameters": both})
    opened = open_model(folder)
    args = opened._model.args
    assert [shape.window for shape in opened.config.layer_shapes()] == [160, 160, None]
    assert (args.rope_theta, args.rope_local_base_freq, args.sliding_window_pattern) == (2e6, 2e4, 3)


ODD = ("null", '""', '"\\u0000x"', "[]", "[[]]", "{}", '{"a":{}}', "-1", "0", "1e400", "-1e400", "NaN", str(2**70),
       "true", "0.5", "1e-320", "9" * 400)  # fmt: skip


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_any_value_of_any_key_is_served_or_refused_in_one_line(tmp_path: Path, case: str, step: int) -> None:
    folder = write_checkpoint(tmp_path / "a", CASES[case])
    path = folder / "config.json"
    config = json.loads(path.read_text())
    keys = sorted({*config, *KEYS, "quantization", "quantization_config", "num_experts", "torch_dtype"})
    for i, key in enumerate(keys):
        for odd in ODD[i % step :: step]:
            path.write_text(json.dumps({**config, key: "ODD"}).replace('"ODD"', odd))
            for serve in (lambda: plan_checkpoint(str(folder), str(tmp_path / "a.gguf")), lambda: open_model(folder),
                          lambda: inspect_folder(str(folder))):  # fmt: skip
                try:
                    serve()
                except TqggufError as error:
                    assert "\n" not in str(error) and len(str(error)) < 1000, (key, odd)
    assert os.listdir(tmp_path) == ["a"]


def test_odd_settings_of_rope_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", CASES["llama"])
    path = folder / "config.json"
    config = json.loads(path.read_text())
    keys = ("rope_type", "factor", "low_freq_factor", "original_max_position_embeddings", "beta_fast", FULL)
    for kind in ("yarn", "llama3", "linear"):
        for key in keys:
            for odd in ODD:
                scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 256, key: "ODD"}
                path.write_text(json.dumps({**config, "rope_scaling": scaling}).replace('"ODD"', odd))
                for serve in (
                    lambda: plan_checkpoint(str(folder), str(tmp_path / "a.gguf")),
                    lambda: open_model(folder),
                ):
                    try:
                        serve()
                    except TqggufError as error:
                        assert "\n" not in str(error), (key, odd)


@pytest.mark.parametrize("name", [name.replace("*", "x") for name in FILES if name != "model*.safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a character device", "a folder", "bytes"])
def test_a_file_that_a_library_would_open_is_checked_first(tmp_path: Path, name: str, kind: str) -> None:
    for folder in (write_folder(tmp_path / "mlx"), write_checkpoint(tmp_path / "hf", CASES["llama"])):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        elif kind == "bytes":
            path.touch()
            os.truncate(path, 1 << 30)  # a hole
        else:
            path.symlink_to("/dev/zero")
        expected = (
            r"expected at most [\d,]+ bytes, found" if kind == "bytes" else f"expected a regular file, found {kind}"
        )
        with pytest.raises(FormatError, match=expected):
            open_model(folder) if folder.name == "mlx" else plan_checkpoint(str(folder), str(tmp_path / "a.gguf"))
