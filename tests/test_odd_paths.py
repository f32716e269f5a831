"""A path means itself, whatever characters are in it: none of them is read as a pattern."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from inspecting import as_json
from mlx.utils import tree_flatten
from tiny_checkpoints import CASES, write_checkpoint
from tiny_folders import write_folder
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.runtime.models.load import open_model

ODD = ["a[1]", "[a]1", "a[!2]", "a*", "a?", "a[", "**", "a[]1]", "a]", "{a,b}1", "%s{}", "~a", "$HOME"]
"""Names of which several, as patterns, mean the folder a1."""


def weights(folder: Path) -> dict[str, mx.array]:
    return dict(tree_flatten(open_model(folder).load(form="dense").model.parameters()))


@pytest.mark.parametrize("name", ODD)
def test_a_folder_is_loaded_and_not_its_neighbour(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_folder(tmp_path / "a1", "qwen3")
    folder = write_folder(tmp_path / name)
    stored = mx.load(str(folder / "model.safetensors"))
    found = weights(folder)
    assert set(found) == set(stored) and all(mx.array_equal(found[key], stored[key]) for key in stored)
    assert open_model(folder).fingerprint != open_model(other).fingerprint
    n_bytes = sum(array.nbytes for array in stored.values())
    assert as_json(capsys, folder)["tensors"]["parameters"] * 4 == n_bytes
    assert main(["plan", "-m", str(folder), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["file_weights"] == n_bytes


@pytest.mark.parametrize("name", ODD[:4])
def test_so_is_one_below_a_folder_of_such_a_name(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "a1" / "model", "qwen3")
    folder = write_folder(tmp_path / name / "model")
    assert set(weights(folder)) == set(mx.load(str(folder / "model.safetensors")))


@pytest.mark.parametrize("name", ODD[:4])
def test_files_and_prompt_caches_of_such_names_are_written_and_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / name
    place.mkdir()
    (tmp_path / "a1").mkdir()
    model = write_tiny(place / f"{name}.gguf", TinyModel())
    argv = ["run", "-m", str(model), "-p", "hello", "-n", "2", "-no-cnv", "--temp", "0"]
    assert main([*argv, "--prompt-cache", str(place / f"{name}.kv.gguf")]) == 0
    assert main([*argv, "--prompt-cache", str(place / f"{name}.kv.gguf")]) == 0
    assert "hello" in capsys.readouterr().out
    assert main(["validate", str(place)]) == 0
    assert main(["convert", str(model), str(place / "mlx")]) == 0
    assert set(weights(place / "mlx")) and not list((tmp_path / "a1").iterdir())


@pytest.mark.parametrize("name", ODD[:4])
def test_a_checkpoint_in_such_a_folder_is_converted(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / name, CASES["llama"])
    assert main(["convert", str(folder), str(tmp_path / "out.gguf")]) == 0
    with open_gguf(tmp_path / "out.gguf") as file:
        assert np.isfinite(file.array("output_norm.weight")).all()
