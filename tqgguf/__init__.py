"""tqgguf: compressed KV caches for GGUF models. The public face.

Importing it imports nothing: a name is fetched when it is asked for, and only the runtime's bring MLX. So the program,
whose door lies behind this file, answers Ctrl-C quietly from its first millisecond.
"""

from __future__ import annotations

TYPE_CHECKING = False  # true to type checkers; the module typing would take a quarter of Python's own start
if TYPE_CHECKING:
    from typing import Any

    from tqgguf.formats.blocks.block_types import BLOCK_TYPES, CACHE_TYPE_NAMES
    from tqgguf.formats.errors import TqggufError
    from tqgguf.formats.models.calibration import read_calibration
    from tqgguf.formats.rules.finding import Finding
    from tqgguf.formats.snapshots.read import open_snapshot
    from tqgguf.formats.validation.validate import validate
    from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
    from tqgguf.runtime.generation.cache_files import load_prompt_cache, save_prompt_cache
    from tqgguf.runtime.generation.compiled_model import compiled
    from tqgguf.runtime.models.load import load_model

__version__ = "0.1.0"
__all__ = [
    "BLOCK_TYPES",
    "CACHE_TYPE_NAMES",
    "Finding",
    "TqggufError",
    "__version__",
    "compiled",
    "load_model",
    "load_prompt_cache",
    "make_prompt_cache",
    "open_snapshot",
    "read_calibration",
    "save_prompt_cache",
    "validate",
]

_FORMATS = {
    "open_snapshot": "tqgguf.formats.snapshots.read",
    "BLOCK_TYPES": "tqgguf.formats.blocks.block_types",
    "CACHE_TYPE_NAMES": "tqgguf.formats.blocks.block_types",
    "Finding": "tqgguf.formats.rules.finding",
    "TqggufError": "tqgguf.formats.errors",
    "read_calibration": "tqgguf.formats.models.calibration",
    "validate": "tqgguf.formats.validation.validate",
}
_NEEDS_MLX = {
    "compiled": "tqgguf.runtime.generation.compiled_model",
    "load_model": "tqgguf.runtime.models.load",
    "load_prompt_cache": "tqgguf.runtime.generation.cache_files",
    "make_prompt_cache": "tqgguf.runtime.cache.make_prompt_cache",
    "save_prompt_cache": "tqgguf.runtime.generation.cache_files",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _FORMATS:
        return getattr(import_module(_FORMATS[name]), name)
    if name not in _NEEDS_MLX:
        raise AttributeError(f"module 'tqgguf' has no attribute {name!r}")
    from tqgguf.formats.missing_mlx import needs_mlx

    with needs_mlx(f"tqgguf.{name}"):
        return getattr(import_module(_NEEDS_MLX[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
