"""What a model class of transformers assumes where config.json is silent: one table, and what completes settings by it.

mlx-lm's classes and GGUF assume other values, so that both are handed all of these. null is the same as no key, but for
the keys in `folder_keys.NULLS`. Source: transformers' configuration classes (version 5.24), with which a test compares
the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tqgguf.formats.errors import FormatError
from tqgguf.formats.models.folder_keys import Settings

Default = Callable[[Mapping[str, Any]], Any]


def _head_dim(settings: Settings) -> int:
    return int(settings["hidden_size"]) // int(settings["num_attention_heads"])


_COMMON: Final[dict[str, Any]] = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_traditional": False,  # mlx-lm's own key
}
_LLAMA: Final[dict[str, Any]] = {
    **_COMMON,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": _head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "vocab_size": 32000,
}
_QWEN: Final[dict[str, Any]] = {
    **_COMMON,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "vocab_size": 151936,
}
_GEMMA2: Final[dict[str, Any]] = {
    **_COMMON,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "vocab_size": 256000,
}
DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma": {
        **_COMMON,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
    },
    "gemma2": _GEMMA2,
    "gemma3": {
        **_GEMMA2,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "vocab_size": 262208,
    },
}
"""Family -> key -> its value, or what makes it of the settings before it. Of RoPE's keys see `folder_rope`."""

TIED: Final = ("gemma", "gemma2", "gemma3")
"""Families whose output layer is the embeddings where config.json does not say."""


def completed(family: str, settings: Settings) -> dict[str, Any]:
    """The settings of `language_part` with what the class assumes, and without what is null.

    KeyError, TypeError, ValueError, ZeroDivisionError: of sizes that are none.
    """
    known = dict(settings)
    for key, default in DEFAULTS[family].items():
        if key not in known:
            known[key] = default(known) if callable(default) else default
    if known["num_key_value_heads"] is None:
        known["num_key_value_heads"] = known["num_attention_heads"]
    return {key: value for key, value in known.items() if value is not None}


def is_tied(family: str, settings: Settings, has_output: bool, path: str) -> bool:
    """Whether a model's output layer is its embeddings. has_output: the folder has an lm_head.weight.

    FormatError: it is to have an output layer of its own, and has none. Where config.json does not say that, and there
    is none, the embeddings are all that can be meant.
    """
    said = settings.get("tie_word_embeddings")
    if said is False and not has_output:
        raise FormatError(f"{path}: tie_word_embeddings: expected true, as there is no lm_head.weight, found false")
    return bool(said) if said is not None else family in TIED or not has_output
