"""mlx-lm's models without all else that `import mlx_lm` brings: transformers, and torch where that is installed.

The program asks mlx-lm for models and caches only. Its package imports its programs first, which takes two seconds, or
more than ten beside torch. Whoever asks the package for anything of its own gets it as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PACKAGE = "mlx_lm"


class _LightPackage(Loader):
    """Runs the package's own code when somebody asks for what it would have made."""

    def __init__(self, whole: Loader) -> None:
        self._whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def whole(name: str) -> Any:
            if name.startswith("__") and name != "__version__":
                raise AttributeError(name)
            del module.__dict__["__getattr__"]
            self._whole.exec_module(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = whole


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _PACKAGE else None
        if spec is None or spec.loader is None:
            return None
        spec.loader = _LightPackage(spec.loader)
        return spec


def import_models_alone() -> None:
    """Have `mlx_lm` imported without its programs from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
