"""mlx-lm's class for a folder, told what transformers' class would assume, and held to what it computes as that does.

What it is told is `folder_asked`'s business. Of classes that are in no table one line names the settings at which they
never look.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma

from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.folder_asked import OUTPUT, Asked
from tqgguf.formats.models.folder_unknown import ACTIVATIONS
from tqgguf.formats.wording import shown

_MODULES: Final = "mlx_lm.models."


def unread_notices(model: nn.Module, model_type: str, asked: Asked) -> list[str]:
    """A line that names settings of a class in no table of ours at which neither it nor its parts ever look."""
    name = next(base.__module__ for base in type(model).__mro__ if base.__module__.startswith(_MODULES))
    sources = _sources_of(name) if asked.unknown else ()
    unread = [
        f"{key} ({shown(value)})"
        for key, value in asked.unknown.items()
        if not any(re.search(_reads(key, value), source) for source in sources)
    ]
    return [
        f"config.json: mlx-lm's class of {shown(model_type)} does not read {', '.join(unread)}; what this model "
        "computes may differ from what they ask for"
    ] * bool(unread)


def _reads(key: str, value: Any) -> str:
    """What is found in a class that looks at a setting, or has the activation that it asks for."""
    function = ACTIVATIONS.get(value) if isinstance(value, str) else None
    return rf"""\b(args|config|self)\.{key}\b|["']{key}["']""" + (rf"|\b({function})\b" if function else "")


@cache
def _sources_of(name: str) -> tuple[str, ...]:
    """The text of a module of mlx-lm's models, and of those that it takes parts from."""
    seen: dict[str, str] = {}

    def visit(module: ModuleType) -> None:
        if module.__name__ not in seen and module.__name__.startswith(_MODULES):
            seen[module.__name__] = inspect.getsource(module)
            for part in vars(module).values():
                of = part if isinstance(part, ModuleType) else inspect.getmodule(part)
                if of is not None:
                    visit(of)

    visit(importlib.import_module(name))
    return tuple(seen.values())


def classes_for(asked: Asked) -> Callable[[dict[str, Any]], tuple[type[nn.Module], type]]:
    """What mlx-lm's loader asks for the classes: its own, held to what is asked."""
    from mlx_lm.utils import _get_classes  # here, since it takes long: it imports transformers

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model, args = _get_classes(config)
        if asked.family == "gemma":
            model = _with_tanh(model)
        if asked.is_tied:
            model = _without_output(model)
        return (model if asked.window is None else _within(model, asked.window)), args

    return classes


def _without_output(base: type[nn.Module]) -> type[nn.Module]:
    class Tied(base):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            kept = {name: value for name, value in weights.items() if not OUTPUT.search(name)}
            return super().sanitize(kept) if hasattr(base, "sanitize") else kept

    return Tied


def _within(base: type[nn.Module], window: int) -> type[nn.Module]:
    class Within(base):
        def __call__(self, inputs: mx.array, cache: list[Any] | None = None, **others: Any) -> mx.array:
            before = getattr(cache[0], "offset", 0) if cache else 0
            if isinstance(before, int) and before + inputs.shape[1] > window:
                raise RequestError(
                    f"mlx-lm's class has no sliding window: expected at most {window:,} tokens of context, which need "
                    f"none, found {before + inputs.shape[1]:,}"
                )
            return super().__call__(inputs, cache=cache, **others)

    return Within


class _TanhMLP(gemma.MLP):
    """Gemma's, with the GELU that transformers and llama.cpp compute; mlx-lm's class has the exact one."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


def _with_tanh(base: type[nn.Module]) -> type[nn.Module]:
    class Tanh(base):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            for layer in self.layers:
                layer.mlp = _TanhMLP(args.hidden_size, args.intermediate_size)

    return Tanh
