"""What a folder's config.json asks of the arithmetic, and which of it a GGUF or mlx-lm's class does not do.

One table: family and key -> the values that change nothing there. What is not in it is written, or read by the class.
Sources: transformers' and mlx-lm's classes of what they read; llama.cpp's converter and loader of what GGUF holds.
Settings are those of `folder_defaults.completed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.models.folder_keys import Settings
from tqgguf.formats.models.folder_rope import FULL, GGUF, MLX, SLIDING, check_rope, chosen_rope, mlx_rope
from tqgguf.formats.wording import shown

SILU: Final = ("silu", "swish")
TANH_GELU: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
GEMMA_PATTERN: Final = 6  # of Gemma 3 in llama.cpp, whatever a file says
GEMMA2_PATTERN: Final = 2
GEMMA_27B_LAYERS: Final = 62  # the one size whose queries are not scaled by the head size, in llama.cpp too


class Feature(NamedTuple):
    """is_neutral: whether the settings' value changes nothing; expected: such values, in words."""

    families: tuple[str, ...]
    key: str
    is_neutral: Callable[[Settings], bool]
    expected: str
    missing_in: tuple[str, ...] = (GGUF, MLX)


_ALL: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_SILENT: Final = ("llama", "mistral", "qwen2", "qwen3")
_GEMMAS: Final = ("gemma", "gemma2", "gemma3")
_WINDOWS: Final = "no window, or one of max_position_embeddings or more (a smaller max_position_embeddings will do)"


def _one_of(key: str, *values: Any) -> Callable[[Settings], bool]:
    return lambda settings: settings.get(key, values[0]) in values


def _is_given(key: str) -> Callable[[Settings], bool]:
    return lambda settings: bool(settings.get(key))


def _heads_share_hidden(settings: Settings) -> bool:
    size: int = settings["hidden_size"] // settings["num_attention_heads"]
    return settings.get("head_dim", size) == size


def _window_is_wide(settings: Settings) -> bool:
    window = settings.get("sliding_window")
    return window is None or window >= settings["max_position_embeddings"]


def _all_full(settings: Settings) -> bool:
    return set(settings.get("layer_types", ())) <= {FULL} or _window_is_wide(settings)


def _mistral_layers(settings: Settings) -> list[bool]:
    """transformers' class reads no layer_types."""
    return [settings.get("sliding_window") is not None] * settings["num_hidden_layers"]


def _qwen_layers(settings: Settings) -> list[bool]:
    types, n_layers = settings.get("layer_types"), settings["num_hidden_layers"]
    if not settings["use_sliding_window"]:
        return [False] * n_layers
    if types is not None:
        return [kind == SLIDING for kind in types]
    return [i >= settings["max_window_layers"] for i in range(n_layers)]


def _gemma2_layers(settings: Settings) -> list[bool]:
    types = settings.get("layer_types")
    if types is not None:
        return [kind == SLIDING for kind in types]
    return pattern_layers(GEMMA2_PATTERN, settings["num_hidden_layers"])


def sliding_layers(settings: Settings) -> list[bool]:
    """Which layers of a Gemma 3 have a window."""
    types, n_layers = settings.get("layer_types"), settings["num_hidden_layers"]
    if types is not None:
        return [kind == SLIDING for kind in types]
    pattern = settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", GEMMA_PATTERN))
    return pattern_layers(pattern, n_layers)


_WINDOWED: Final[dict[str, Callable[[Settings], list[bool]]]] = {
    "mistral": _mistral_layers,
    "qwen2": _qwen_layers,
    "qwen3": _qwen_layers,
    "gemma2": _gemma2_layers,
    "gemma3": sliding_layers,
}
"""Family -> which layers have a window."""
_WITHOUT_WINDOWS: Final = ("mistral", "qwen2", "qwen3", "gemma2")
"""Families whose classes in mlx-lm attend to everything."""


def dropped_window(family: str, settings: Settings) -> int | None:
    """The window that mlx-lm's class lacks: contexts up to its size do not need it. None: it lacks none."""
    if family not in _WITHOUT_WINDOWS or _window_is_wide(settings) or not any(_WINDOWED[family](settings)):
        return None
    window: int | None = settings.get("sliding_window")
    return window


def _sees_all(family: str) -> Callable[[Settings], bool]:
    return lambda settings: dropped_window(family, settings) is None


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
    if settings["num_hidden_layers"] == GEMMA_27B_LAYERS:
        return settings["hidden_size"] / settings["num_attention_heads"]
    return float(settings["head_dim"])


_NEED_WINDOWS: Final = ("gemma2", "gemma3")
_LAYERS: Final = f"every {GEMMA_PATTERN}th layer without a window, or all"
FEATURES: Final = (
    Feature(_SILENT, "hidden_act", _one_of("hidden_act", *SILU), " or ".join(SILU)),
    Feature(("gemma",), "hidden_act", _one_of("hidden_act", *TANH_GELU, "gelu"), " or ".join((*TANH_GELU, "gelu"))),
    Feature(_GEMMAS, "hidden_activation", _one_of("hidden_activation", *TANH_GELU), " or ".join(TANH_GELU)),
    Feature(_ALL, "partial_rotary_factor", _one_of("partial_rotary_factor", 1.0), "1 (whole heads)"),
    Feature(("mistral",), "sliding_window", _sees_all("mistral"), _WINDOWS, (GGUF,)),
    Feature(("qwen2", "qwen3"), "use_sliding_window", _sees_all("qwen2"), f"false, {_WINDOWS}", (GGUF,)),
    Feature(("qwen2",), "rope_traditional", _one_of("rope_traditional", False), "false", (GGUF,)),
    Feature(("llama",), "layer_types", _all_full, f"{FULL} in all layers", (GGUF,)),
    Feature(("qwen3", *_GEMMAS), "attention_bias", _one_of("attention_bias", False), "false"),
    Feature(_GEMMAS, "use_bidirectional_attention", _one_of("use_bidirectional_attention", False), "false"),
    Feature(("gemma", "gemma2"), "tie_word_embeddings", _one_of("tie_word_embeddings", True), "true", (MLX,)),
    Feature(("gemma2",), "attn_logit_softcapping", _is_given("attn_logit_softcapping"), "a number above 0", (MLX,)),
    Feature(("gemma2",), "final_logit_softcapping", _is_given("final_logit_softcapping"), "a number above 0", (MLX,)),
    Feature(("qwen2",), "head_dim", _heads_share_hidden, "hidden_size / num_attention_heads", (MLX,)),
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
        ("gemma3",), "query_pre_attn_scalar", lambda s: s["query_pre_attn_scalar"] == query_scalar(s),
        "the head size (of 62 layers: hidden_size / num_attention_heads)", (GGUF,),
    ),
)  # fmt: skip
"""What a family's class in transformers does, and others do not."""


def check_features(family: str, settings: Settings, path: str, target: str) -> None:
    """UnsupportedModelError for a key whose value the target would drop, though it changes what the model computes.

    FormatError: settings contradict each other.
    """
    types, n_layers = settings.get("layer_types"), settings["num_hidden_layers"]
    if types is not None and len(types) != n_layers:
        raise FormatError(f"{path}: layer_types: expected {n_layers} layers, found {len(types)}")
    if types is not None and not set(types) <= {FULL, SLIDING}:
        raise FormatError(f"{path}: layer_types: expected {FULL} or {SLIDING}, found {shown(sorted(set(types)))}")
    if family in _NEED_WINDOWS and settings.get("sliding_window") is None and any(_WINDOWED[family](settings)):
        raise FormatError(f"{path}: sliding_window: expected a number, as some layers have a window, found null")
    for feature in FEATURES:
        if family in feature.families and target in feature.missing_in and not feature.is_neutral(settings):
            found = shown(settings[feature.key]) if feature.key in settings else "none"
            raise UnsupportedModelError(
                f"{path}: {feature.key}: {target} holds no other value than {feature.expected}, found {found}"
                if target == GGUF
                else f"{path}: {feature.key}: mlx-lm computes as with {feature.expected}, found {found}"
            )
    check_rope(family, chosen_rope(family, settings, path), path, target)


def mlx_settings(family: str, settings: Settings, path: str) -> dict[str, Any]:
    """What mlx-lm's class is told, in its own words, so that it assumes nothing itself."""
    told = {**settings, **mlx_rope(chosen_rope(family, settings, path))}
    if family == "gemma3":
        told["sliding_window_pattern"] = period_of(sliding_layers(settings))
    if family == "mistral":  # mlx-lm's class, Llama's, reads them; transformers' does not
        told |= {"layer_types": None, "sliding_window": None}
    return told
