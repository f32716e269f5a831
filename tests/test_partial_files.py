"""What can be said of files that are not whole, or no models: their header is read, and what they are is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_builder import build_gguf
from inspecting import as_json, facts, shown
from tiny_models import TinyModel, tiny_gguf, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import open_gguf

MODEL = TinyModel(n_layers=2)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A download that ended within the tensors."""
    whole = tiny_gguf(MODEL)
    with open_gguf(write_tiny(tmp_path / "whole.gguf", MODEL)) as file:
        first = next(iter(file.tensors.values()))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: first.offset + first.n_bytes + 8])
    return path


def test_a_cut_model_is_inspected_and_said_to_be_cut(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen, whole = facts(shown(capsys, cut)), facts(shown(capsys, cut.with_name("whole.gguf")))
    assert seen["note"].startswith("truncated in the tensor data: tensor ")
    assert {label: fact for label, fact in seen.items() if label != "note"} == whole


def test_a_cut_model_is_planned(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for path in (cut, cut.with_name("whole.gguf")):
        assert main(["plan", "-m", str(path), "--memory", "1G", "--json"]) == 0
        plans.append({**json.loads(capsys.readouterr().out), "model": None})
    assert plans[0].pop("notes")[0].startswith("truncated in the tensor data: tensor ")
    assert plans[1].pop("notes") == []
    assert plans[0] == plans[1]


def test_of_a_cut_model_nothing_that_is_missing_can_be_read(cut: Path) -> None:
    with open_gguf(cut, even_cut=True) as file:
        first, *_, last = file.tensors
        assert len(file.raw(first)) == file.tensors[first].n_bytes
        with pytest.raises(GgufError, match="truncated in the tensor data"):
            file.raw(last)
    with pytest.raises(GgufError, match="truncated in the tensor data"):
        open_gguf(cut)


def test_a_cut_model_is_one_finding_with_the_size_that_it_should_have(
    cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n_tensors = len(open_gguf(cut, even_cut=True).tensors)
    assert main(["validate", str(cut)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "TQ" in line]
    assert f", {n_tensors - 2} more behind it, expected a file of at least" in line
    expected = int(line.partition("at least ")[2].partition(" ")[0])
    assert 0 <= cut.with_name("whole.gguf").stat().st_size - expected < 32  # the padding of the last tensor


def test_a_cut_snapshot_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.gguf"
    path.write_bytes(tiny_gguf(MODEL, {"general.type": "kv-snapshot"})[:-8000])
    assert "truncated in the tensor data" in shown(capsys, path, status=1)


PURPOSES = {
    "adapter": "a LoRA adapter, to be used beside a model",
    "mmproj": "a projector of images or sound, to be used beside a model",
    "imatrix": "an importance matrix, for quantising a model",
    "vectors": "a GGUF of type 'vectors'",
}


@pytest.mark.parametrize("said", PURPOSES)
def test_a_file_of_another_purpose_is_named_by_it(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(build_gguf({"general.type": said, "general.architecture": "llama"}, {}))
    assert facts(shown(capsys, path))["purpose"] == PURPOSES[said]
    assert as_json(capsys, path)["kind"] == "gguf"
    for verb in (["run", "-p", "x"], ["plan"]):
        assert main([*verb, "-m", str(path)]) == 1
        assert f"{path}: expected a model, found {PURPOSES[said]}" in capsys.readouterr().err
