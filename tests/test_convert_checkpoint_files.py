"""`tqgguf convert` of Hugging Face checkpoints: which files are read, and what their tensors and settings must be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import CASES, checkpoint_tensors, write_checkpoint, write_safetensors
from tiny_folders import write_json

from tqgguf.cli.main import main
from tqgguf.conversion.files import judge_planned
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.write import text_entry, u32_entry

CASE = CASES["llama"]
INDEX = "a/model.safetensors.index.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


def write_index(*, place: str = "model-1.safetensors", **more: Any) -> None:
    write_json(Path(INDEX), {"weight_map": {**dict.fromkeys(checkpoint_tensors(CASE), place), **more}})


def put(name: str, *shape: int, path: str = "a/model.safetensors") -> None:
    """The checkpoint's tensors, one of them (a new one perhaps) zeros of that shape."""
    write_safetensors(Path(path), {**checkpoint_tensors(CASE), name: np.zeros(shape, np.float32)}, CASE.dtype)


def test_the_index_says_which_files_are_read() -> None:
    write_checkpoint(Path("a"), CASE)
    assert main(["convert", "a", "expected.gguf"]) == 0
    os.rename("a/model.safetensors", "a/model-1.safetensors")
    write_index()
    stale = {name: 0 * values for name, values in checkpoint_tensors(CASE).items()}
    write_safetensors(Path("a/model.safetensors"), stale, CASE.dtype)
    assert main(["convert", "a", "b.gguf"]) == 0
    assert Path("b.gguf").read_bytes() == Path("expected.gguf").read_bytes()


def test_without_an_index_the_whole_file_is_read_and_no_part() -> None:
    write_checkpoint(Path("a"), CASE)
    assert main(["convert", "a", "expected.gguf"]) == 0
    Path("a/model-00001-of-00002.safetensors").write_bytes(b"of another time")
    assert main(["convert", "a", "b.gguf"]) == 0
    assert Path("b.gguf").read_bytes() == Path("expected.gguf").read_bytes()


def two_parts() -> None:
    os.rename("a/model.safetensors", "a/model-1.safetensors")
    put("model.norm.weight", 128, path="a/model-2.safetensors")


def map_to(weight_map: Any) -> None:
    write_json(Path(INDEX), {"weight_map": weight_map})


def refused(damage: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(Path("a"), CASE)
    damage()
    assert main(["convert", "a", "b.gguf"]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert "b.gguf" not in os.listdir(".")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: map_to(5), "weight_map: expected an object of tensors' names and their files' names, found 5"),
        (lambda: map_to({"model.norm.weight": 5}), "weight_map: expected an object of tensors' names"),
        (lambda: write_index(place="../out.safetensors"), "expected names of files in the folder, found '../out"),
        (lambda: write_index(place="/out.safetensors"), "expected names of files in the folder, found '/out"),
        (lambda: write_index(), "'model-1.safetensors' is missing (1 of 1 files are)"),
        (
            lambda: write_index(place="model.safetensors", other="model.safetensors"),
            "a/model.safetensors: expected tensor 'other', as model.safetensors.index.json says, found none",
        ),
        (two_parts, "expected each tensor once, found 'model.embed_tokens.weight' in model-1.safetensors and"),
        (
            lambda: put("language_model.model.norm.weight", 128),
            "expected each tensor once, found 'model.norm.weight' in model.safetensors and 'language_model.model.norm",
        ),
        (
            lambda: put("transformer.norm_f.weight", 128),
            "expected one tensor for output_norm.weight, found 'model.norm",
        ),
    ],
)
def test_a_file_or_tensor_that_is_not_where_it_should_be_is_refused(
    damage: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(damage, message, capsys)


LAYER = "model.layers.1."


def configure(**entries: Any) -> None:
    path = Path("a/config.json")
    write_json(path, {**json.loads(path.read_text()), **entries})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda: put(f"{LAYER}self_attn.q_proj.weight", 128, 128),
            "expected shape 256 x 128 by config.json, found 128",
        ),
        (
            lambda: put(f"{LAYER}self_attn.k_proj.weight", 256, 128),
            "expected shape 128 x 128 by config.json, found 256",
        ),
        (
            lambda: put(f"{LAYER}self_attn.o_proj.weight", 256, 128),
            "expected shape 128 x 256 by config.json, found 256",
        ),
        (lambda: put(f"{LAYER}mlp.up_proj.weight", 96), "expected shape 96 x 128 by config.json, found 96"),
        (lambda: put(f"{LAYER}mlp.up_proj.weight", 96, 0), "expected shape 96 x 128 by config.json, found 96 x 0"),
        (
            lambda: put(f"{LAYER}self_attn.q_proj.weight"),
            "q_proj.weight: expected shape 256 x 128 by config.json, found a",
        ),
        (lambda: put("model.norm.weight", 128, 1), "expected shape 128 by config.json, found 128 x 1"),
        (lambda: put("model.embed_tokens.weight"), "expected shape any x 128 by config.json, found a scalar"),
        (lambda: put("lm_head.weight", 200, 128), "lm_head.weight: expected 288 rows, one a token, found 200"),
        (lambda: configure(num_attention_heads=3), "num_key_value_heads: expected a divisor of 3 heads, found 2"),
        (lambda: configure(intermediate_size=97), "mlp.gate_proj.weight: expected shape 97 x 128 by config.json"),
        (lambda: configure(rope_theta=0), "rope_theta: expected a number above 0, found 0"),
        (lambda: configure(rope_theta=1e30), "rope_theta: expected 2.33e-10 to 1.84e+19, found 1e+30"),
        (lambda: configure(rms_norm_eps=-1.0), "rms_norm_eps: expected a number above 0, found -1.0"),
        (
            lambda: configure(rope_scaling={"rope_type": "linear", "factor": 0}),
            "factor: expected a number above 0, found 0",
        ),
    ],
)
def test_what_the_model_could_not_be_run_with_is_refused(
    damage: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(damage, message, capsys)


def test_what_validate_would_refuse_is_refused_before_it_is_written() -> None:
    entries = [text_entry("general.architecture", "llama"), u32_entry("llama.block_count", 0)]
    with pytest.raises(FormatError, match=r"^a: a GGUF of it could not be used: .*block_count': expected 1 to 4096"):
        judge_planned("a", entries, [])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("generation_config.json", '{"temperature": "hot"}', "expected F32 for general.sampling.temp, found 'hot'"),
        ("generation_config.json", '{"top_k": 99999999999}', "expected I32 for general.sampling.top_k, found 99999999"),
        ("generation_config.json", "[1]", "README.md or its like cannot be read"),
        ("README.md", "---\nlicense: [1, 2]\n---\n", "README.md or its like cannot be read: sequence item 0"),
        ("README.md", "---\nlicense: {a: 3}\n---\n", "expected STRING for general.license, found {'a': 3}"),
        ("README.md", "---\ntags: [1, x]\n---\n", "expected ARRAY for general.tags, found [1, 'x']"),
    ],
)
def test_a_description_of_other_types_is_refused(
    name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(lambda: Path(f"a/{name}").write_text(text), message, capsys)
