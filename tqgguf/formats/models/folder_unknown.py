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


ACTIVATIONS: Final[dict[str, str]] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_approx",
    "gelu_new": "gelu_approx",
    "gelu_fast": "gelu_approx",
    "relu": "relu",
    "relu2": "relu2|relu_squared",
    "xielu": "xielu",
}
"""transformers' names of activations -> mlx's functions, which a class that knows no other one names itself."""


def rope_in_older_words(settings: Settings) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` where only `rope_parameters` has them, as transformers writes since version 5."""
    found = settings.get("rope_parameters")
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        return {}
    told: dict[str, Any] = {} if _is_default(found, settings) else {"rope_scaling": found}
    told |= {"rope_theta": found["rope_theta"]} if "rope_theta" in found else {}
    return {key: value for key, value in told.items() if settings.get(key) is None}


def asked_of_unknown(settings: Settings) -> list[str]:
    """The keys by which a configuration asks for another arithmetic."""
    return [
        key
        for key, is_neutral in _CHANGING.items()
        if settings.get(key) is not None and not is_neutral(settings[key], settings)
    ]
