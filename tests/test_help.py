"""Every verb's --help ends with examples, and the examples work as they stand."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.bench import EXAMPLES as BENCH_EXAMPLES
from tqgguf.cli.cache import EXAMPLES as CACHE_EXAMPLES
from tqgguf.cli.calibrate import EXAMPLES as CALIBRATE_EXAMPLES
from tqgguf.cli.convert import EXAMPLES as CONVERT_EXAMPLES
from tqgguf.cli.doctor import EXAMPLES as DOCTOR_EXAMPLES
from tqgguf.cli.eval import EXAMPLES as EVAL_EXAMPLES
from tqgguf.cli.inspect import EXAMPLES as INSPECT_EXAMPLES
from tqgguf.cli.plan import EXAMPLES as PLAN_EXAMPLES
from tqgguf.cli.run import EXAMPLES as RUN_EXAMPLES
from tqgguf.cli.selftest import EXAMPLES as SELFTEST_EXAMPLES
from tqgguf.cli.validate import EXAMPLES as VALIDATE_EXAMPLES

EXAMPLES = {
    "run": RUN_EXAMPLES,
    "eval": EVAL_EXAMPLES,
    "calibrate": CALIBRATE_EXAMPLES,
    "doctor": DOCTOR_EXAMPLES,
    "validate": VALIDATE_EXAMPLES,
    "convert": CONVERT_EXAMPLES,
    "inspect": INSPECT_EXAMPLES,
    "plan": PLAN_EXAMPLES,
    "bench": BENCH_EXAMPLES,
    "selftest": SELFTEST_EXAMPLES,
    "cache": CACHE_EXAMPLES,
}
LONG = ("bench", "doctor", "selftest")
"""Verbs whose examples measure for a minute; they have tests of their own."""

# what the first example of a verb needs
BEFORE = {"convert": "tqgguf cache save book.kv.gguf -m model.gguf -f book.txt"}
# on stderr (of verbs whose product are lines, on stdout), of every run that worked
SHOWN = {
    "plan": "turbo3", "bench": "pp256 @ d512",
    "run": "KV cache: K ", "eval": "window 1 of ", "calibrate": "channel scale of K: ", "doctor": "model: ",
    "validate": "1 file: 1 sound", "inspect": "", "cache": "K", "convert": " to ", "selftest": "all right",
}  # fmt: skip


def tqgguf(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    command = [sys.executable, "-m", "tqgguf.cli.main", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, input="Who are you?\n")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a verb's examples, which may stand on those before them."""

    @functools.cache
    def made(verb: str) -> Path:
        folder = tmp_path_factory.mktemp(verb)
        write_tiny(folder / "model.gguf", TinyModel(head_dim=128, context_length=8192))
        (folder / "question.txt").write_text("What is this?\n")
        for name in ("text.txt", "book.txt"):
            (folder / name).write_text("What is this? " * 500)
        if verb in BEFORE:
            tqgguf(folder, *shlex.split(BEFORE[verb])[1:])
        return folder

    return made


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_a_verb_ends_with_its_examples(verb: str, tmp_path: Path) -> None:
    shown = tqgguf(tmp_path, verb, "--help").stdout
    assert shown.endswith("Examples:\n" + "".join(f"  {example}\n" for example in EXAMPLES[verb]))


def test_the_help_of_the_program_ends_with_the_first_example_of_every_verb(tmp_path: Path) -> None:
    shown = tqgguf(tmp_path, "--help").stdout
    assert shown.endswith("Examples:\n" + "".join(f"  {examples[0]}\n" for examples in EXAMPLES.values()))


@pytest.mark.parametrize(
    ("verb", "example"),
    [
        pytest.param(verb, line, marks=[pytest.mark.slow] if verb in LONG else [])
        for verb, lines in EXAMPLES.items()
        for line in lines
    ],
)
def test_an_example_works(verb: str, example: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(verb)
    program, *argv = shlex.split(example, comments=True)
    assert program == "tqgguf"
    done = tqgguf(folder, *argv)
    assert done.returncode == 0, done.stderr
    assert SHOWN[verb] in done.stderr + done.stdout
