"""What -m can be given, and what is said where that is no model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import build_gguf, write_split
from tiny_models import TinyModel, model_metadata, model_tensors, tiny_gguf, write_tiny

import tqgguf
from tqgguf.cli.main import main
from tqgguf.formats.errors import NO_DOWNLOAD, RequestError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.model_path import model_path
from tqgguf.formats.rules.table import DefectError
from tqgguf.runtime.models.load import open_model

TINY = TinyModel(n_layers=1)


def write_set(folder: Path, name: str = "m", seed: int = 0) -> list[Path]:
    """A split set of three shards."""
    tensors = list(model_tensors(TinyModel(n_layers=1, seed=seed)).items())
    parts = [dict(tensors[i::3]) for i in range(3)]
    return write_split(folder, name, model_metadata(TINY), parts)


def test_a_folder_with_one_whole_set_is_that_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_set(tmp_path)[0]
    (tmp_path / "README.md").write_text("a model")
    assert model_path(tmp_path) == str(first)
    assert open_model(tmp_path).config.n_layers == 1
    for verb in (
        ("run", "-no-cnv", "-p", "a", "-n", "1", "-m"), ("inspect",), ("plan", "-m"),
        ("validate", "--model", str(tmp_path)),
    ):  # fmt: skip
        assert main([*verb, str(tmp_path)]) == 0, capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "whole" / ".." / "whole.bin"), "--to", "gguf"]) == 0


@pytest.mark.parametrize("case", ["a shard is missing", "another file", "two sets", "one file", "none is whole"])
def test_a_folder_of_other_ggufs_lists_them(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    if case == "one file":
        write_tiny(tmp_path / "a.gguf", TINY)
    else:
        shards = write_set(tmp_path)
        if "missing" in case:
            shards[1].unlink()
        elif case == "none is whole":
            shards[0].unlink()
        elif case == "two sets":
            write_set(tmp_path, "n")
        else:
            write_tiny(tmp_path / "other.GGUF", TINY)
    for argv in (("run", "-p", "a", "-m", str(tmp_path)), ("plan", "-m", str(tmp_path)), ("inspect", str(tmp_path))):
        assert main(list(argv)) == 2
        err = capsys.readouterr().err
        assert f"{tmp_path}: expected a model, found a folder of GGUF files; name one of " in err
        names = sorted(os.listdir(tmp_path))
        assert ", ".join(names) in err and err.count("\n") == 1


def test_many_files_are_counted_and_an_mlx_folder_is_none_of_this(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i:02}.gguf").write_bytes(b"GGUF")
    with pytest.raises(RequestError, match=r"00\.gguf, .*, 07\.gguf and 4 more$"):
        model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert model_path(tmp_path) == str(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "https://example.org/m.gguf", "http://example.org/m", "s3://models/m.gguf", "hf:user/repo", "hf://user/repo",
        "user/repo", "user/Repo-GGUF:Q4_K_M", "llama3.2:3b", "qwen2.5:latest", "ollama:llama3", "file://m.gguf",
    ],
)  # fmt: skip
def test_names_of_models_elsewhere_are_told_that_nothing_is_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv in (("run", "-p", "a", "-m", name), ("plan", "-m", name), ("eval", "-m", name)):
        assert main(list(argv)) == 2
        err = capsys.readouterr().err
        assert "tqgguf downloads nothing; fetch the file and give its path with -m" in err and name in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["m.gguf", "models/m.gguf", "here/m", "./user/repo", "/user/repo", "../user/repo", "m"]
)
def test_paths_that_lead_nowhere_are_only_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert model_path(name) == name


def test_the_line_is_that_of_hf(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-hf", "user/repo", "-p", "a"]) == 2
    assert NO_DOWNLOAD in capsys.readouterr().err


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("llama3.2:3b"), TINY)
    assert open_model("llama3.2:3b").config.n_layers == 1


@pytest.mark.parametrize("tail", [b"", bytes(32)])
def test_joined_files_are_named_as_such(tmp_path: Path, tail: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "joined.gguf"
    parts = [part.read_bytes() for part in write_set(tmp_path)]
    whole = tiny_gguf(TINY)
    headless = build_gguf({"general.architecture": "llama"}, {})
    odd = build_gguf({"general.architecture": "llama"}, {"a": np.ones(3, np.float32)}, pad_end=False)
    for first in (parts[0], whole, headless, odd):
        path.write_bytes(first + whole + tail)
        (finding,) = [found for found in tqgguf.validate(path) if found.rule.name != "trailing-data"]
        assert (finding.rule.name, finding.offset) == ("joined-files", len(first))
        with pytest.raises(DefectError, match="files were joined into one"):
            open_gguf(path)
    path.write_bytes(b"".join(parts))
    assert main(["run", "-m", str(path), "-p", "a"]) == 1
    err = capsys.readouterr().err
    assert "another GGUF begins at byte" in err and "renamed" not in err
    path.write_bytes(whole + b"GGU")
    assert [found.rule.name for found in tqgguf.validate(path)] == ["trailing-data"]


def test_no_verb_points_at_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "my model.gguf", "-p", "hi"]) == 2
    assert "expected a verb first, found -m; to answer a prompt: tqgguf run -m 'my model.gguf' -p hi" in (
        capsys.readouterr().err
    )
    path = write_tiny(tmp_path / "m.gguf", TINY)
    assert main([str(path)]) == 2
    assert f"`tqgguf run -m {path}` runs it" in capsys.readouterr().err
    assert main(["--version"]) == 0


@pytest.mark.parametrize("head", [b"\x7fELF\x02\x01", b"\xff\xd8\xff\xe0", b"Once upon", b"    \n", "Größe".encode()])
def test_unknown_files_are_described_without_python(
    head: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(head * 20)
    for argv in (("run", "-p", "a", "-m"), ("inspect",), ("validate",), ("convert",)):
        assert main([*argv, str(path), *(["out.gguf"] if argv == ("convert",) else [])]) in (1, 2)
        out, err = capsys.readouterr()
        assert "b'" not in out + err and 'b"' not in out + err
        assert "begins with" in out + err
