"""`tqgguf convert` holds runs of rows, or one tensor, whatever the model's size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import build_gguf
from tiny_models import TinyModel, write_tiny

MEASURED = """
import resource, sys
from pathlib import Path
from tqgguf.cli.main import main
assert main(["convert", *sys.argv[1:]]) == 0
status = Path("/proc/self/status")  # on Linux ru_maxrss is the parent's to begin with
own = status.read_text().partition("VmHWM:")[2].split()[0] if status.exists() else None
kilobytes = int(own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(kilobytes * (1 if sys.platform == "darwin" else 1024))
"""
VALUES = np.zeros((40_960, 1024), np.float16)


def peak(*argv: str) -> int:
    """Bytes of memory at the peak of a process that converts."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *argv], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_gguf_takes_a_few_runs_of_rows_or_of_bytes() -> None:
    Path("large.gguf").write_bytes(build_gguf({}, {"output.weight": VALUES}))
    Path("small.gguf").write_bytes(build_gguf({}, {"output.weight": VALUES[:1024]}))
    for flags in (("--type", "q8_0"), ("--split-max-size", "1G")):
        grown = peak("large.gguf", "b.gguf", *flags) - peak("small.gguf", "b.gguf", *flags)
        assert grown < VALUES.nbytes / 3, flags


def test_a_folder_for_mlx_lm_takes_a_tensor_at_a_time() -> None:
    peaks, sizes = [], []
    for n_layers in (1, 8):
        path = Path(f"{n_layers}.gguf")
        write_tiny(path, TinyModel(weights="F16", n_layers=n_layers, hidden_size=512, intermediate_size=2048))
        sizes.append(os.path.getsize(path))
        peaks.append(peak(path.name, f"made-{n_layers}"))
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 3
