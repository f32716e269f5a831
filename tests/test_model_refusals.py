"""What cannot be served is refused by the file's header alone, in one line that says what was expected and found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import F32, I32, U32, Tensor, Typed
from mlx.utils import tree_flatten
from tiny_models import ORACLE_CASES, TinyModel, model_tensors, tiny_gguf, write_tiny

import tqgguf
from tqgguf.cli.main import main
from tqgguf.formats.cursor import raise_errors
from tqgguf.formats.errors import FormatError, RequestError, TqggufError, UnsupportedModelError
from tqgguf.formats.gguf.model_keys import SERVED
from tqgguf.formats.gguf.model_rules import judge_tensors
from tqgguf.formats.gguf.parse import parse
from tqgguf.formats.models.loading import tensor_shapes
from tqgguf.runtime.models.architectures import ARCHITECTURES, build_model, parameter_names
from tqgguf.runtime.models.load import open_model
from tqgguf.text.chat import ChatTemplate

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
        r"tensor 'blk\.0\.ffn_up\.weight' is missing, which such a model needs$",
        {"blk.0.ffn_up.weight": None},
    ),
    "no embedding": (
        FormatError,
        r"token_embd\.weight is missing; is this a language model\?$",
        {"token_embd.weight": None},
    ),
    "wrong shape": (
        FormatError,
        r"blk\.0\.ffn_up\.weight': expected shape 256 x 256 by the metadata, found 256 x 128 \(",
        {"blk.0.ffn_up.weight": np.ones((128, 256), np.float32)},
    ),
    "norm shape": (
        FormatError,
        r"blk\.0\.attn_norm\.weight': expected shape 256 by the metadata, found 255 \(",
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
        r"rope_freqs\.weight': expected shape 32 by the metadata, found 16 \(",
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


# What is wrong with a whole model, whoever looks: model, metadata, tensors.
DAMAGES: dict[str, tuple[TinyModel, dict[str, Any], dict[str, Any]]] = {
    **{
        f"norm {name}": (TinyModel(architecture, n_layers=1), {}, {name: np.ones(size, np.float32)})
        for architecture, name, size in (
            ("llama", "output_norm.weight", 3),
            ("llama", "blk.0.ffn_norm.weight", (256, 1)),
            ("qwen3", "blk.0.attn_q_norm.weight", 63),
            ("qwen3", "blk.0.attn_k_norm.weight", 1),
            ("gemma3", "blk.0.post_attention_norm.weight", 255),
            ("gemma3", "blk.0.post_ffw_norm.weight", 257),
        )
    },
    "bias of another size": (TinyModel("qwen2"), {}, {"blk.1.attn_k.bias": np.ones(127, np.float32)}),
    "bias as a matrix": (TinyModel("qwen2"), {}, {"blk.1.attn_v.bias": np.ones((128, 1), np.float32)}),
    "no bias": (TinyModel("qwen2"), {}, {"blk.0.attn_q.bias": None}),
    "no bias of K": (TinyModel("qwen2"), {}, {"blk.1.attn_k.bias": None}),
    "no norm of heads": (TinyModel("qwen3"), {}, {"blk.1.attn_q_norm.weight": None}),
    "output of another size": (TinyModel(tied=False), {}, {"output.weight": np.ones((287, 256), np.float32)}),
    **{
        f"factors of {value}": (LLAMA, {}, {"rope_freqs.weight": np.full(32, value, np.float32)})
        for value in (0, -1, 1e-38, 1e38, np.inf, np.nan)
    },
    "one factor of 0": (LLAMA, {}, {"rope_freqs.weight": np.r_[np.ones(31), 0].astype(np.float32)}),
    "factors as a matrix": (LLAMA, {}, {"rope_freqs.weight": np.ones((1, 32), np.float32)}),
    "no vocabulary": (LLAMA, {"tokenizer.ggml.tokens": None, "tokenizer.ggml.token_type": None}, {}),
    "no tokenizer": (LLAMA, {"tokenizer.ggml.model": None}, {}),
    "no merges": (LLAMA, {"tokenizer.ggml.merges": None}, {}),
    "merge without a space": (LLAMA, {"tokenizer.ggml.merges": ["t h", "th"]}, {}),
    "merge of a space": (LLAMA, {"tokenizer.ggml.merges": ["t "]}, {}),
    "merge that is not UTF-8": (LLAMA, {"tokenizer.ggml.merges": ["t \udcff"]}, {}),
    "token twice": (LLAMA, {"tokenizer.ggml.tokens": [f"t{min(i, 286)}" for i in range(288)]}, {}),
    "byte token without a byte": (LLAMA, {"tokenizer.ggml.token_type": Typed(I32, [6] * 288)}, {}),
    "score that is no number": (
        LLAMA,
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": Typed(F32, [np.nan] * 288)},
        {},
    ),
    "epsilon below 0": (LLAMA, {"llama.attention.layer_norm_rms_epsilon": -1e-5}, {}),
    "RoPE base of 0": (LLAMA, {"llama.rope.freq_base": 0.0}, {}),
    "RoPE factor beyond all": (LLAMA, {"llama.rope.scaling.factor": 1e30}, {}),
    "RoPE factor below 0": (LLAMA, {"llama.rope.scaling.factor": -4.0}, {}),
    "layers as an array": (LLAMA, {"llama.block_count": Typed(U32, [2])}, {}),
    "RoPE base as an array": (LLAMA, {"llama.rope.freq_base": Typed(F32, [10000.0])}, {}),
    **{
        f"{key} as an array": (LLAMA, {key: [value]}, {})
        for key, value in (
            ("general.architecture", "llama"),
            ("tokenizer.chat_template", "{{ messages }}"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "gpt-2"),
        )
    },
    "flag as a number": (LLAMA, {"tokenizer.ggml.add_bos_token": 1}, {}),
    **{
        f"template {source[:30]}": (LLAMA, {"tokenizer.chat_template": source}, {})
        for source in (
            "{% for m in messages %}", "{{ messages[0] ", "{% endif %}", "{% nothing %}", "{{ 'a }}",
            "{% generation %}", "{{" + "(" * 5000,
        )
    },
}  # fmt: skip


def damaged(path: Path, name: str) -> Path:
    model, metadata, tensors = DAMAGES[name]
    return write_tiny(path, model, metadata, tensors)


def load(path: Path) -> None:
    """All that a chat does before it reads a weight, and the reading."""
    opened = open_model(path)
    ChatTemplate.of(opened.tokenizer).render([{"role": "user", "content": "a"}])
    opened.load()


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.filterwarnings("error")
def test_what_the_loader_refuses_validate_finds_and_convert_refuses(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(tmp_path / "tiny.gguf", name)
    with pytest.raises(TqggufError):
        load(path)
    _validate_and_convert_refuse(path, capsys)


@pytest.mark.parametrize("name", [name for name, case in REFUSALS.items() if case[0] is FormatError])
def test_so_do_they_with_what_metadata_rule_out(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, model, metadata = REFUSALS[name]
    path = write_tiny(tmp_path / "tiny.gguf", model, metadata)
    _validate_and_convert_refuse(path, capsys, ("folder",) if name == "no architecture" else TARGETS)


TARGETS = ("other.gguf", "folder")


def _validate_and_convert_refuse(
    path: Path, capsys: pytest.CaptureFixture[str], targets: tuple[str, ...] = TARGETS
) -> None:
    errors = [finding for finding in tqgguf.validate(path) if finding.is_error]
    assert errors and all(finding.message.count("\n") == 0 and len(finding.message) < 500 for finding in errors)
    for target in map(path.with_name, targets):
        capsys.readouterr()
        assert main(["convert", str(path), str(target)]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and not target.exists(), err


def test_what_the_rules_know_of_tensors_is_what_the_classes_have() -> None:
    """The table of names and shapes against the parameters of mlx-lm's classes, and which architectures there are."""
    assert set(SERVED) == set(ARCHITECTURES)
    for model in ORACLE_CASES.values():
        data = tiny_gguf(model)
        tensors = {name for name in model_tensors(model) if name not in ("output.weight", "rope_freqs.weight")}
        parsed = parse(data, "tiny.gguf", raise_errors)
        for name in tensors:
            lacking = replace(parsed, tensors=[tensor for tensor in parsed.tensors if tensor.name != name])
            assert [(defect.code, defect.tensor) for defect in judge_tensors([lacking])] == [("tensor-missing", name)]
        for tensor in parsed.tensors:
            other = replace(tensor, dims=(*tensor.dims[:-1], tensor.dims[-1] + 1))
            changed = replace(parsed, tensors=[other if each is tensor else each for each in parsed.tensors])
            assert [(d.code, d.tensor) for d in judge_tensors([changed])] == [("tensor-shape", tensor.name)]


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_the_tensors_that_are_expected_are_the_parameters_of_the_class(name: str, tmp_path: Path) -> None:
    config = open_model(write_tiny(tmp_path / "tiny.gguf", ORACLE_CASES[name])).config
    parameters = dict(tree_flatten(build_model(config).parameters()))
    expected = {tensor: parameters[path].shape for tensor, path in parameter_names(config, parameters).items()}
    found = tensor_shapes(config)
    assert found.pop("rope_freqs.weight", None) == ((config.rope_dim // 2,) if config.architecture == "llama" else None)
    assert found == expected


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
