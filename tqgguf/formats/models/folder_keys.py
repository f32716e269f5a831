"""config.json of a model folder: one table of the keys that model classes read, and what values each can have.

The classes are transformers' and mlx-lm's of the families in FAMILIES; a test compares the table with both. What a
value does to the arithmetic is `folder_features`' business. Knows no file but config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tqgguf.formats.errors import FormatError
from tqgguf.formats.models.config import MAX_LAYERS, MAX_SIZE, ROPE_BASES
from tqgguf.formats.wording import shown

FAMILIES: Final = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
"""`model_type` -> the family whose keys are known here."""

Settings = Mapping[str, Any]


class Kind(NamedTuple):
    """Values of a key. what: in words, for messages; limits: of numbers, both included; listed: each of a list."""

    what: str
    types: tuple[Any, ...]
    limits: tuple[float, float] | None = None
    listed: tuple[type, ...] = ()

    def expected(self, value: Any) -> str:
        """What was expected in the place of a value that is not of this kind."""
        if float not in self.types or self.limits is None:
            return self.what
        if isinstance(value, bool) or not isinstance(value, self.types):
            return "a number"
        return f"{self.limits[0]:.3g} to {self.limits[1]:.3g}" if value > 0 else "a number above 0"

    def has(self, value: Any) -> bool:
        """Whether a value is of this kind. True and false are no numbers; NaN is within no limits."""
        if isinstance(value, bool) and object not in self.types:
            return bool in self.types
        if not isinstance(value, self.types):
            return False
        if self.limits is not None and not self.limits[0] <= value <= self.limits[1]:
            return False
        return not self.listed or all(type(each) in self.listed for each in value)


def _size(least: int = 1, most: int = MAX_SIZE) -> Kind:
    return Kind(f"a number from {least} to {most}", (int,), (least, most))


def _real(least: float, most: float) -> Kind:
    return Kind(f"a number from {least:.3g} to {most:.3g}", (int, float), (least, most))


ROPE_NUMBER: Final = _real(*ROPE_BASES)
"""What a number of RoPE's settings can be."""
_FLAG: Final = Kind("true or false", (bool,))
_TEXT: Final = Kind("a text", (str,))
_TEXTS: Final = Kind("a list of texts", (list,), listed=(str,))
_OBJECT: Final = Kind("an object", (dict,))
_ANY: Final = Kind("anything", (object,))
_TINIEST: Final = 2.0**-126  # the smallest normal float32

KEYS: Final[dict[str, Kind]] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "max_position_embeddings", "original_max_position_embeddings", "sliding_window", "sliding_window_pattern",
         "_sliding_window_pattern"),
        _size(),
    ),
    "num_hidden_layers": _size(most=MAX_LAYERS),
    "max_window_layers": _size(0),
    "rms_norm_eps": _real(_TINIEST, 1.0),
    "rope_theta": _real(*ROPE_BASES),
    "rope_local_base_freq": _real(*ROPE_BASES),
    "query_pre_attn_scalar": _real(_TINIEST, MAX_SIZE),
    "partial_rotary_factor": _real(0.0, 1.0),
    "final_logit_softcapping": _real(0.0, MAX_SIZE),
    "attn_logit_softcapping": _real(0.0, MAX_SIZE),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "rope_traditional",
         "use_bidirectional_attention"),
        _FLAG,
    ),
    "model_type": _TEXT,
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "layer_types": _TEXTS,
    **dict.fromkeys(("rope_scaling", "rope_parameters", "text_config"), _OBJECT),
    # What decides nothing about the arithmetic of a language model that answers.
    **dict.fromkeys(
        ("attention_dropout", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
         "pretraining_tp", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
         "image_token_index", "image_token_id"),
        _ANY,
    ),
}  # fmt: skip
"""Key -> its values. null is the same as no key, but for NULLS."""
NULLS: Final = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping", "num_key_value_heads")
"""Keys that have another meaning where they are null than where they are absent: without a window or a softcap, as many
KV heads as heads."""
_OF_THE_WHOLE: Final = ("tie_word_embeddings",)
"""Keys that transformers reads beside `text_config`, not in it."""


def family_of(model_type: Any) -> str | None:
    """The family of a `model_type`, None for one whose keys are not known here."""
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def language_part(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keys of the language model, those of `text_config` before others, without those whose null says nothing.

    FormatError: a value is none that its key can have.
    """
    language = config.get("text_config")
    parts = [("", config)]
    if isinstance(language, dict):
        parts.append(("text_config.", {key: value for key, value in language.items() if key not in _OF_THE_WHOLE}))
    known: dict[str, Any] = {}
    for prefix, part in parts:
        for key, value in part.items():
            if value is None:
                if key in NULLS:
                    known[key] = None
                continue
            kind = KEYS.get(key)
            if kind is not None and not kind.has(value):
                raise FormatError(f"{path}: {prefix}{key}: expected {kind.expected(value)}, found {shown(value)}")
            known[key] = value
    return known
