"""`tqgguf validate`: lines or JSON on stdout, and an exit status that says how it went."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import Tensor, build_gguf, write_split
from llama_builder import build_state
from test_gguf_defects import two_tensors
from tiny_models import model_metadata, model_tensors, tiny_gguf
from unsound_files import TINY, calibration

from tqgguf.cli.main import main
from tqgguf.formats.carriers.table import open_carrier
from tqgguf.formats.cursor import Buffer
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.models.belonging import ModelIdentity
from tqgguf.formats.validation.validate import CHECKS, Validation

OVERLAP = two_tensors(second_offset=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sound.gguf").write_bytes(tiny_gguf(TINY))
    (tmp_path / "overlap.gguf").write_bytes(OVERLAP)
    (tmp_path / "warned.gguf").write_bytes(tiny_gguf(TINY, {"tokenizer.ggml.pre": None}))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["validate", *argv])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_sound_file_gives_a_summary_and_status_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "sound.gguf") == (0, "1 file: 1 sound\n", "")


def test_an_error_is_one_line_with_file_rule_and_offset_and_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "overlap.gguf")
    line, summary = out.splitlines()
    assert (status, err) == (1, "")
    assert line == (
        "overlap.gguf: TQ101 tensor-overlap: tensors 't' and 'u' overlap: the first ends at byte 128, the second "
        "begins at byte 96 (at byte 82)"
    )
    assert summary == "1 file: 0 sound, 1 not (1 error)"


def test_a_warning_fails_with_strict_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "warned.gguf")
    assert status == 0
    assert out.startswith("warned.gguf: TQ209 pretokenizer (warning): ")
    assert out.endswith("1 file: 1 sound, 1 warning\n")
    assert run(capsys, "warned.gguf", "--strict")[0] == 1


def test_what_cannot_be_read_gives_status_2_and_the_rest_is_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "nothing.gguf", "overlap.gguf")
    assert status == 2
    assert err == "tqgguf: error: nothing.gguf: cannot be opened: No such file or directory\n"
    assert "TQ101" in out and out.endswith("1 file: 0 sound, 1 not (1 error), 1 could not be read\n")


def test_json_names_what_could_not_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "overlap.gguf", "none.gguf", "--json")
    finding, unread = json.loads(out)
    assert (status, finding["rule"], unread["file"]) == (2, "TQ101", "none.gguf")
    assert err == f"tqgguf: error: {unread['error']['message']}\n"


def test_json_is_an_array_of_findings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "overlap.gguf", "sound.gguf", "--json")
    (finding,) = json.loads(out)
    assert status == 1
    assert finding["message"].startswith("tensors 't' and 'u' overlap")
    del finding["message"]
    assert finding == {
        "file": "overlap.gguf", "offset": 82, "tensor": "u", "rule": "TQ101", "name": "tensor-overlap",
        "severity": "error", "expected": "byte 128 or later", "found": "byte 96",
    }  # fmt: skip
    assert run(capsys, "sound.gguf", "--json")[1] == "[]\n"


def test_folders_are_searched_for_files_of_known_kinds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "cache").write_bytes(build_state().data)
    (folder / "a" / "notes.txt").write_text("nothing to see")
    (folder / "a" / "page.gguf").write_text("<html>")
    (folder / "a" / "none").mkdir()
    status, out, _ = run(capsys, "a")
    assert status == 1
    assert out.splitlines()[0].startswith("a/page.gguf: TQ003 html-page: ")
    assert out.splitlines()[-1] == "2 files: 1 sound, 1 not (1 error)"
    status, out, err = run(capsys, "a/none")
    assert (status, out) == (2, "0 files: 0 sound, 1 could not be read\n")
    assert "no file of a kind known here" in err


def test_a_set_of_shards_is_looked_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = folder / "shards"
    shards.mkdir()
    tensors = [{name: tensor} for name, tensor in model_tensors(TINY).items()]
    paths = write_split(shards, "m", {**model_metadata(TINY), "tokenizer.ggml.pre": "default"}, tensors)
    status, out, _ = run(capsys, "shards", str(paths[2]), str(paths[0]))
    assert status == 0
    assert len(out.splitlines()) == 2
    assert out.splitlines()[-1] == f"{len(paths)} files: {len(paths)} sound, 1 warning"
    paths[0].write_bytes(b"GGUF")
    status, out, _ = run(capsys, "shards")
    assert status == 1
    assert "TQ102 truncated-header" in out and out.splitlines()[-1].startswith(f"{len(paths)} files: ")


def test_caches_are_held_against_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = ModelIdentity.of("sound.gguf")
    (folder / "own.gguf").write_bytes(calibration(folder, identity.fingerprint))
    (folder / "other.gguf").write_bytes(calibration(folder))
    (folder / "made.gguf").unlink()
    assert run(capsys, "own.gguf", "-m", "sound.gguf")[0] == 0
    status, _, err = run(capsys, "own.gguf", "-m", "other.gguf")
    assert (status, err) == (2, "tqgguf: error: --model other.gguf: expected a model, found a calibration\n")
    status, out, _ = run(capsys, "other.gguf", "--model", "sound.gguf")
    assert status == 1 and "TQ601 other-weights" in out
    status, _, err = run(capsys, "own.gguf", "--model", "overlap.gguf")
    assert status == 2 and err.startswith("tqgguf: error: --model overlap.gguf: ")


def test_names_that_are_not_utf8_are_shown_all_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        Path(os.fsdecode(b"caf\xe9.gguf")).write_bytes(OVERLAP)
    except OSError:
        return  # macOS has no such files
    assert "caf\\xe9.gguf" in run(capsys, os.fsdecode(b"caf\xe9.gguf"))[1]
    assert json.loads(run(capsys, os.fsdecode(b"caf\xe9.gguf"), "--json")[1])[0]["file"] == "caf\\xe9.gguf"


def test_names_with_line_breaks_stay_on_their_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a\nb\x1b.gguf").write_bytes(OVERLAP)
    assert run(capsys, "a\nb\x1b.gguf")[1].startswith("a\\nb\\x1b.gguf: TQ101 ")
    for verb in ("validate", "inspect"):
        for name in ("a\nb\x1b.gguf", "\x1b[31m\x07none.gguf"):
            main([verb, name])
            shown = capsys.readouterr()
            lines = (shown.out + shown.err).splitlines()
            assert lines and all(line.isprintable() for line in lines)
    (folder / "c\x1b.gguf").write_bytes(tiny_gguf(TINY))
    main(["inspect", "c\x1b.gguf"])
    assert capsys.readouterr().out.startswith("c\\x1b.gguf: model")


def test_many_files_come_out_in_their_order_however_many_threads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(20):
        (folder / f"f{i:02d}.gguf").write_bytes(OVERLAP if i % 3 else build_gguf({}, {"a": np.ones(9 * i)}))
    outs = {run(capsys, ".", "-t", threads)[1] for threads in ("1", "3", "0")}
    assert len(outs) == 1
    names = [line.split(":")[0] for line in outs.pop().splitlines()[:-1]]
    assert names == sorted(names)


def test_no_mlx_is_brought_in(folder: Path) -> None:
    code = "import sys\nfrom tqgguf.cli.main import main\nmain(['validate', 'sound.gguf'])\n"
    code += "assert 'mlx' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_exception_that_nobody_expected_is_one_files_own(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(validation: Validation, buffer: Buffer) -> None:
        raise TypeError("of a rule")

    monkeypatch.setitem(CHECKS, FileKind.SESSION, broken)
    (folder / "a.session").write_bytes(build_state().data)
    status, out, err = run(capsys, ".")
    assert status == 1
    assert err == "tqgguf: error: ./a.session: TypeError: of a rule (a defect of tqgguf; --debug shows where)\n"
    assert "TQ101" in out and out.splitlines()[-1].startswith("3 files: 2 sound, 1 not (1 error), 1 could not be read")
    with pytest.raises(TypeError, match="of a rule"):
        run(capsys, ".", "--debug")


def test_a_folder_that_cannot_be_read_is_told_and_others_are_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "closed").mkdir()
    real = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("closed"):  # root, as which tests may run, is refused nothing
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    status, out, err = run(capsys, ".")
    assert (status, err) == (2, "tqgguf: error: ./closed: cannot be read: Permission denied\n")
    assert out.splitlines()[-1] == "3 files: 2 sound, 1 not (1 error), 1 could not be read, 1 warning"


def test_a_pipe_is_no_file_to_wait_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe.gguf")
    for argv in (["validate", "pipe.gguf"], ["inspect", "pipe.gguf"], ["convert", "pipe.gguf", "o.session"],
                 ["cache", "restore", "pipe.gguf", "-m", "sound.gguf", "-p", "x"]):  # fmt: skip
        assert main(argv) > 0
        assert "pipe.gguf: expected a" in capsys.readouterr().err
    with pytest.raises(TqggufError, match="found a pipe"):
        open_carrier("pipe.gguf")


def test_ctrl_c_within_a_file_does_not_wait_for_its_end(folder: Path) -> None:
    """A tensor of a terabyte of zeros, which would take many minutes."""
    n_bytes = 1 << 40
    data = build_gguf({}, {"t": Tensor((n_bytes // 4,), 0, b"")})
    with (folder / "large.gguf").open("wb") as file:
        file.write(data)
        file.truncate(-(-len(data) // 32) * 32 + n_bytes)
    command = [sys.executable, "-m", "tqgguf.cli.main", "validate", "overlap.gguf", "large.gguf"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("overlap.gguf: TQ101 ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_ctrl_c_ends_it_quietly(folder: Path) -> None:
    (folder / "large.gguf").write_bytes(build_gguf({}, {f"t{i}": np.ones(1 << 16, np.float32) for i in range(100)}))
    many = ["overlap.gguf", *(f"./{'./' * i}large.gguf" for i in range(1000))]  # each name is another file to it
    command = [sys.executable, "-m", "tqgguf.cli.main", "validate", *many]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("overlap.gguf: TQ101 ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "")
