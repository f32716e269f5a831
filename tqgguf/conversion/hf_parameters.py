"""A checkpoint's configuration as metadata of a GGUF: the keys that llama.cpp's converter writes, and their values.

Keys and their types come from gguf-py's writer. Knows configurations; neither tensors nor tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tqgguf.conversion.hf_architectures import Checkpoint
from tqgguf.formats.errors import FormatError
from tqgguf.formats.models.config import MAX_LAYERS, MAX_SIZE, ROPE_BASES, ROPE_FACTORS
from tqgguf.formats.models.folder_features import sliding_layers
from tqgguf.formats.models.folder_rope import FULL, SLIDING, chosen_rope

_YARN = {
    "extrapolation_factor": "add_rope_scaling_yarn_ext_factor",
    "attention_factor": "add_rope_scaling_yarn_attn_factor",
    "attn_factor": "add_rope_scaling_yarn_attn_factor",
    "beta_fast": "add_rope_scaling_yarn_beta_fast",
    "beta_slow": "add_rope_scaling_yarn_beta_slow",
}
Ropes = Mapping[str, Mapping[str, Any]]
"""Of `folder_rope.chosen_rope`."""
_GREATEST = float(np.finfo(np.float32).max)  # what a GGUF's numbers can be


def add_parameters(writer: gguf.GGUFWriter, row: Checkpoint, config: Mapping[str, Any], path: str) -> None:
    """Add the hyper-parameters of a completed configuration.

    FormatError: a value is missing or none that it can be.
    """
    writer.add_block_count(number(config, "num_hidden_layers", path, MAX_LAYERS))
    writer.add_context_length(number(config, "max_position_embeddings", path))
    writer.add_embedding_length(number(config, "hidden_size", path))
    writer.add_feed_forward_length(number(config, "intermediate_size", path))
    writer.add_head_count(number(config, "num_attention_heads", path))
    writer.add_head_count_kv(number(config, "num_key_value_heads", path))
    _add_rope(writer, chosen_rope(row.family, config, path), path)
    writer.add_layer_norm_rms_eps(_above_zero(config, "rms_norm_eps", path))
    if "head_dim" in config:
        writer.add_key_length(number(config, "head_dim", path))
        writer.add_value_length(number(config, "head_dim", path))
    if row.is_llama:
        writer.add_vocab_size(number(config, "vocab_size", path))
        writer.add_rope_dimension_count(number(config, "head_dim", path))
    if row.is_gemma:
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(real(config, "final_logit_softcapping", path))
        if any(sliding_layers(config)):
            writer.add_sliding_window(number(config, "sliding_window", path))


def rope_factors(config: Mapping[str, Any], ropes: Ropes, path: str) -> NDArray[np.float32] | None:
    """llama 3's factor for each pair of a head; None where positions are not stretched so."""
    settings = ropes[FULL]
    if settings["rope_type"] != "llama3":
        return None
    head_dim = number(config, "head_dim", path)
    factor, low = real(settings, "factor", path, 8.0), real(settings, "low_freq_factor", path, 1.0)
    high = real(settings, "high_freq_factor", path, 4.0)
    context = number(settings, "original_max_position_embeddings", path)
    if not 0 < low < high or not factor > 0:
        raise FormatError(f"{path}: rope_scaling: expected 0 < low_freq_factor < high_freq_factor, found {low}, {high}")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(_above_zero(settings, "rope_theta", path, ROPE_BASES)) ** exponents
    wavelengths = np.float32(2 * np.pi) / frequencies
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    between = np.float32(1) / ((np.float32(1) - smooth) / np.float32(factor) + smooth)
    stretched = np.where(wavelengths > context / low, np.float32(factor), between)
    return np.where(wavelengths < context / high, np.float32(1), stretched).astype(np.float32)


def number(config: Mapping[str, Any], key: str, path: str, most: int = MAX_SIZE) -> int:
    """A whole number of a configuration, from 1 on."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise FormatError(f"{path}: {key}: expected a number from 1 to {most}, found {value!r:.60}")
    return value


def real(config: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
    """A finite number of a configuration."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _GREATEST:
        raise FormatError(f"{path}: {key}: expected a number, found {value!r:.60}")
    return float(value)


def _above_zero(config: Mapping[str, Any], key: str, path: str, limits: tuple[float, float] = (0.0, math.inf)) -> float:
    """The same of one that must be above 0, and within what a model can be run with."""
    value = real(config, key, path)
    if not (value > 0 and limits[0] <= value <= limits[1]):
        expected = f"{limits[0]:.3g} to {limits[1]:.3g}" if value > 0 else "a number above 0"
        raise FormatError(f"{path}: {key}: expected {expected}, found {value}")
    return value


def _add_rope(writer: gguf.GGUFWriter, ropes: Ropes, path: str) -> None:
    settings = ropes[FULL]
    kind = settings["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(_above_zero(settings, "factor", path, ROPE_FACTORS))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(_above_zero(settings, "factor", path, ROPE_FACTORS))
        writer.add_rope_scaling_orig_ctx_len(number(settings, "original_max_position_embeddings", path))
        for key, method in _YARN.items():
            if settings.get(key) is not None:
                getattr(writer, method)(real(settings, key, path))
    writer.add_rope_freq_base(_above_zero(settings, "rope_theta", path, ROPE_BASES))
    if SLIDING in ropes:
        writer.add_rope_freq_base_swa(_above_zero(ropes[SLIDING], "rope_theta", path, ROPE_BASES))
