"""Every verb's --help ends with examples, and the examples work as they stand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.run import EXAMPLES


def tqgguf(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    command = [sys.executable, "-m", "tqgguf.cli.main", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, input="Who are you?\n")


def test_the_help_of_run_ends_with_its_examples(tmp_path: Path) -> None:
    shown = tqgguf(tmp_path, "run", "--help").stdout
    assert shown.endswith("Examples:\n" + "".join(f"  {example}\n" for example in EXAMPLES))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_works(example: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model.gguf", TinyModel(head_dim=128, context_length=8192))
    (tmp_path / "question.txt").write_text("What is this?\n")
    program, *argv = shlex.split(example, comments=True)
    assert program == "tqgguf"
    done = tqgguf(tmp_path, *argv)
    assert done.returncode == 0, done.stderr
    assert "KV cache: K " in done.stderr
