"""One table: Hugging Face's model classes -> GGUF architecture, with what their configurations leave unsaid.

Source of the defaults: transformers' configuration classes; of what llama.cpp wants of each: its converter. To add an
architecture: a row here, and its window or tensor rules in `hf_parameters` and `hf_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf

from tqgguf.formats.errors import FormatError, UnsupportedModelError

Default = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Checkpoint:
    """What checkpoints of some classes have in common.

    family: its name in `folder_keys.FAMILIES`. rope_pairs: llama.cpp turns queries and keys in neighbouring pairs, so
    that their rows are put in that order.
    norm_offset: what is added to norms' weights. needs_pieces: there must be a tokenizer.model.
    """

    architecture: gguf.MODEL_ARCH
    defaults: Mapping[str, Default] = field(default_factory=dict)
    rope_pairs: bool = False
    norm_offset: float = 0.0
    needs_pieces: bool = False
    is_llama: bool = False
    is_gemma: bool = False
    family: str = "llama"


def _of(value: Any) -> Default:
    return lambda config: value


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


_COMMON: dict[str, Default] = {"rms_norm_eps": _of(1e-6), "rope_theta": _of(10000.0)}

_LLAMA = Checkpoint(
    gguf.MODEL_ARCH.LLAMA,
    {
        **_COMMON,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": _head_dim,
        "max_position_embeddings": _of(2048),
        "vocab_size": _of(32000),
    },
    rope_pairs=True,
    is_llama=True,
)
_GEMMA = Checkpoint(
    gguf.MODEL_ARCH.GEMMA3,
    {
        "hidden_size": _of(2304),
        "intermediate_size": _of(9216),
        "num_hidden_layers": _of(26),
        "num_attention_heads": _of(8),
        "num_key_value_heads": _of(4),
        "head_dim": _of(256),
        "max_position_embeddings": _of(131072),
        "rms_norm_eps": _of(1e-6),
        "rope_theta": _of(1_000_000.0),
        "rope_local_base_freq": _of(10000.0),
        "sliding_window": _of(4096),
        "tie_word_embeddings": _of(True),
        "vocab_size": _of(262208),
    },
    norm_offset=1.0,
    needs_pieces=True,
    is_gemma=True,
    family="gemma3",
)

CHECKPOINTS: dict[str, Checkpoint] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Checkpoint(
        gguf.MODEL_ARCH.LLAMA,
        {**_LLAMA.defaults, "num_key_value_heads": _of(8), "max_position_embeddings": _of(131072)},
        rope_pairs=True,
        is_llama=True,
        family="mistral",
    ),
    "Qwen2ForCausalLM": Checkpoint(
        gguf.MODEL_ARCH.QWEN2,
        {**_COMMON, "num_key_value_heads": _of(32), "max_position_embeddings": _of(32768), "vocab_size": _of(151936)},
        family="qwen2",
    ),
    "Qwen3ForCausalLM": Checkpoint(
        gguf.MODEL_ARCH.QWEN3,
        {
            **_COMMON,
            "num_key_value_heads": _of(32),
            "head_dim": _of(128),
            "max_position_embeddings": _of(32768),
            "vocab_size": _of(151936),
        },
        family="qwen3",
    ),
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
}

_FOREIGN_KEYS = {
    "quantization": "weights that mlx has quantised",
    "quantization_config": "quantised weights",
    "num_local_experts": "experts",
    "num_experts": "experts",
}


def find_checkpoint(config: Mapping[str, Any], path: str) -> Checkpoint:
    """The row for a config.json; UnsupportedModelError for classes and features that are not converted."""
    for key, what in _FOREIGN_KEYS.items():
        if config.get(key):
            raise UnsupportedModelError(f"{path}: {key}: a checkpoint with {what} is not converted")
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None
    if name is None:
        raise FormatError(f"{path}: architectures: expected the name of a model class, found {classes!r:.60}")
    row = CHECKPOINTS.get(name)
    if row is None:
        raise UnsupportedModelError(f"{path}: {name!r:.60} is not converted; these are: {', '.join(CHECKPOINTS)}")
    return row


def completed(row: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """A language model's configuration with what its class assumes where it says nothing."""
    known = dict(config)
    for key, default in row.defaults.items():
        if key not in known:
            known[key] = default(known)
    return known
