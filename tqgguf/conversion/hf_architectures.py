"""One table: Hugging Face's model classes -> GGUF architecture, and what llama.cpp wants of each.

Source: llama.cpp's converter. What configurations leave unsaid is in `folder_defaults`. To add an architecture: a row
here, and its window or tensor rules in `hf_parameters` and `hf_convert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf

from tqgguf.formats.errors import FormatError, UnsupportedModelError


@dataclass(frozen=True)
class Checkpoint:
    """What checkpoints of some classes have in common.

    family: its name in `folder_keys.FAMILIES`. rope_pairs: llama.cpp turns queries and keys in neighbouring pairs, so
    that their rows are put in that order.
    norm_offset: what is added to norms' weights. needs_pieces: there must be a tokenizer.model.
    """

    architecture: gguf.MODEL_ARCH
    rope_pairs: bool = False
    norm_offset: float = 0.0
    needs_pieces: bool = False
    is_llama: bool = False
    is_gemma: bool = False
    family: str = "llama"


_GEMMA = Checkpoint(gguf.MODEL_ARCH.GEMMA3, norm_offset=1.0, needs_pieces=True, is_gemma=True, family="gemma3")

CHECKPOINTS: dict[str, Checkpoint] = {
    "LlamaForCausalLM": Checkpoint(gguf.MODEL_ARCH.LLAMA, rope_pairs=True, is_llama=True),
    "MistralForCausalLM": Checkpoint(gguf.MODEL_ARCH.LLAMA, rope_pairs=True, is_llama=True, family="mistral"),
    "Qwen2ForCausalLM": Checkpoint(gguf.MODEL_ARCH.QWEN2, family="qwen2"),
    "Qwen3ForCausalLM": Checkpoint(gguf.MODEL_ARCH.QWEN3, family="qwen3"),
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
