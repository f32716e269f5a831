"""`tqgguf convert` of a GGUF to a folder for mlx-lm: mlx_lm.load opens it, and its logits are those of the GGUF."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf_builder import F32, I32, Tensor, Typed
from tiny_models import CHAT_TEMPLATE, TinyModel, model_metadata, model_tensors, write_tiny

from tqgguf.cli.main import main
from tqgguf.conversion.tokenizer_write import _implied_merges, tokenizer_backend
from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.models.vocabulary import Vocabulary, read_vocabulary
from tqgguf.runtime.models.load import open_model
from tqgguf.text.gguf_tokenizer import load_tokenizer

TEXT = "the heron on the water, 1234 <|im_start|>user\n  in  it's"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


def logits(model: Any, ids: list[int]) -> np.ndarray:
    return np.array(model(mx.array([ids])).astype(mx.float32))


@pytest.mark.parametrize(
    ("model", "n_inexact"),
    [
        (TinyModel("llama", weights="Q4_0"), 0),
        (TinyModel("llama", weights="Q8_0", rope_factors=False, tied=False), 0),
        (TinyModel("qwen2", weights="Q8_0"), 0),
        (TinyModel("qwen3", weights="Q5_1", embedding="Q5_0"), 0),
        (TinyModel("gemma3", weights="Q4_1", window=64, window_pattern=2, rope_scale=8.0), 0),
        (TinyModel("llama", weights="F32"), 0),
        (TinyModel("llama", weights="F16"), 5),
        (TinyModel("qwen3", weights="BF16"), 9),
    ],
)
def test_mlx_lm_loads_what_is_written_and_gives_the_same_logits(
    model: TinyModel, n_inexact: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(Path("a.gguf"), model)
    assert main(["convert", "a.gguf", "a", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(not tensor["exact"] for tensor in told["tensors"]) == n_inexact  # the norms of models in half precision
    loaded, tokenizer = mlx_lm.load("a")
    opened = open_model("a.gguf")
    ids = tokenizer.encode(TEXT)
    assert ids == opened.tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token_ids == set(opened.tokenizer.end_of_generation)
    assert np.array_equal(logits(loaded, ids), logits(opened.load(form="packed").model, ids))


def test_an_embedding_in_half_precision_rounds_what_the_first_norm_sees_and_no_more() -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="Q8_0", embedding="F16"))
    assert main(["convert", "a.gguf", "a"]) == 0
    loaded, tokenizer = mlx_lm.load("a")
    ids = tokenizer.encode(TEXT)
    expected = logits(open_model("a.gguf").load(form="packed").model, ids)
    assert np.abs(logits(loaded, ids) - expected).max() < 2e-3 * np.abs(expected).max()


def test_every_packed_value_is_the_ggufs(capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="Q4_1"))
    main(["convert", "a.gguf", "a"])
    tensors = mx.load("a/model.safetensors")
    config = json.loads(Path("a/config.json").read_text())
    names = {"token_embd": "model.embed_tokens", "blk.1.ffn_down": "model.layers.1.mlp.down_proj"}
    for tensor in gguf.GGUFReader("a.gguf").tensors:
        path = names.get(tensor.name.removesuffix(".weight"))
        if path is not None:
            form = config["quantization"][path]
            parts = (tensors[f"{path}.{field}"] for field in ("weight", "scales", "biases"))
            values = mx.dequantize(*parts, group_size=form["group_size"], bits=form["bits"])
            assert np.array_equal(np.array(values), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_a_type_without_an_exact_form_becomes_floats_and_the_report_says_how_far_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = np.random.default_rng(0).integers(0, 255, (256, 210), np.uint8)
    blocks[:, 208:] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    write_tiny(
        Path("a.gguf"),
        TinyModel(weights="Q8_0"),
        tensors={"blk.0.ffn_up.weight": Tensor((256, 256), 14, blocks.tobytes())},
    )
    assert main(["convert", "a.gguf", "a", "--json"]) == 0
    out, err = capsys.readouterr()
    tensor = next(t for t in json.loads(out)["tensors"] if t["name"] == "blk.0.ffn_up.weight")
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q6_K)
    error = np.abs(values.astype(np.float16).astype(np.float32) - values).max()
    assert (tensor["to"], tensor["exact"], tensor["largest_error"]) == ("F16", False, pytest.approx(error))
    assert "1 of Q6_K as F16: a value is off by at most" in err
    mlx_lm.load("a")


def test_a_dry_run_says_what_each_tensor_would_become_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="Q4_1", embedding="F16"))
    assert main(["convert", "a.gguf", "a", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["convert", "a.gguf", "a", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert os.listdir(".") == ["a.gguf"]
    assert "nothing was written" in err
    row = next(line for line in out.splitlines() if line.startswith("blk.1.ffn_up.weight"))
    assert row.split(maxsplit=2) == ["blk.1.ffn_up.weight", "Q4_1", "affine, 4 bits in groups of 32   49,152"]
    assert main(["convert", "a.gguf", "a", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (told["written"], made["written"]) == (False, True)
    assert told["tensors"] == made["tensors"]
    tensors = mx.load("a/model.safetensors")
    assert told["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


def test_llama_3s_rope_factors_become_their_scaling() -> None:
    model = TinyModel(head_dim=64, rope_base=500_000.0, context_length=131_072)
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = (8192 / wavelengths - 1.0) / 3.0
    factors = np.where(
        wavelengths < 2048, 1.0, np.where(wavelengths > 8192, 32.0, 1 / ((1 - smooth) / 32.0 + smooth))
    ).astype(np.float32)
    write_tiny(Path("a.gguf"), model, tensors={"rope_freqs.weight": factors})
    assert main(["convert", "a.gguf", "a"]) == 0
    assert json.loads(Path("a/config.json").read_text())["rope_scaling"]["factor"] == 32.0
    loaded, tokenizer = mlx_lm.load("a")
    ids = tokenizer.encode(TEXT)
    expected = logits(open_model("a.gguf").load(form="packed").model, ids)
    assert np.abs(logits(loaded, ids) - expected).max() < 1e-3


def test_a_template_that_is_not_utf8_is_written_as_what_can_be_read_of_it() -> None:
    write_tiny(Path("a.gguf"), TinyModel(), metadata={"tokenizer.chat_template": b"caf\xe9 {{ messages }}"})
    assert main(["convert", "a.gguf", "folder"]) == 0
    assert mlx_lm.load("folder")[1].chat_template == "caf\ufffd {{ messages }}"


def test_a_sentencepiece_vocabulary_becomes_merges() -> None:
    base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "▁",
        "t",
        "h",
        "e",
        "o",
        "n",
        "w",
        "a",
        "r",
        "▁t",
        "▁th",
        "▁the",
        "he",
        "on",
        "▁on",
        "at",
        "er",
        "ater",
        "▁w",
    ]
    words += ["▁water", "<user>", "▁o"]
    rest = 288 - len(base) - len(words)
    tokens = [*base, *words, *(f"<unused{i}>" for i in range(rest))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), *[5] * rest]
    types[tokens.index("<user>")] = 4
    scores = [0.0] * len(base) + [-float(i) for i in range(len(words))] + [0.0] * rest
    metadata = {
        **{key: None for key in model_metadata(TinyModel()) if key.startswith("tokenizer.")},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(I32, types),
        "tokenizer.ggml.scores": Typed(F32, scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for prefix in (True, False):
        write_tiny(Path("a.gguf"), TinyModel(), metadata={**metadata, "tokenizer.ggml.add_space_prefix": prefix})
        assert main(["convert", "a.gguf", f"a{prefix}"]) == 0
        _, tokenizer = mlx_lm.load(f"a{prefix}")
        ours = open_model("a.gguf").tokenizer
        for text in ("the water on the", "  two  spaces", "<user>the heron ü", "\n\twater"):
            ids = tokenizer.encode(text)
            assert ids == ours.encode(text), text


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (
            ("a.gguf", "a", "--type", "q8_0"),
            2,
            "--type: has no effect where a.gguf, a GGUF of weights, becomes a folder for mlx-lm",
        ),
        (("a.gguf", "a", "--requantise", "--split-max-size", "1G"), 2, "--split-max-size: has no effect where a.gguf"),
        (("a.gguf", "full"), 2, "full: expected the name of a new folder, found one that is not empty"),
        (("a.gguf", "a.gguf", "--to", "mlx-lm"), 2, "a.gguf: expected the name of a new folder, found a file"),
        (("a.gguf", "no/a"), 2, "does not exist; make it first"),
        (("a.gguf", "circle"), 2, "circle: expected the name of a new folder, found a link that leads nowhere"),
        (("gpt2.gguf", "a"), 2, "expected one of llama, qwen2, qwen3, gemma3"),
        (("odd.gguf", "a"), 2, "its factors are of no scaling that config.json could name"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    argv: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(Path("a.gguf"), TinyModel())
    write_tiny(Path("gpt2.gguf"), TinyModel(), metadata={"general.architecture": "gpt2"})
    write_tiny(Path("odd.gguf"), TinyModel(rope_factors=True))
    Path("full/inside").mkdir(parents=True)
    os.symlink("circle", "circle")
    before = sorted(os.listdir("."))
    assert main(["convert", *argv]) == status
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(os.listdir(".")) == before


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (-np.inf, "-inf")])
def test_a_value_that_is_not_finite_is_refused_in_every_float_type(
    dtype: str, value: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "blk.1.attn_q.weight"
    values = model_tensors(TinyModel())[name].copy()
    values[3, 5] = value
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[dtype]).tobytes()
    tensor = Tensor(values.shape, int(gguf.GGMLQuantizationType[dtype]), raw)
    write_tiny(Path("a.gguf"), TinyModel(), None, {name: tensor})
    assert main(["convert", "a.gguf", "a"]) == 1
    expected = f"a.gguf: tensor {name}: expected finite values, found {shown}; the file is damaged"
    assert expected in capsys.readouterr().err
    assert os.listdir(".") == ["a.gguf"]


def plain_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a normal token of two: by score, then the shortest left and right parts."""
    normal = {text for text, i in vocabulary.ids.items() if vocabulary.types[i] in (1, 4)}
    found = [
        (-float(vocabulary.scores[vocabulary.ids[text]]), at, len(text) - at, text[:at], text[at:])
        for text in vocabulary.ids
        for at in range(1, len(text))
        if {text, text[:at], text[at:]} <= normal
    ]
    return [(left, right) for *_, left, right in sorted(found, key=lambda row: row[:3])]


def test_merges_that_scores_imply_are_found_whatever_tokens_begin_with() -> None:
    choose = random.Random(0)
    texts = sorted({"".join(choose.choices("aab\u2581\U0001f642", k=choose.randint(1, 6))) for _ in range(700)})
    choose.shuffle(texts)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [float(choose.randint(-9, 0)) for _ in texts],
        "tokenizer.ggml.token_type": [choose.choice((1, 1, 1, 4, 3)) for _ in texts],
    }
    vocabulary = read_vocabulary(metadata, default_special={})
    found, plain = list(_implied_merges(vocabulary)), plain_merges(vocabulary)
    assert len(plain) > 500 and sorted(found) == sorted(plain)

    def rank(pair: tuple[str, str]) -> tuple[float, int, int]:
        return -float(vocabulary.scores[vocabulary.ids["".join(pair)]]), len(pair[0]), len(pair[1])

    assert list(map(rank, found)) == list(map(rank, plain))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_token_that_is_not_utf_8_is_refused_by_its_id(kind: str) -> None:
    metadata = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "\udcff\udcfe"],
        "tokenizer.ggml.scores": [0.0] * 3,
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UnsupportedModelError, match=r"^tokenizer\.ggml\.tokens: token 2 is not UTF-8 \(b'.xff.xfe'\)"):
        tokenizer_backend(metadata, load_tokenizer(metadata))
