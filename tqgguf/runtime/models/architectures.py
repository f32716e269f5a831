"""One table: GGUF architecture -> mlx-lm's model class, its arguments, and the values that the two store differently.

Which architectures are served, with which tensors, stands in `formats.gguf.model_keys`; tensor names come from gguf-py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import mlx.core as mx

from tqgguf.formats.errors import FormatError
from tqgguf.formats.models.config import ModelConfig
from tqgguf.formats.models.loading import check_architecture

Argument = Callable[[ModelConfig], Any]

_COMMON: dict[str, Argument] = {
    "hidden_size": lambda c: c.hidden_size,
    "num_hidden_layers": lambda c: c.n_layers,
    "intermediate_size": lambda c: c.intermediate_size,
    "num_attention_heads": lambda c: c.n_heads,
    "num_key_value_heads": lambda c: c.n_kv_heads,
    "head_dim": lambda c: c.head_dim_k,
    "rms_norm_eps": lambda c: c.rms_norm_eps,
    "vocab_size": lambda c: c.vocab_size,
    "max_position_embeddings": lambda c: c.context_length,
    "rope_theta": lambda c: c.rope_theta,
    "rope_scaling": lambda c: None if c.rope_factor == 1.0 else {"type": "linear", "factor": c.rope_factor},
    "tie_word_embeddings": lambda c: c.tied_embeddings,
}

GEMMA3_27B_LAYERS = 62  # the one size whose query scale is not head_dim ** -0.5 (llama.cpp decides by layer count too)


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes an mlx-lm model.

    rope_layout: 'pairs' (RoPE turns neighbouring values; llama's GGUF rows are permuted so) or 'halves'.
    norm_offset: what the file adds to every norm weight and mlx-lm adds again (gemma: 1).
    input_scale: a factor on the embeddings of input tokens, beside what the class does.
    activation: 'silu' or 'gelu' (by tanh), of the MLP's gate.
    """

    module: str
    names: gguf.MODEL_ARCH
    rope_layout: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    norm_offset: float = 0.0
    input_scale: Argument = lambda c: 1.0
    activation: str = "silu"


def _unrounded_root(config: ModelConfig) -> float:
    """Gemma scales inputs by sqrt(hidden_size); mlx-lm rounds that to bfloat16 (0.2 % off), llama.cpp does not."""
    root = config.hidden_size**0.5
    return root / mx.array(root, mx.bfloat16).item()


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", gguf.MODEL_ARCH.LLAMA, "pairs", {"rope_traditional": lambda c: True}),
    "qwen2": Architecture("qwen2", gguf.MODEL_ARCH.QWEN2, "halves"),
    "qwen3": Architecture("qwen3", gguf.MODEL_ARCH.QWEN3, "halves"),
    "gemma3": Architecture(
        "gemma3_text",
        gguf.MODEL_ARCH.GEMMA3,
        "halves",
        {
            "query_pre_attn_scalar": lambda c: (
                c.hidden_size // c.n_heads if c.n_layers == GEMMA3_27B_LAYERS else c.head_dim_k
            ),
            "sliding_window": lambda c: next((w for w in c.windows if w), c.context_length),
            "sliding_window_pattern": lambda c: c.window_pattern,
            "rope_local_base_freq": lambda c: c.rope_theta_local,
        },
        norm_offset=1.0,
        input_scale=_unrounded_root,
        activation="gelu",
    ),
}


def find_architecture(name: str) -> Architecture:
    """The table's row, or UnsupportedModelError with the list of what is served."""
    check_architecture(name)
    return ARCHITECTURES[name]


def config_arguments(config: ModelConfig) -> dict[str, Any]:
    """What mlx-lm's class is made with, as it stands in a folder's config.json."""
    row = find_architecture(config.architecture)
    return {name: value(config) for name, value in (_COMMON | dict(row.arguments)).items()}


def build_model(config: ModelConfig) -> Any:
    """mlx-lm's model object with the sizes of `config`; its weights are random, but lazy and never evaluated."""
    row = find_architecture(config.architecture)
    module = importlib.import_module(f"mlx_lm.models.{row.module}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": row.module, **config_arguments(config)}))
    if config.tied_embeddings:
        model.sanitize({})  # drops the separate output layer where the class has made one
    return model


def parameter_names(config: ModelConfig, parameters: Iterable[str]) -> dict[str, str]:
    """GGUF tensor name -> mlx parameter path, for every parameter of the model."""
    table = gguf.get_tensor_name_map(find_architecture(config.architecture).names, config.n_layers)
    names: dict[str, str] = {}
    for parameter in parameters:
        tensor = table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if tensor is None:
            raise FormatError(f"{config.architecture}: the parameter {parameter} has no GGUF name")
        names[tensor] = parameter
    return names
