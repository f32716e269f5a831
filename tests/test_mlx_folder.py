"""`-m` takes an MLX safetensors folder: mlx-lm's model, the folder's tokenizer, and the same sessions as for a GGUF."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache as mlx_prompt_cache
from mlx_lm.utils import load_model as load_mlx_model
from tiny_folders import SIZES, write_folder, write_json
from tiny_models import vocabulary

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError, RequestError, TqggufError, UnsupportedModelError
from tqgguf.formats.models.config import resolve_context
from tqgguf.runtime.generation.generate import Generation
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import open_model
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.sampling import Sampler
from tqgguf.text.sampling_params import SamplingParams

GEMMA = {"sliding_window": 160, "sliding_window_pattern": 3, "tie_word_embeddings": False}
LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [1],
    "num_attention_heads": 2,
}
PROMPT = [(i * i * 7 + i * 31 + 5) % 280 for i in range(300)]


def greedy() -> Sampler:
    return Sampler(SamplingParams(temp=0.0))


def test_the_sizes_are_read_without_the_weights(tmp_path):
    opened = open_model(write_folder(tmp_path / "tiny", "gemma3_text", config=GEMMA))
    assert opened.config.architecture == "gemma3_text" and opened.config.name == "tiny"
    assert opened.config.context_length == 1024 and opened.config.vocab_size == len(vocabulary())
    assert opened.config.layer_shapes() == [
        LayerShape(2, 64, 64, 160),
        LayerShape(2, 64, 64, 160),
        LayerShape(2, 64, 64),
    ]
    assert opened.tokenizer.vocab_size == len(vocabulary())


def test_recurrent_layers_have_no_kv_shape(tmp_path):
    opened = open_model(write_folder(tmp_path, "lfm2", config=LFM2))
    assert opened.config.n_layers == 3
    assert opened.config.layer_shapes() == [LayerShape(2, 64, 64)]


@pytest.mark.parametrize(("model_type", "config"), [("llama", {}), ("qwen3", {}), ("gemma3_text", GEMMA)])
def test_a_float_cache_gives_mlx_lms_own_logits(tmp_path, model_type, config):
    folder = write_folder(tmp_path, model_type, config=config)
    session = Session(open_model(folder).load(), CacheSpec("f32", "f32"))
    model, _ = load_mlx_model(folder)
    expected = np.array(model(mx.array([PROMPT]), cache=mlx_prompt_cache(model)))[0, -1]
    found = session.prefill(PROMPT)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-4


@pytest.mark.parametrize(("model_type", "config"), [("llama", {}), ("gemma3_text", GEMMA), ("lfm2", LFM2)])
def test_a_folder_generates_over_turbo_caches(tmp_path, model_type, config):
    loaded = open_model(write_folder(tmp_path, model_type, config=config)).load()
    session = Session(loaded, CacheSpec("turbo4", "turbo3"), strict=True)
    generation = Generation(session, greedy(), n_predict=8)
    text = "".join(generation.pieces(session.prefill(PROMPT)))
    assert generation.finish in ("length", "eog")
    whole = loaded.tokenizer.decode(generation.ids)
    assert whole.startswith(text) and not whole[len(text) :].strip(
        "\ufffd"
    )  # an answer that was cut ends in whole characters
    report = session.report()
    assert report.prompt_reads.keys_from_blocks > 0 and report.by_fallback == 0
    assert report.kv_bytes < report.f16_bytes
    assert report.n_other_layers == (2 if model_type == "lfm2" else 0)


@pytest.mark.parametrize(
    "quantization",
    [
        {"group_size": 32, "bits": 4, "mode": "affine"},
        {"group_size": 32, "bits": 8, "mode": "affine"},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    ],
)
def test_a_quantised_folder_is_unpacked_exactly_on_a_cpu(tmp_path, quantization):
    folder = write_folder(tmp_path, "llama", dtype=mx.bfloat16, quantization=quantization)
    packed, dense = open_model(folder).load(form="packed").model, open_model(folder).load(form="dense").model
    assert isinstance(packed.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert {value.dtype for _, value in tree_flatten(dense.parameters())} == {mx.float32}
    module = packed.layers[1].mlp.up_proj
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    expected = mx.dequantize(
        module.weight, scales, biases, module.group_size, module.bits, module.mode, dtype=mx.float32
    )
    assert mx.array_equal(dense.layers[1].mlp.up_proj.weight, expected)
    rows = [np.array(m(mx.array([PROMPT[:20]])).astype(mx.float32)) for m in (packed, dense)]
    assert np.linalg.norm(rows[0] - rows[1]) / np.linalg.norm(rows[1]) < 0.05  # the packed one computes in bfloat16


def test_a_half_folder_stays_half_when_packed_and_becomes_float32_when_dense(tmp_path):
    folder = write_folder(tmp_path, "llama", dtype=mx.float16)
    for form, dtype in (("packed", mx.float16), ("dense", mx.float32)):
        assert open_model(folder).load(form=form).model(mx.array([[1]])).dtype == dtype


def test_loading_reports_bytes_up_to_the_whole(tmp_path):
    steps: list[tuple[int, int]] = []
    open_model(write_folder(tmp_path)).load(lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0


def test_a_chat_is_framed_by_the_folders_template(tmp_path):
    opened = open_model(write_folder(tmp_path))
    text = ChatTemplate.of(opened.tokenizer).render([{"role": "user", "content": "the"}])
    assert text == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert opened.tokenizer.encode(text)[0] == opened.tokenizer.token_id("<|im_start|>")


# What is wrong with a folder is one line.


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def pipe(name: str):
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


def configure(**config):
    return lambda folder: write_json(folder / "config.json", {"model_type": "llama", **SIZES, **config})


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BAD_FOLDERS = {
    "no config": (FormatError, r"expected a config\.json in the model folder, found none", remove("config.json")),
    "config is no JSON": (FormatError, r"config\.json: expected JSON, found a mistake", write("config.json", "{")),
    "config is a list": (
        FormatError,
        r"config\.json: expected a JSON object, found a list",
        write("config.json", "[]"),
    ),
    "no model type": (
        FormatError,
        r"expected a model_type, found none; is this a model folder",
        write("config.json", "{}"),
    ),
    "unknown model type": (
        UnsupportedModelError,
        r"does not know the model type 'nonsense'",
        configure(model_type="nonsense"),
    ),
    "latent attention": (
        UnsupportedModelError,
        r"multi-head latent attention \(kv_lora_rank\)",
        configure(kv_lora_rank=64),
    ),
    "own code": (
        UnsupportedModelError,
        r"model_file: .*code of its own, which is not run",
        configure(model_file="x.py"),
    ),
    "sizes of another type": (FormatError, r"hidden_size: expected a number from 1 ", configure(hidden_size="big")),
    "other sizes": (FormatError, r"mlx-lm cannot load it: ValueError: .*shape", configure(intermediate_size=64)),
    "no weights": (FormatError, r"expected weights in model\*\.safetensors, found none", remove("model.safetensors")),
    "weights cut short": (FormatError, r"expected data within \d+ bytes, found it at", cut_weights),
    "weights are text": (
        FormatError,
        r"expected a safetensors header, found 4 bytes",
        write("model.safetensors", "none"),
    ),
    "weights are a pointer": (
        FormatError,
        r"model\.safetensors: expected a safetensors file, found a Git LFS pointer",
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ),
    "weights are a web page": (
        FormatError,
        r"expected a safetensors file, found an HTML page",
        write("model.safetensors", "<!DOCTYPE html>"),
    ),
    "weights are a pipe": (
        FormatError,
        r"model\.safetensors: expected a regular file, found a pipe",
        pipe("model.safetensors"),
    ),
    "config is a pipe": (FormatError, r"config\.json: expected a regular file, found a pipe", pipe("config.json")),
    "config nested without end": (
        FormatError,
        r"config\.json: expected JSON, found a mistake: maximum recursion",
        write("config.json", "[" * 100_000),
    ),
    "text_config is no object": (
        FormatError,
        r"text_config: expected an object, found a number",
        configure(text_config=3),
    ),
    "context in words": (
        FormatError,
        r"max_position_embeddings: expected a number up to 2147483647, found 'long'",
        configure(max_position_embeddings="long"),
    ),
    "negative context": (
        FormatError,
        r"max_position_embeddings: expected a number up to \d+, found -5",
        configure(max_position_embeddings=-5),
    ),
    "RoPE base of zero": (
        FormatError,
        r"rope_theta: expected 2\.33e-10 to 1\.84e\+19, found 0$",
        configure(rope_theta=0),
    ),
    "absurd layers": (
        FormatError,
        r"expected at most 4096 layers, found 100000",
        configure(num_hidden_layers=100_000),
    ),
    "tokenizer nested without end": (
        FormatError,
        r"tokenizer\.json: expected JSON, found a mistake: maximum recursion",
        write("tokenizer.json", "[" * 100_000),
    ),
    "template of other bytes": (
        FormatError,
        r"chat_template\.jinja: expected UTF-8 text, found another byte \(at byte 1\)",
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"{\xff"),
    ),
    "no tokenizer": (
        FormatError,
        r"expected a tokenizer\.json in the model folder, found none",
        remove("tokenizer.json"),
    ),
    "empty tokenizer": (FormatError, r"tokenizer\.json: expected a tokenizer, found", write("tokenizer.json", "{}")),
    "generation config is no JSON": (
        FormatError,
        r"generation_config\.json: expected JSON",
        write("generation_config.json", "{"),
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_one_line(tmp_path, name):
    kind, line, spoil = BAD_FOLDERS[name]
    spoil(write_folder(tmp_path))
    with pytest.raises(kind, match=line) as caught:
        opened = open_model(tmp_path)
        _ = opened.tokenizer
        opened.load()
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TqggufError, match=r"expected a config\.json in the model folder, found none"):
        open_model(tmp_path)


def test_a_context_beyond_the_folders_names_the_setting_to_change(tmp_path):
    config = open_model(write_folder(tmp_path)).config
    assert resolve_context(config, 0) == 1024
    with pytest.raises(RequestError, match=r"trained for 1024 tokens; .* \(rope_scaling in config\.json\)$"):
        resolve_context(config, 5000)


def test_rope_of_a_folder_is_not_overridden(tmp_path):
    with pytest.raises(RequestError, match=r"RoPE of an MLX folder is set in its config\.json"):
        open_model(write_folder(tmp_path), rope_freq_scale=0.5)
