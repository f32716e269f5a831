"""What the JSON of verbs that evaluate a model says of it, and of the program and the machine."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tqgguf
from tqgguf.formats.wording import readable
from tqgguf.runtime import backends
from tqgguf.runtime.models.load import OpenModel
from tqgguf.runtime.models.mlx_folder import OpenFolder


def about_model(opened: OpenModel | OpenFolder) -> dict[str, Any]:
    """Which model was evaluated."""
    path, config = Path(opened.path), opened.config
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {
        "file": readable(path.name),
        "bytes": sum(file.stat().st_size for file in files),
        "architecture": config.architecture,
        "name": config.name,
        "layers": config.n_layers,
        "vocabulary": config.vocab_size,
        "context": config.context_length,
    }


def about_program() -> dict[str, Any]:
    """When, on what and by which versions."""
    packages = {name: version(name) for name in ("mlx", "mlx-lm", "numpy")}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": backends.describe(),
        "versions": {
            "tqgguf": tqgguf.__version__,
            **packages,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }
