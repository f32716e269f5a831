"""RoPE's settings in config.json: one of the ways to say them is chosen here, as transformers chooses, for all readers.

`rope_theta`, `rope_scaling` and `rope_parameters` can all say something, and a setting has two names (`type`,
`rope_type`). Source: transformers' `modeling_rope_utils` and Gemma 3's configuration (version 5.24); mlx-lm's
`rope_utils` and llama.cpp of what they take.
"""

from __future__ import annotations

from typing import Any, Final

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.models.folder_keys import ROPE_NUMBER, Settings
from tqgguf.formats.wording import shown

GGUF, MLX = "a GGUF", "mlx-lm"
"""Who is to do the arithmetic."""
FULL, SLIDING = "full_attention", "sliding_attention"
_THETA: Final = 10000.0
_GEMMA3_THETAS: Final = {FULL: 1e6, SLIDING: 1e4}
_LEARNT_AT_A_LENGTH: Final = ("llama3", "yarn", "longrope")
_KEYS: Final = ("rope_parameters", "rope_scaling")
_KINDS: Final[dict[str, tuple[str, ...]]] = {
    GGUF: ("default", "linear", "yarn", "llama3"),
    MLX: ("default", "linear", "yarn", "llama3", "dynamic", "mrope"),
}
_UNSTRETCHED: Final = ("gemma", "gemma2")
"""Families whose classes in mlx-lm know no kind but default."""
_NUMBERS: Final = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "original_max_position_embeddings", "rope_theta",
)  # fmt: skip
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "partial_rotary_factor": (1,),
    "truncate": (True,),
    "mscale": (),
    "mscale_all_dim": (),
    "mrope_section": ([],),
    "short_factor": (),
    "long_factor": (),
    "attention_factor": (),
}
"""What else transformers reads of RoPE's settings -> values that change nothing."""
_ALSO: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    GGUF: {"yarn": ("attention_factor", "extrapolation_factor", "attn_factor")},
    MLX: {"yarn": ("mscale", "mscale_all_dim"), "mrope": ("mrope_section",)},
}
"""Kinds -> what the target reads beside."""


def chosen_rope(family: str, settings: Settings, path: str) -> dict[str, dict[str, Any]]:
    """RoPE's settings by the kind of layers, complete: `rope_type`, `rope_theta` and whatever else is said, no nulls.

    Gemma 3 has FULL and SLIDING, other families FULL for all layers. settings: of `folder_defaults.completed`.
    FormatError: two places say different things, or something that the class does not read so.
    """
    bases = {FULL: settings.get("rope_theta", _THETA)}
    if family == "gemma3":
        own = {FULL: settings.get("rope_theta"), SLIDING: settings.get("rope_local_base_freq")}
        bases = {layers: _GEMMA3_THETAS[layers] if base is None else base for layers, base in own.items()}
    chosen: dict[str, dict[str, Any]] = {}
    for name in _KEYS:
        for layers, rope in _said(family, settings, name, path).items():
            complete = _complete(rope, bases[layers], settings, path)
            if chosen.setdefault(layers, complete) != complete:
                raise FormatError(
                    f"{path}: {' and '.join(_KEYS)}: expected the same in both, or one of them, found "
                    f"{shown(settings[_KEYS[0]])} and {shown(settings[_KEYS[1]])}"
                )
    return {layers: chosen.get(layers) or _complete({}, base, settings, path) for layers, base in bases.items()}


def _said(family: str, settings: Settings, name: str, path: str) -> dict[str, dict[str, Any]]:
    """What one of the two keys says, by the kind of layers."""
    found = settings.get(name) or {}
    nested = [layers for layers in (FULL, SLIDING) if layers in found]
    is_of_layers = family == "gemma3" and name == "rope_parameters"
    if found and bool(nested) != is_of_layers:
        wanted = f"an entry for {FULL} and one for {SLIDING}" if is_of_layers else "the same for all layers"
        raise FormatError(f"{path}: {name}: expected {wanted}, found {shown(found)}")
    said = {layers: found[layers] for layers in nested} if nested else {FULL: found} if found else {}
    for layers, rope in said.items():
        if rope is not None and not isinstance(rope, dict):
            raise FormatError(f"{path}: {name}: {layers}: expected an object, found {shown(rope)}")
    return {layers: rope for layers, rope in said.items() if rope is not None}


def _complete(rope: Settings, base: Any, settings: Settings, path: str) -> dict[str, Any]:
    kind = next((rope[key] for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    if not isinstance(kind, str):
        raise FormatError(f"{path}: rope_type: expected a text, found {shown(kind)}")
    complete = {key: value for key, value in rope.items() if value is not None and key != "type"}
    complete = {"rope_theta": base, **complete, "rope_type": kind}
    if "partial_rotary_factor" in settings:
        complete.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
    if kind in _LEARNT_AT_A_LENGTH:
        complete.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
        complete["original_max_position_embeddings"] = settings.get(
            "original_max_position_embeddings", complete["original_max_position_embeddings"]
        )
    return complete


def check_rope(family: str, ropes: dict[str, dict[str, Any]], path: str, target: str) -> None:
    """UnsupportedModelError for a setting of RoPE that the target would drop; FormatError for one that is none.

    ropes: of `chosen_rope`.
    """
    for layers, rope in ropes.items():
        kind = rope["rope_type"]
        kinds = ("default",) if target == MLX and family in _UNSTRETCHED else _KINDS[target]
        if layers == SLIDING and kind != "default":
            raise UnsupportedModelError(f"{path}: rope_type of {SLIDING}: expected default, found {shown(kind)}")
        if kind not in kinds:
            raise UnsupportedModelError(
                f"{path}: rope_type {kind!r:.60}: {target} does not compute it as transformers; "
                f"expected {' or '.join(kinds)}"
            )
        if target == GGUF and kind == "llama3" and family not in ("llama", "mistral"):
            raise UnsupportedModelError(f"{path}: rope_type llama3: a GGUF of {family} holds none of its factors")
        for key in _NUMBERS:
            if key in rope and not ROPE_NUMBER.has(rope[key]):
                raise FormatError(
                    f"{path}: {key}: expected {ROPE_NUMBER.expected(rope[key])}, found {shown(rope[key])}"
                )
        for key, neutral in _NEUTRAL.items():
            if key not in _ALSO[target].get(kind, ()) and key in rope and rope[key] not in neutral:
                raise UnsupportedModelError(
                    f"{path}: {key} of RoPE: {target} does not know it"
                    f"{f' of rope_type {kind}' if kind != 'default' else ''}; expected none, found {shown(rope[key])}"
                )


def mlx_rope(ropes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What mlx-lm's classes must be told, in their own words, so that they read nothing else."""
    full = dict(ropes[FULL])
    told: dict[str, Any] = {"rope_theta": full.pop("rope_theta"), "rope_parameters": None, "rope_scaling": None}
    if SLIDING in ropes:
        told["rope_local_base_freq"] = ropes[SLIDING]["rope_theta"]
    if full["rope_type"] != "default":
        if not (full.get("mscale") and full.get("mscale_all_dim")):  # transformers reads both or none
            full = {key: value for key, value in full.items() if key not in ("mscale", "mscale_all_dim")}
        told["rope_scaling"] = full
    return told
