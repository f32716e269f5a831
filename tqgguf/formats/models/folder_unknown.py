"""Settings of model classes that no table here knows: which keys change the arithmetic, and the values that do not.

Whether mlx-lm's class looks at a key is for `runtime.models.folder_classes` to find out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tqgguf.formats.models.folder_keys import Settings

_Neutral = Callable[[Any, Settings], bool]


def _is(*values: Any) -> _Neutral:
    return lambda value, settings: value in values


def _is_wide(value: Any, settings: Settings) -> bool:
    context = settings.get("max_position_embeddings")
    return settings.get("use_sliding_window") is False or (
        isinstance(value, int) and isinstance(context, int) and value >= context
    )


def _is_default(value: Any, settings: Settings) -> bool:
    return isinstance(value, dict) and value.get("rope_type", value.get("type", "default")) == "default"


_CHANGING: Final[dict[str, _Neutral]] = {
    "hidden_act": _is("silu", "swish"),
    "hidden_activation": _is("silu", "swish"),
    "activation_function": _is("silu", "swish"),
    "sliding_window": _is_wide,
    "use_sliding_window": _is(False),
    "layer_types": lambda value, settings: isinstance(value, list) and set(map(str, value)) <= {"full_attention"},
    "rope_theta": _is(10000),
    "rope_scaling": _is_default,
    "rope_parameters": _is_default,
    "partial_rotary_factor": _is(1),
    "use_bidirectional_attention": _is(False),
    "attn_logit_softcapping": _is(0),
    "final_logit_softcapping": _is(0),
    "clip_qkv": _is(),
    "logit_scale": _is(1),
    "logits_scaling": _is(1),
    "embedding_multiplier": _is(1),
    "residual_multiplier": _is(1),
    "attention_multiplier": _is(),
}
"""Keys of transformers' language models -> values that change nothing. Biases and tensors that a class does not have
are refused by mlx-lm's loader as it meets them in the files."""


def asked_of_unknown(settings: Settings) -> list[str]:
    """The keys by which a configuration asks for another arithmetic."""
    return [
        key
        for key, is_neutral in _CHANGING.items()
        if settings.get(key) is not None and not is_neutral(settings[key], settings)
    ]
