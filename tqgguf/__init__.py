"""tqgguf: compressed KV caches for GGUF models. The public face; importing it imports neither mlx nor model code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tqgguf.formats.block_types import BLOCK_TYPES, CACHE_TYPE_NAMES
from tqgguf.formats.errors import TqggufError

if TYPE_CHECKING:
    from tqgguf.runtime.kv_cache import make_prompt_cache
    from tqgguf.runtime.load import load_model

__version__ = "0.1.0"
__all__ = ["BLOCK_TYPES", "CACHE_TYPE_NAMES", "TqggufError", "__version__", "load_model", "make_prompt_cache"]

_NEEDS_MLX = {"make_prompt_cache": "tqgguf.runtime.kv_cache", "load_model": "tqgguf.runtime.load"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_MLX:
        raise AttributeError(f"module 'tqgguf' has no attribute {name!r}")
    from tqgguf.runtime.missing_mlx import needs_mlx

    with needs_mlx(f"tqgguf.{name}"):
        return getattr(importlib.import_module(_NEEDS_MLX[name]), name)
