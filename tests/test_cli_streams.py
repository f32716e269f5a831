"""The program starts cleanly whatever its standard streams, locale and folder are, and Ctrl-C is quiet at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import tqgguf
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.models.calibration import read_calibration

PROGRAM = [sys.executable, "-m", "tqgguf.cli.main", "run"]
NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyModel(hidden_size=64, n_layers=1)))


def shell(line: str, *argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the program in a shell line in which `$RUN` stands for it, with `argv` after it as "$@"."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    command = ["sh", "-c", line.replace("$RUN", '"$@"'), "sh", *PROGRAM, *argv]
    return subprocess.run(command, capture_output=True, env=clean | env, timeout=120)


def stdout_of(*argv: str) -> bytes:
    """Of `tqgguf run` in this process, whose streams are as they should be."""
    done = tqgguf(Path.cwd(), "run", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout.encode()


def test_a_closed_stdin_is_an_empty_one(model: str) -> None:
    answered = shell("$RUN <&-", "-m", model, "-p", "hi", "-n", "2", "-s", "1")
    assert answered.returncode == 0 and answered.stdout
    asked = shell("$RUN <&-", "-m", model)
    assert (asked.returncode, asked.stdout) == (2, b"")
    assert asked.stderr == b"tqgguf: error: expected a prompt, found none; give it with -p or -f, or pipe it in\n"
    assert shell("$RUN <&-", "-m", model, "-cnv").returncode == 0


def test_a_closed_stdout_is_an_error_in_one_line() -> None:
    found = shell("$RUN >&-", "-p", "hi")
    assert found.returncode == 1
    assert found.stderr.startswith(b"tqgguf: error: stdout is closed") and found.stderr.count(b"\n") == 1


def test_a_closed_stderr_leaves_stdout_to_the_text(model: str) -> None:
    argv = ("-m", model, "-p", "hi", "-n", "4", "-s", "1")
    assert shell("$RUN 2>&-", *argv).stdout == stdout_of(*argv)
    assert shell("$RUN 2>&-", "-m", "none.gguf", "-p", "hi").stdout == b""
    assert shell("$RUN <&- >&- 2>&-", *argv).returncode == 1


def test_a_full_disk_is_an_error_in_one_line(model: str) -> None:
    if not Path("/dev/full").exists():
        return  # Linux has it
    for argv in (["-m", model, "-p", "hi", "-n", "2"], ["-m", model, "-p", "hi", "-n", "2", "--json"], ["--help"]):
        found = shell("$RUN >/dev/full", *argv)
        assert found.returncode == 1
        assert found.stderr.endswith(b"tqgguf: error: output: No space left on device\n")
        assert b"Exception" not in found.stderr


def test_a_stderr_that_cannot_be_written_leaves_stdout_and_the_status_as_they_are(model: str) -> None:
    if not Path("/dev/full").exists():
        return  # Linux has it
    argv = ("-m", model, "-p", "hi", "-n", "4", "-s", "1", "-ctk", "q8_0")
    found = shell("$RUN 2>/dev/full", *argv)
    assert (found.returncode, found.stdout) == (0, stdout_of(*argv))
    assert shell("$RUN 2>/dev/full", "-m", "none.gguf", "-p", "hi").returncode == 1
    assert shell("$RUN 2>/dev/full", "-c", "x").returncode == 2


@pytest.mark.parametrize("env", [NO_UTF8, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
def test_text_is_utf8_whatever_the_locale(model: str, env: dict[str, str]) -> None:
    argv = ("-m", model, "-p", "é👍 ", "-no-cnv", "-r", "👍", "-n", "4", "-s", "1")
    found = shell("$RUN", *argv, **env)
    assert found.returncode == 0
    assert found.stdout == stdout_of(*argv)
    assert found.stdout.decode("utf-8").startswith("é👍 ")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_messages_are_utf8_whatever_python_is_told(encoding: str) -> None:
    found = shell("$RUN", "-m", "modèle-👍.gguf", "-p", "x", PYTHONIOENCODING=encoding)
    assert found.returncode == 1
    assert "modèle-👍.gguf: cannot be opened" in found.stderr.decode("utf-8")


@pytest.mark.parametrize("flag", ["-p", "-sys", "-r", "--chat-template"])
def test_an_argument_of_other_bytes_is_refused(model: str, flag: str) -> None:
    found = tqgguf(Path.cwd(), "run", "-m", model, "-p", "x", flag, os.fsdecode(b"{\xc3\xa9\xff"))
    assert (found.returncode, found.stdout) == (2, "")
    message = f"tqgguf: error: {flag}: expected UTF-8 text, found another byte at character 2\n"
    assert found.stderr.endswith(message)


def test_files_whose_names_are_not_utf8_are_read_written_and_reported(model: str, tmp_path: Path) -> None:
    if sys.platform == "darwin":
        return  # its file systems have no such names
    folder = os.fsencode(tmp_path)
    named, text, sidecar = (folder + b"/" + name for name in (b"m\xff.gguf", b"t\xff.txt", b"x\xff.gguf"))
    Path(os.fsdecode(named)).write_bytes(Path(model).read_bytes())
    Path(os.fsdecode(text)).write_text("What is this? " * 60)
    program = [*PROGRAM[:-1]]
    asked = ["-m", named, "-f", text, "-c", "256"]
    done = subprocess.run([*program, "calibrate", *asked, "-o", sidecar], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, sidecar + b"\n"), done.stderr
    assert read_calibration(os.fsdecode(sidecar)).text == "t\\xff.txt"
    argv = [*asked, "--cache-types", "turbo4", "--kv-calibration", sidecar, "--report", folder + b"/r\xff", "--json"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([*program, "eval", *argv], capture_output=True, timeout=120, env=strict)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["file"] == "m\\xff.gguf" and found["text"].endswith("/t\\xff.txt")
    assert found["kv_calibration"].endswith("/x\\xff.gguf")
    assert (tmp_path / os.fsdecode(b"r\xff") / "eval.html").is_file()


def test_a_removed_folder_is_an_error_in_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    found = shell(f"cd {gone} && rmdir {gone} && $RUN", "-p", "hi")
    assert found.returncode == 1
    assert found.stderr == b"tqgguf: error: the current folder has been removed; change to another one\n"


def test_ctrl_c_is_quiet_from_the_first_import_on(tmp_path: Path) -> None:
    """A module that the program imports early waits for the signal in its stead."""
    (tmp_path / "typer.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    child = subprocess.Popen([*PROGRAM, "-p", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert child.stdout is not None and child.stdout.readline() == b"importing\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60) == (b"", b"")
    assert child.returncode == 130


def test_what_comes_before_the_first_line_of_main_loads_nothing_that_ctrl_c_could_interrupt() -> None:
    root = str(Path(__file__).parent.parent)
    code = f"import io, os, sys; sys.path.insert(0, {root!r}); before = set(sys.modules)\n"
    code += "import tqgguf.cli.main; print(*sorted(set(sys.modules) - before))"
    bare = [sys.executable, "-S", "-c", code]  # without site, as a file for editable installations imports much
    loaded = subprocess.run(bare, capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {"__future__", "tqgguf", "tqgguf.cli", "tqgguf.cli.main"}
