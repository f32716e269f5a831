"""How attention from blocks gets into mlx-lm's models without changing them.

A block cache returns `LazyKV` arrays: their own value is the lazy, dequantised K or V, right for anybody who computes
with it, and they carry the step that made them. `install` puts a dispatcher in the place of
`scaled_dot_product_attention` in every loaded model module; it sees the step on the keys and attends from the blocks.
Every other use is a fallback: counted, and an error under strict.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from tqgguf.runtime.attention.steps import Step

_MODELS = "mlx_lm.models"
_original = base.scaled_dot_product_attention


class LazyKV(mx.array):
    """Dequantised keys or values [1, n_kv_heads, tokens, head_dim] with the step that made them."""

    step: Step

    @classmethod
    def of(cls, rows: mx.array, step: Step) -> LazyKV:
        lazy = cls(rows)
        lazy.step = step
        return lazy


class CausalMask(mx.array):
    """A boolean causal mask that says which window it stands for (None: no window)."""

    window: int | None


def is_causal(mask: Any, n_rows: int) -> bool:
    """Whether a mask of mlx-lm's is known to be causal, with a window or without."""
    if isinstance(mask, CausalMask):
        return True
    return (isinstance(mask, str) and mask == "causal") or (mask is None and n_rows == 1)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """In the place of mlx-lm's function of this name: keys that carry a step are attended from by it, all others as
    before. Arguments and result as mlx-lm has them."""
    step: Any = getattr(keys, "step", None)
    step_of_values: Any = getattr(values, "step", None)
    if step is None or step_of_values is not step:
        return _original(queries, keys, values, cache, scale, mask, sinks)
    if is_causal(mask, step.n_rows):
        return step.attend(queries, scale, getattr(mask, "window", None), sinks)
    if step.usage.strict:
        raise step.refusal("the model's mask is not causal" if mask is None else "the model brings a mask of its own")
    return _original(queries, keys, values, cache, scale, mask, sinks)


def install() -> None:
    """Put the dispatcher into every mlx-lm model module that is loaded; modules loaded later need another call."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODELS) and getattr(module, "scaled_dot_product_attention", None) is _original:
            module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined]
