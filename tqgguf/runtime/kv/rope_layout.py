"""Which channels of a layer's keys RoPE turns together, read off the modules of an mlx-lm model."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from tqgguf.formats.blocks.balance import NOT_ROTATED, RopeLayout

_NAMES = ("rope", "rotary")  # in the names of RoPE classes, lower case


def rope_layouts(model: Any) -> list[RopeLayout]:
    """One for each of the model's layers; no channels at all where a layer has no RoPE that says its sizes."""
    return [_layout(layer) for layer in getattr(model, "layers", None) or ()]


def _layout(layer: Any) -> RopeLayout:
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        name = type(module).__name__.lower()
        dims = getattr(module, "dims", None) or getattr(module, "dim", None)
        if any(part in name for part in _NAMES) and isinstance(dims, int) and dims % 2 == 0:
            return RopeLayout(dims, bool(getattr(module, "traditional", False)))
    return NOT_ROTATED
