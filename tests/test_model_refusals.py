"""What cannot be served is refused by the file's header alone, in one line that says what was expected and found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_builder import Tensor
from tiny_models import TinyModel, model_tensors, tiny_gguf, write_tiny

from tqgguf.formats.errors import FormatError, RequestError, TqggufError, UnsupportedModelError
from tqgguf.runtime.models.load import open_model

# Refusals: kind of error (its exit status), what the line says, and what is changed in a sound file.

LLAMA = TinyModel("llama")
W = "blk.1.ffn_up.weight"
REFUSALS = {
    "architecture": (
        UnsupportedModelError,
        r"is 'mamba': expected one of llama, ",
        LLAMA,
        {"general.architecture": "mamba"},
    ),
    "no architecture": (FormatError, r"general\.architecture.* is missing", LLAMA, {"general.architecture": None}),
    "experts": (
        UnsupportedModelError,
        r"llama\.expert_count is 8: mixture-of-experts",
        LLAMA,
        {"llama.expert_count": 8},
    ),
    "soft cap": (UnsupportedModelError, r"logit_softcapping is 30\.0", LLAMA, {"llama.final_logit_softcapping": 30.0}),
    "partial rotary": (
        UnsupportedModelError,
        r"rope\.dimension_count: expected 64 \(whole heads\), found 32",
        LLAMA,
        {"llama.rope.dimension_count": 32},
    ),
    "YaRN": (
        UnsupportedModelError,
        r"expected none or linear, found 'yarn'",
        LLAMA,
        {"llama.rope.scaling.type": "yarn"},
    ),
    "heads per layer": (
        UnsupportedModelError,
        r"head_count_kv differs between layers \(1, 2\)",
        LLAMA,
        {"llama.attention.head_count_kv": np.array([1, 2], np.int32)},
    ),
    "heads do not group": (
        FormatError,
        r"expected a multiple of the 3 KV heads, found 4",
        LLAMA,
        {"llama.attention.head_count_kv": 3},
    ),
    "no layers": (FormatError, r"block_count.*: expected 1 to 4096, found 0", LLAMA, {"llama.block_count": 0}),
    "absurd layers": (
        FormatError,
        r"block_count.*: expected 1 to 4096, found 1000000",
        LLAMA,
        {"llama.block_count": 1000000},
    ),
    "too many layers": (
        FormatError,
        r"tensor blk\.3999\.attn_q\.weight is missing: expected 4000 layers",
        LLAMA,
        {"llama.block_count": 4000},
    ),
    "absurd embedding": (
        FormatError,
        r"token_embd\.weight: expected shape \(288, 2147483647\)",
        LLAMA,
        {"llama.embedding_length": 2**31 - 1},
    ),
    "absurd feed forward": (
        FormatError,
        r"ffn_up\.weight: expected shape \(2000000000, 256\)",
        LLAMA,
        {"llama.feed_forward_length": 2_000_000_000},
    ),
    "absurd heads": (
        FormatError,
        r"attn_q\.weight: expected shape \(131072, 256\)",
        LLAMA,
        {"llama.attention.head_count": 2048},
    ),
    "head count of zero": (
        FormatError,
        r"head_count.*: expected 1 to \d+, found 0",
        LLAMA,
        {"llama.attention.head_count": 0},
    ),
    "epsilon of zero": (
        FormatError,
        r"rms_epsilon.*: expected a number above 0, found 0\.0",
        LLAMA,
        {"llama.attention.layer_norm_rms_epsilon": 0.0},
    ),
    "RoPE base without angles": (
        FormatError,
        r"rope\.freq_base.*: expected 2\.33e-10 to 1\.84e\+19, found ",
        LLAMA,
        {"llama.rope.freq_base": 1e-38},
    ),
    "RoPE factor without angles": (
        FormatError,
        r"rope\.scaling\.factor.*: expected 2\.33e-10 to 4\.29e\+09, found ",
        LLAMA,
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e-38},
    ),
    "head count as text": (
        FormatError,
        r"head_count' is STRING, expected an integer",
        LLAMA,
        {"llama.attention.head_count": "four"},
    ),
    "no context length": (FormatError, r"llama\.context_length' is missing", LLAMA, {"llama.context_length": None}),
    "other vocabulary": (
        FormatError,
        r"token_embd\.weight: expected a row for each of 3 tokens, found 288",
        LLAMA,
        {"tokenizer.ggml.tokens": ["a", "b", "c"]},
    ),
    "windows alone": (
        UnsupportedModelError,
        r"pattern: expected at most 2, the number of layers, found 6",
        TinyModel("gemma3", window=8),
        {},
    ),
    "irregular windows": (
        UnsupportedModelError,
        r"window layers without a fixed period",
        TinyModel("gemma3", n_layers=3, window=8),
        {"gemma3.attention.sliding_window_pattern": [False, True, True]},
    ),
    "windows per layer": (
        FormatError,
        r"expected a value for each of 2 layers, found 3",
        TinyModel("gemma3", window=8),
        {"gemma3.attention.sliding_window_pattern": [True, False, True]},
    ),
    "qwen2 head size": (
        UnsupportedModelError,
        r"qwen2: expected heads that make up the embedding length 128, found 4 of 64",
        TinyModel("qwen2", hidden_size=128),
        {},
    ),
}
TENSOR_REFUSALS = {
    "missing": (
        FormatError,
        r"tensor blk\.0\.ffn_up\.weight is missing \(1 of 20 are\)$",
        {"blk.0.ffn_up.weight": None},
    ),
    "no embedding": (
        FormatError,
        r"token_embd\.weight is missing; is this a language model\?$",
        {"token_embd.weight": None},
    ),
    "wrong shape": (
        FormatError,
        r"blk\.0\.ffn_up\.weight: expected shape \(256, 256\), found \(128, 256\)$",
        {"blk.0.ffn_up.weight": np.ones((128, 256), np.float32)},
    ),
    "norm shape": (
        FormatError,
        r"blk\.0\.attn_norm\.weight: expected shape \(256,\), found \(255,\)$",
        {"blk.0.attn_norm.weight": np.ones(255, np.float32)},
    ),
    "unknown extra": (
        UnsupportedModelError,
        r"tensor 'blk\.0\.attn_sinks\.weight' has no place in mlx-lm's llama",
        {"blk.0.attn_sinks.weight": np.ones(4, np.float32)},
    ),
    "bias": (
        UnsupportedModelError,
        r"tensor 'blk\.0\.attn_q\.bias' has no place",
        {"blk.0.attn_q.bias": np.ones(256, np.float32)},
    ),
    "unknown type": (
        UnsupportedModelError,
        r"tensor blk\.1\.ffn_up\.weight is of type 4711 \(newer or fork type\)",
        {W: Tensor((256, 256), 4711, bytes(64))},
    ),
    "undecodable type": (
        UnsupportedModelError,
        r"tensor blk\.0\.ffn_up\.weight is of I32, which cannot be decoded",
        {"blk.0.ffn_up.weight": np.ones((256, 256), np.int32)},
    ),
    "factors": (
        FormatError,
        r"rope_freqs\.weight: expected shape \(32,\), found \(16,\)",
        {"rope_freqs.weight": np.ones(16, np.float32)},
    ),
}


def check_refusal(path: Path, kind: type[TqggufError], line: str) -> None:
    with pytest.raises(kind, match=line) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == (2 if issubclass(kind, RequestError) else 1)
    assert isinstance(caught.value, RequestError) == issubclass(kind, RequestError)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_metadata_rule_out_is_refused_in_one_line(tmp_path, name):
    kind, line, model, metadata = REFUSALS[name]
    check_refusal(write_tiny(tmp_path / "tiny.gguf", model, metadata), kind, line)


@pytest.mark.parametrize("name", TENSOR_REFUSALS)
def test_what_the_tensors_rule_out_is_refused_in_one_line(tmp_path, name):
    kind, line, tensors = TENSOR_REFUSALS[name]
    check_refusal(write_tiny(tmp_path / "tiny.gguf", LLAMA, None, tensors), kind, line)


def test_unequal_head_sizes_of_k_and_v_are_refused(tmp_path):
    values = model_tensors(TinyModel("llama", head_dim=32))
    tensors = {f"blk.{i}.attn_v.weight": values[f"blk.{i}.attn_v.weight"] for i in (0, 1)}
    path = write_tiny(tmp_path / "tiny.gguf", LLAMA, {"llama.attention.value_length": 32}, tensors)
    check_refusal(path, UnsupportedModelError, r"llama: K heads of 64 and V heads of 32 values are not supported yet$")


def test_factors_of_an_architecture_that_has_none_are_refused(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf", TinyModel("qwen3"), None, {"rope_freqs.weight": np.ones(32, np.float32)})
    check_refusal(path, UnsupportedModelError, r"'rope_freqs\.weight' has no place in mlx-lm's qwen3")


@pytest.mark.parametrize("share", (0.01, 0.3, 0.7, 0.999))
def test_a_truncated_model_is_refused_in_one_line(tmp_path, share):
    data = tiny_gguf(LLAMA)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    check_refusal(path, FormatError, r"tiny\.gguf: .*(truncated|ends|beyond|left)")


def test_damaged_weights_are_one_line_when_they_are_read(tmp_path):
    damaged = np.full((256, 256), np.nan, np.float32)
    infinite = Tensor((256, 256), 8, np.full(256 * 8 * 17, 0x7C00, "<u2").tobytes())  # Q8_0, every scale infinite
    for tensor in (damaged, infinite):
        model = open_model(write_tiny(tmp_path / "tiny.gguf", LLAMA, None, {W: tensor}))
        for form in ("dense", "packed"):
            with pytest.raises(FormatError, match=r"tensor blk\.1\.ffn_up\.weight: expected finite values"):
                model.load(form=form)


def test_a_missing_file_is_one_line(tmp_path):
    check_refusal(tmp_path / "nowhere.gguf", TqggufError, r"nowhere\.gguf: cannot be opened: No such file")
