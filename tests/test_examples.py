"""What the documents and every verb's --help show works as it stands; a command that both show is run once."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_builder import write_split
from in_process import tqgguf
from test_documents import blocks
from test_help import EXAMPLES
from tiny_checkpoints import CASES, write_checkpoint
from tiny_folders import write_folder
from tiny_models import TinyModel, model_metadata, model_tensors, write_tiny

LONG = ("bench", "doctor", "selftest")
"""Verbs that measure for a minute; they have tests of their own."""

# on stderr (of verbs whose product are lines, on stdout), of every run that worked
SHOWN = {
    "plan": "turbo3|turbo4", "bench": "pp256 @ d512", "run": "KV cache: K ", "eval": "window 1 of |needle|Usage: ",
    "calibrate": "channel scale of K: ", "doctor": "model: ", "validate": r"\b(\d+) files?: \1 sound", "inspect": "",
    "cache": "K", "convert": " to ", "selftest": "all right",
}  # fmt: skip


def commands() -> list[str]:
    shown = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tqgguf ")]
    shown += [line for lines in EXAMPLES.values() for line in lines]
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)[1:]) for line in shown))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: GGUFs, texts, a checkpoint and an MLX folder. Commands find what earlier ones made."""
    folder = tmp_path_factory.mktemp("examples")
    write_tiny(folder / "model.gguf", TinyModel(head_dim=128, context_length=8192))
    (folder / "question.txt").write_text("What is this?\n")
    (folder / "text.txt").write_text("What is this? " * 500)
    (folder / "book.txt").write_text("What is this? " * 800)  # 8,000 tokens of 8,192: an answer must end soon
    half = TinyModel(weights="F16")
    write_tiny(folder / "model-f16.gguf", half)
    tensors = list(model_tensors(half).items())
    thirds = [dict(tensors[i::3]) for i in range(3)]
    write_split(folder, "parts", model_metadata(half), thirds)
    write_checkpoint(folder / "Qwen3-0.6B", CASES["qwen3"])
    write_folder(folder / "my-model")
    # transformers, which mlx-lm's loader uses, wants special tokens as plain text
    settings = folder / "my-model" / "tokenizer_config.json"
    roles = json.loads(settings.read_text())
    roles["eos_token"] = roles["eos_token"]["content"]
    settings.write_text(json.dumps(roles | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize(
    "command",
    [pytest.param(line, marks=[pytest.mark.slow] if line.split()[0] in LONG else []) for line in commands()],
)
def test_an_example_works(command: str, folder: Path) -> None:
    argv = shlex.split(command)
    done = tqgguf(folder, *argv, stdin="Who are you?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(SHOWN[argv[0]], done.stderr + done.stdout)


def test_the_python_of_the_readme_works(folder: Path) -> None:
    """In a process of its own, since it imports tqgguf before mlx."""
    (program,) = blocks("python")
    check = "\nassert cache[0].usage.by_fallback == 0 and cache[0].offset > 0"
    done = subprocess.run([sys.executable, "-c", program + check], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
