"""What a folder's config.json asks of the arithmetic, and which of it a GGUF or mlx-lm's class does not do.

One table: family and key -> the values that change nothing there. What is not in it is written, or read by the class.
Sources: transformers' and mlx-lm's classes of what they read; llama.cpp's converter and loader of what GGUF holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.gguf.errors import shown
from tqgguf.formats.models.folder_keys import ROPE_NUMBER

GGUF, MLX = "a GGUF", "mlx-lm"
"""Who is to do the arithmetic."""

SILU: Final = ("silu", "swish")
TANH_GELU: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
GEMMA_PATTERN: Final = 6  # of Gemma 3 in llama.cpp, whatever a file says
GEMMA_27B_LAYERS: Final = 62  # the one size whose queries are not scaled by the head size, in llama.cpp too
GEMMA_QUERY_SCALAR: Final = 256  # of Gemma 3's class where config.json does not say
FULL, SLIDING = "full_attention", "sliding_attention"

Settings = Mapping[str, Any]


class Feature(NamedTuple):
    """is_neutral: whether the settings' value changes nothing; expected: such values, in words."""

    families: tuple[str, ...]
    key: str
    is_neutral: Callable[[Settings], bool]
    expected: str
    missing_in: tuple[str, ...] = (GGUF, MLX)


_ALL: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
_SILENT: Final = ("llama", "mistral", "qwen2", "qwen3")
_WINDOWS: Final = "no window, or one of max_position_embeddings or more (a smaller max_position_embeddings will do)"


def _one_of(key: str, *values: Any) -> Callable[[Settings], bool]:
    return lambda settings: settings.get(key, values[0]) in values


def _window_is_wide(settings: Settings) -> bool:
    window, context = settings.get("sliding_window"), settings.get("max_position_embeddings")
    return window is None or (context is not None and window >= context)


def _qwen_sees_all(settings: Settings) -> bool:
    if not settings.get("use_sliding_window", False) or _window_is_wide(settings):
        return True
    types, n_layers = settings.get("layer_types"), settings.get("num_hidden_layers", 0)
    return SLIDING not in types if types is not None else settings.get("max_window_layers", 28) >= n_layers


def _all_full(settings: Settings) -> bool:
    return set(settings.get("layer_types", ())) <= {FULL} or _window_is_wide(settings)


def sliding_layers(settings: Settings) -> list[bool]:
    """Which layers of a Gemma 3 have a window."""
    types, n_layers = settings.get("layer_types"), settings.get("num_hidden_layers", 0)
    if types is not None:
        return [kind == SLIDING for kind in types]
    pattern = settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", GEMMA_PATTERN))
    return pattern_layers(pattern, n_layers)


def pattern_layers(pattern: int, n_layers: int) -> list[bool]:
    """Which layers have a window where each `pattern`-th has none."""
    return [(i + 1) % pattern != 0 for i in range(n_layers)]


def period_of(layers: list[bool]) -> int | None:
    """The pattern of layers with a window, None where they follow none."""
    return next((n for n in range(1, len(layers) + 1) if pattern_layers(n, len(layers)) == layers), None)


def _gguf_has_layers(settings: Settings) -> bool:
    layers = sliding_layers(settings)
    return not any(layers) or layers == pattern_layers(GEMMA_PATTERN, len(layers))


def query_scalar(settings: Settings) -> float:
    """What Gemma 3's queries are scaled by in llama.cpp, to the power of -1/2."""
    if settings.get("num_hidden_layers") == GEMMA_27B_LAYERS:
        return settings["hidden_size"] / settings["num_attention_heads"]
    return float(settings["head_dim"])


_LAYERS: Final = f"every {GEMMA_PATTERN}th layer without a window, or all"
FEATURES: Final = (
    Feature(_SILENT, "hidden_act", _one_of("hidden_act", *SILU), " or ".join(SILU)),
    Feature(("gemma3",), "hidden_activation", _one_of("hidden_activation", *TANH_GELU), " or ".join(TANH_GELU)),
    Feature(_ALL, "partial_rotary_factor", _one_of("partial_rotary_factor", 1.0), "1 (whole heads)"),
    Feature(("mistral",), "sliding_window", lambda s: "layer_types" in s or _window_is_wide(s), _WINDOWS),
    Feature(("qwen2", "qwen3"), "use_sliding_window", _qwen_sees_all, f"false, {_WINDOWS}"),
    Feature(("llama", "mistral"), "layer_types", _all_full, f"{FULL} in all layers", (GGUF,)),
    Feature(("qwen3", "gemma3"), "attention_bias", _one_of("attention_bias", False), "false"),
    Feature(("gemma3",), "use_bidirectional_attention", _one_of("use_bidirectional_attention", False), "false"),
    Feature(("gemma3",), "attn_logit_softcapping", lambda s: not s.get("attn_logit_softcapping"), "none"),
    Feature(("gemma3",), "final_logit_softcapping", lambda s: not s.get("final_logit_softcapping"), "none", (MLX,)),
    Feature(
        ("gemma3",), "layer_types", lambda s: "layer_types" not in s or _gguf_has_layers(s), _LAYERS, (GGUF,)
    ),
    Feature(("gemma3",), "sliding_window_pattern", _gguf_has_layers, f"{GEMMA_PATTERN} or 1", (GGUF,)),
    Feature(
        ("gemma3",), "layer_types", lambda s: period_of(sliding_layers(s)) is not None,
        "layers without a window at one distance", (MLX,),
    ),
    Feature(
        ("gemma3",), "query_pre_attn_scalar",
        lambda s: s.get("query_pre_attn_scalar", GEMMA_QUERY_SCALAR) == query_scalar(s),
        "the head size (of 62 layers: hidden_size / num_attention_heads)", (GGUF,),
    ),
)  # fmt: skip
"""What a family's class in transformers does, and others do not."""


def check_features(family: str, settings: Settings, path: str, target: str) -> None:
    """UnsupportedModelError for a key whose value the target would drop, though it changes what the model computes.

    settings: of `language_part`; head_dim among them for a GGUF. FormatError: they contradict each other.
    """
    types, n_layers = settings.get("layer_types"), settings.get("num_hidden_layers")
    if types is not None and n_layers is not None and len(types) != n_layers:
        raise FormatError(f"{path}: layer_types: expected {n_layers} layers, found {len(types)}")
    if types is not None and not set(types) <= {FULL, SLIDING}:
        raise FormatError(f"{path}: layer_types: expected {FULL} or {SLIDING}, found {shown(sorted(set(types)))}")
    for feature in FEATURES:
        if family in feature.families and target in feature.missing_in and not feature.is_neutral(settings):
            found = shown(settings[feature.key]) if feature.key in settings else "none"
            raise UnsupportedModelError(
                f"{path}: {feature.key}: {target} holds no other value than {feature.expected}, found {found}"
                if target == GGUF
                else f"{path}: {feature.key}: mlx-lm computes as with {feature.expected}, found {found}"
            )
    check_rope(family, settings, path, target)


_GGUF_ROPES: Final = (None, "default", "linear", "yarn", "llama3")
_ROPE_NUMBERS: Final = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "original_max_position_embeddings", "rope_theta",
)  # fmt: skip
_ROPE_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "partial_rotary_factor": (1, None),
    "truncate": (True, None),
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "mrope_section": (None, []),
    "short_factor": (None,),
    "long_factor": (None,),
    "attention_factor": (None,),
}
"""What else transformers reads of RoPE's settings -> values that change nothing."""
_ALSO: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    GGUF: {"yarn": ("attention_factor", "extrapolation_factor", "attn_factor")},
    MLX: {
        "yarn": ("mscale", "mscale_all_dim"),
        "longrope": ("short_factor", "long_factor"),
        "mrope": ("mrope_section",),
    },
}
"""Kinds -> what the target reads beside."""


def rope_layers(settings: Settings) -> dict[str, dict[str, Any]]:
    """RoPE's settings of the layers that see everything, and of those with a window where they have their own."""
    found = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    layers = {name: found[name] for name in (FULL, SLIDING) if name in found} or {FULL: found}
    return {name: value for name, value in layers.items() if isinstance(value, dict)}


def rope_kind(rope: Settings) -> Any:
    """linear, yarn, llama3 ..., or None."""
    return rope.get("rope_type") or rope.get("type")


def check_rope(family: str, settings: Settings, path: str, target: str) -> None:
    """UnsupportedModelError for a setting of RoPE that the target would drop."""
    for layers, rope in rope_layers(settings).items():
        kind = rope_kind(rope)
        if kind is not None and not isinstance(kind, str):
            raise FormatError(f"{path}: rope_type: expected a text, found {shown(kind)}")
        if layers == SLIDING and kind not in (None, "default"):
            raise UnsupportedModelError(f"{path}: rope_type of {SLIDING}: expected default, found {shown(kind)}")
        if target == GGUF and kind not in _GGUF_ROPES:
            raise UnsupportedModelError(f"{path}: rope_type {kind!r:.60}: expected linear, yarn, llama3 or default")
        if target == GGUF and kind == "llama3" and family not in ("llama", "mistral"):
            raise UnsupportedModelError(f"{path}: rope_type llama3: a GGUF of {family} holds none of its factors")
        for key in _ROPE_NUMBERS:
            value = rope.get(key)
            if value is not None and not ROPE_NUMBER.has(value):
                raise FormatError(f"{path}: {key}: expected {ROPE_NUMBER.expected(value)}, found {shown(value)}")
        read = _ALSO[target].get(kind or "", ())
        for key, neutral in _ROPE_NEUTRAL.items():
            if key not in read and key in rope and rope[key] not in neutral:
                raise UnsupportedModelError(
                    f"{path}: {key} of RoPE: {target} does not know it"
                    f"{f' of rope_type {kind}' if kind else ''}; expected none, found {shown(rope[key])}"
                )


def mlx_settings(family: str, settings: Settings) -> dict[str, Any]:
    """What mlx-lm's class must be told in its own words of what it does not read in transformers'."""
    told: dict[str, Any] = {}
    if "rope_parameters" in settings:
        rope = rope_layers(settings)
        full, sliding = rope.get(FULL, {}), rope.get(SLIDING, {})
        if "rope_theta" in full:
            told["rope_theta"] = full["rope_theta"]
        if "rope_theta" in sliding:
            told["rope_local_base_freq"] = sliding["rope_theta"]
        if rope_kind(full) not in (None, "default"):
            told["rope_scaling"] = dict(full)
    if family == "gemma3" and ("layer_types" in settings or "_sliding_window_pattern" in settings):
        told["sliding_window_pattern"] = period_of(sliding_layers(settings))
    return told
