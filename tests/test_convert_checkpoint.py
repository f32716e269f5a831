"""`tqgguf convert` of Hugging Face checkpoints: tensors and metadata as llama.cpp's converter makes them, logits as
mlx-lm has them from the checkpoint itself, and what is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from tiny_checkpoints import CASES, PIECES, Case, checkpoint_tensors, pieces_file, write_checkpoint, write_safetensors
from tiny_folders import byte_level, write_json
from tokenizers import Regex, pre_tokenizers

from tqgguf.cli.main import main
from tqgguf.conversion.hf_vocabulary import find_pretokenizer
from tqgguf.conversion.sentencepiece_model import PieceType, read_pieces
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.runtime.models.load import open_model

RECORDED = json.loads((Path(__file__).parent / "data" / "converted_checkpoints.json").read_text())
STEPS = "tqgguf.convert.steps"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


def digest(value: Any) -> Any:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list) and len(value) > 16:
        return "sha256:" + hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
    return value


def test_queries_and_keys_stay_as_they_are_where_rope_turns_neighbours_already() -> None:
    write_checkpoint(Path("a"), CASES["llama"], rope_traditional=True)
    assert main(["convert", "a", "a.gguf", "--type", "f32"]) == 0
    tensors = checkpoint_tensors(CASES["llama"])
    with open_gguf("a.gguf") as file:
        for ours, theirs in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
            stored = tensors[f"model.layers.0.self_attn.{theirs}.weight"]
            np.testing.assert_allclose(file.array(f"blk.0.{ours}.weight"), stored, atol=0.01 * np.abs(stored).max())


@pytest.mark.parametrize("name", CASES)
def test_metadata_and_tensors_are_those_of_llama_cpps_converter(name: str) -> None:
    write_checkpoint(Path(name), CASES[name])
    assert main(["convert", name, "a.gguf"]) == 0
    recorded = RECORDED[name]
    with open_gguf("a.gguf") as file:
        found = {key: [str(file.metadata_type(key)), digest(value)] for key, value in file.metadata.items()}
        assert found.pop(STEPS)[1][0].endswith(f"from {name}, weights to {CASES[name].outtype}")
        assert found == recorded["metadata"]
        for tensor, info in file.tensors.items():
            raw = hashlib.sha256(file.raw(tensor)).hexdigest()
            assert [info.type_name, list(info.shape), raw] == recorded["tensors"][tensor], tensor
        assert set(file.tensors) == set(recorded["tensors"])
    assert main(["validate", "a.gguf"]) == 0


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_that_mlx_lm_has_of_the_checkpoint(name: str) -> None:
    case = CASES[name]
    write_checkpoint(Path("a"), case, rope_scaling=None if name == "qwen3" else case.config.get("rope_scaling"))
    assert main(["convert", "a", "a.gguf", "--type", "f32"]) == 0
    model, _ = load_model(Path("a"))
    model.set_dtype(mx.float32)
    tokens = mx.array([[5, 17, 260, 3, 99, 42] * 15])
    expected = np.array(model(tokens))
    found = np.array(open_model("a.gguf").load(form="dense").model(tokens))
    limit = 2e-3 if name == "gemma3-f16" else 1e-4  # the converter adds 1 to its norms in float16
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_a_checkpoint_in_parts_becomes_a_gguf_in_parts_of_any_type() -> None:
    case = CASES["llama"]
    write_checkpoint(Path("a"), case)
    assert main(["convert", "a", "whole.gguf", "--type", "q8_0"]) == 0
    tensors = checkpoint_tensors(case)
    os.unlink("a/model.safetensors")
    half = len(tensors) // 2
    for i, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        write_safetensors(Path(f"a/model-{i + 1}.safetensors"), {name: tensors[name] for name in names}, case.dtype)
    places = {name: f"model-{1 + (i >= half)}.safetensors" for i, name in enumerate(tensors)}
    write_json(Path("a/model.safetensors.index.json"), {"weight_map": places})
    assert main(["convert", "a", "parts.gguf", "--type", "q8_0", "--split-max-size", "1M"]) == 0
    with open_gguf("whole.gguf") as whole, open_gguf("parts-00001-of-00001.gguf") as parts:
        assert list(whole.tensors) == list(parts.tensors)
        assert all(whole.raw(name).tobytes() == parts.raw(name).tobytes() for name in whole.tensors)
        assert whole.tensors["blk.0.ffn_up.weight"].type_name == "Q8_0"
        assert whole.tensors["blk.0.attn_norm.weight"].type_name == "F32"


def test_of_a_model_that_also_sees_the_language_part_is_taken() -> None:
    case = CASES["gemma3"]
    write_checkpoint(Path("text"), case)
    config = json.loads(Path("text/config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    Path("sees").mkdir()
    write_json(Path("sees/config.json"), outer)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(f"text/{name}", f"sees/{name}")
    tensors = {f"language_model.{name}": values for name, values in checkpoint_tensors(case).items()}
    tensors["vision_tower.vision_model.embeddings.weight"] = np.zeros((4, 4), np.float32)
    write_safetensors(Path("sees/model.safetensors"), tensors, case.dtype)
    for name in ("text", "sees"):
        assert main(["convert", name, f"{name}.gguf"]) == 0
    with open_gguf("text.gguf") as text, open_gguf("sees.gguf") as sees:
        assert list(text.tensors) == list(sees.tensors)
        kept = ("gemma3.", "tokenizer.")
        assert all(digest(sees.metadata[k]) == digest(v) for k, v in text.metadata.items() if k.startswith(kept))


def test_nothing_but_our_own_lines_is_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(Path("a"), CASES["llama"])
    edit("tokenizer.json", post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}] * 2})
    Path("a/README.md").write_text("---\nbase_model: [1, 2\n---\n")
    assert main(["convert", "a", "a.gguf"]) in (0, 1)
    assert all(line.startswith("tqgguf: ") for line in capfd.readouterr().err.splitlines())


WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("splits", "ignore_merges", "expected"),
    [
        ((Regex(rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{REST}"),), True, "llama-bpe"),  # of Llama 3's tokenizer.json
        ((Regex(rf"{CONTRACTION}|{WORD}|\p{{N}}|{REST}"),), False, "qwen2"),  # of Qwen 2.5's and 3's
        ((), False, "gpt-2"),
        (("digits",), False, "smollm"),
    ],
)
def test_pre_tokenizers_are_known_by_what_they_do(splits: tuple[Any, ...], ignore_merges: bool, expected: str) -> None:
    tokenizer = byte_level()
    parts = [
        pre_tokenizers.Digits(individual_digits=True) if split == "digits" else pre_tokenizers.Split(split, "isolated")
        for split in splits
    ]
    has_own = bool(splits) and splits[0] != "digits"
    byte_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_own)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_letters])
    tokenizer.save("tokenizer.json")
    assert find_pretokenizer(Path("tokenizer.json"), ignore_merges) == expected


def test_a_damaged_tokenizer_model_is_refused_wherever_it_ends() -> None:
    data = pieces_file(PIECES[:8])
    path = Path("tokenizer.model")
    path.write_bytes(data)
    pieces = read_pieces(path)
    assert [(piece.text, piece.score, int(piece.type)) for piece in pieces] == list(PIECES[:8])
    assert pieces[3].type is PieceType.UNKNOWN
    n_refused = 0
    for end in range(len(data)):
        path.write_bytes(data[:end])
        try:
            assert len(read_pieces(path)) <= 8
        except FormatError:
            n_refused += 1
    assert n_refused > len(data) // 2
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_pieces(path)
        except FormatError as error:
            assert "expected a SentencePiece model" in str(error)


def edit(name: str, **entries: Any) -> None:
    path = Path("a") / name
    kept = {**json.loads(path.read_text()), **entries}
    write_json(path, {key: value for key, value in kept.items() if value is not None})


def drop(case: Case, name: str) -> None:
    tensors = checkpoint_tensors(case)
    del tensors[name]
    write_safetensors(Path("a/model.safetensors"), tensors, case.dtype)


def add(case: Case, name: str) -> None:
    write_safetensors(
        Path("a/model.safetensors"), {**checkpoint_tensors(case), name: np.zeros((2, 2), np.float32)}, "F32"
    )


GEMMA, LLAMA = CASES["gemma3"], CASES["llama"]


@pytest.mark.parametrize(
    ("case", "damage", "argv", "status", "message"),
    [
        (LLAMA, lambda: edit("config.json", architectures=["MambaForCausalLM"]), (), 2, "'MambaForCausalLM' is not"),
        (LLAMA, lambda: edit("config.json", architectures=None), (), 1, "expected the name of a model class"),
        (LLAMA, lambda: edit("config.json", quantization={"bits": 4}), (), 2, "weights that mlx has quantised"),
        (LLAMA, lambda: edit("config.json", num_local_experts=8), (), 2, "a checkpoint with experts is not converted"),
        (LLAMA, lambda: edit("config.json", hidden_size=None), (), 1, "expected shape any x 4096 by config.json"),
        (LLAMA, lambda: edit("config.json", rms_norm_eps="x"), (), 1, "rms_norm_eps: expected a number, found 'x'"),
        (LLAMA, lambda: edit("config.json", rope_scaling={"type": "dynamic"}), (), 2, "rope_type 'dynamic'"),
        (LLAMA, lambda: edit("config.json", vocab_size=300), (), 1, "expected 300 rows, one a token, found 288"),
        (LLAMA, lambda: edit("config.json", vocab_size=280), (), 1, "expected at most 280 tokens"),
        (LLAMA, lambda: edit("tokenizer.json", model={"type": "Unigram"}), (), 2, "expected a byte-level BPE"),
        (LLAMA, lambda: edit("tokenizer.json", model=3), (), 1, "the tokenizer's files cannot be read"),
        (LLAMA, lambda: drop(LLAMA, "model.layers.1.mlp.up_proj.weight"), (), 1, "no tensor for blk.1.ffn_up.weight"),
        (LLAMA, lambda: add(LLAMA, "model.layers.0.other.weight"), (), 2, "has no place in a GGUF of llama"),
        (LLAMA, lambda: os.unlink("a/model.safetensors"), (), 1, "expected weights in model*.safetensors, found none"),
        (GEMMA, lambda: os.unlink("a/tokenizer.model"), (), 1, "expected a tokenizer.model in the model folder"),
        (LLAMA, lambda: None, ("a/b.gguf",), 2, "a/b.gguf: is inside the folder to be converted"),
        (LLAMA, lambda: None, ("b",), 2, "a folder becomes a GGUF"),
        (LLAMA, lambda: None, ("b.gguf", "-ctk", "q8_0"), 2, "-ctk: has no effect where a, a Hugging Face folder"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_nothing_is_written(
    case: Case, damage: Any, argv: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(Path("a"), case)
    damage()
    assert main(["convert", "a", *(argv or ("b.gguf",))]) == status
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert os.listdir(".") == ["a"]
