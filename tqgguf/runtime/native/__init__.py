"""The compiled C libraries lie in this folder; `library_path` finds one, or None where none was built."""

from __future__ import annotations

import sys
from pathlib import Path

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def library_path(name: str) -> Path | None:
    """The shared library lib<name>, looked up in every folder of this package (an editable install has two)."""
    for folder in __path__:
        candidate = Path(folder) / f"lib{name}{_SUFFIX}"
        if candidate.is_file():
            return candidate
    return None
