"""A conversion that is killed, or whose disk is full: old files or new ones, whole, and the next run makes it good.

Of a split set, whose files cannot be renamed at once, the first is missing until all are there: readers say so.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main

# kills itself before the n-th event of that kind that touches the folder
KILLED = """
import os, signal, sys
kind, n = sys.argv[1], int(sys.argv[2])
here = os.getcwd()
def watch(event, arguments):
    global n
    if event == kind and str(arguments[0]).startswith(here):
        n -= 1
        if not n:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
from tqgguf.cli.main import main
sys.exit(main(sys.argv[3:]))
"""
LIMITED = """
import resource, signal, sys
from tqgguf.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(sys.argv[1:]))
"""
TO_FILE = ("convert", "a.gguf", "b.gguf", "--type", "q8_0")
TO_SET = ("convert", "a.gguf", "b.gguf", "--type", "f16", "--split-max-size", "1M")
TO_FOLDER = ("convert", "a.gguf", "b")
OLD = TinyModel(seed=1, head_dim=128)
NEW = TinyModel(seed=2, head_dim=128)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("a.gguf"), NEW)


def content(path: str = ".") -> dict[str, bytes]:
    """Files under a folder by name, but for the source."""
    found = (file for file in Path(path).rglob("*") if file.is_file() and file.name != "a.gguf")
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def whole(argv: tuple[str, ...], model: TinyModel) -> dict[str, bytes]:
    """What a conversion makes that nobody disturbs."""
    shutil.rmtree("whole", ignore_errors=True)
    Path("whole").mkdir()
    write_tiny(Path("whole/a.gguf"), model)
    here = os.getcwd()
    os.chdir("whole")
    try:
        assert main(list(argv)) == 0
        return content()
    finally:
        os.chdir(here)
        shutil.rmtree("whole")


def lay(files: dict[str, bytes]) -> None:
    for name in (name for name in os.listdir(".") if name != "a.gguf"):
        shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)
    for name, data in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)


def without_orphans(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.startswith(".tqgguf-")}


def check_what_is_left(old: dict[str, bytes], new: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a whole product is there, old or new; if not, it can be none, and who reads it is told so."""
    left = without_orphans(content())
    if left in (old, new):
        return True
    assert "b-00001" not in "".join(left)
    assert all(data in (old.get(name), new[name]) for name, data in left.items())
    capsys.readouterr()
    for argv in (["validate", min(left)], ["convert", min(left), "c.gguf"]):
        assert main(argv) == 1
        told = "".join(capsys.readouterr())
        assert "the model is split into" in told
        assert "missing beside this one" in told
    return False


@pytest.mark.parametrize(
    ("argv", "kind", "n", "is_whole"),
    [
        (TO_FILE, "os.rename", 1, True),
        (TO_SET, "os.rename", 1, False),
        (TO_SET, "os.rename", 2, False),
        (TO_FOLDER, "os.rename", 1, True),
    ],
)
def test_killed_before_a_rename_leaves_old_or_new_and_the_next_run_makes_it_good(
    argv: tuple[str, ...], kind: str, n: int, is_whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = {} if argv is TO_FOLDER else whole(argv, OLD), whole(argv, NEW)
    assert set(old) <= set(new)
    lay(old)
    killed = subprocess.run([sys.executable, "-c", KILLED, kind, str(n), *argv], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith(".tqgguf-") for name in os.listdir("."))
    assert check_what_is_left(old, new, capsys) == is_whole
    assert main(list(argv)) == 0
    assert content() == new


@pytest.mark.slow
@pytest.mark.parametrize("argv", [TO_FILE, TO_SET, TO_FOLDER])
def test_killed_at_any_moment_leaves_old_or_new_and_the_next_run_makes_it_good(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    big = TinyModel(seed=3, hidden_size=1024, intermediate_size=2048, head_dim=128, n_layers=4)
    write_tiny(Path("a.gguf"), big)
    new = whole(argv, big)
    old = {} if argv is TO_FOLDER else {name: b"old" for name in new}
    moments = random.Random(0)
    n_killed = 0
    for _ in range(12):
        lay(old)
        run = subprocess.Popen([sys.executable, "-m", "tqgguf.cli.main", *argv], stderr=subprocess.DEVNULL)
        while run.poll() is None and not any(name.startswith(".tqgguf-") for name in os.listdir(".")):
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.2))
        run.kill()
        n_killed += run.wait() == -signal.SIGKILL
        if argv is TO_SET:
            left = without_orphans(content())
            assert left in (old, new) or "b-00001" not in min(left)
        else:
            check_what_is_left(old, new, capsys)
        shutil.rmtree("b", ignore_errors=True)  # a folder that is there is not replaced
        assert main(list(argv)) == 0
        assert content() == new
    assert n_killed > 3


@pytest.mark.parametrize("argv", [TO_FILE, TO_SET, TO_FOLDER])
def test_a_disk_that_fills_up_leaves_what_was_there(argv: tuple[str, ...]) -> None:
    old = {} if argv is TO_FOLDER else whole(argv, OLD)
    lay(old)
    done = subprocess.run([sys.executable, "-c", LIMITED, *argv], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "could not be written: File too large" in done.stderr
    assert content() == old
    assert main(list(argv)) == 0
    assert content() == whole(argv, NEW)
