"""What must be known of a model to make sense of a foreign cache file: the sizes of its layers' caches, and who it is.

Read off a model's GGUF; or, without one, guessed from the widths of the file's rows and a head size that is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.config import read_model_config
from tqgguf.formats.models.fingerprint import Fingerprint, fingerprint_gguf

PAIRED_ARCHITECTURES = frozenset({
    "llama", "llada", "llama4", "deci", "baichuan", "starcoder", "internlm2", "minicpm", "xverse", "command-r",
    "cohere2", "cohere2moe", "olmo", "arctic", "deepseek", "plm", "chatglm", "granite", "granitemoe", "granitehybrid",
    "chameleon", "bailingmoe", "smollm3", "arcee", "ernie4_5", "ernie4_5-moe", "mistral3", "glm4",
})  # fmt: skip
"""Architectures in whose GGUFs RoPE turns neighbouring values: llama.cpp's LLAMA_ROPE_TYPE_NORM. In all others it turns
the two halves of a head."""

PERMUTED_ARCHITECTURES = frozenset({
    "llama", "deci", "baichuan", "xverse", "internlm2", "minicpm", "olmo", "granite", "granitemoe", "smollm3", "arcee",
    "mistral3",
})  # fmt: skip
"""Those of them whose weights llama.cpp's converter permuted to that end: with the original weights, as mlx-lm has
them, RoPE turns halves."""


@dataclass(frozen=True)
class CachedLayer:
    """A layer that has keys and values. layer: its number in the model."""

    layer: int
    shape: LayerShape
    rope: RopeLayout


@dataclass(frozen=True)
class ModelOutline:
    """layers: those with a cache, in order. n_vocab: 0 where it is unknown. fingerprint: None where it is."""

    architecture: str
    layers: tuple[CachedLayer, ...]
    n_vocab: int = 0
    name: str = ""
    fingerprint: Fingerprint | None = None


def rope_layout(architecture: str, dims: int) -> RopeLayout:
    """Which channels RoPE turns together in a GGUF of that architecture."""
    return RopeLayout(dims, architecture in PAIRED_ARCHITECTURES)


def original_layout(architecture: str, rope: RopeLayout) -> RopeLayout:
    """Which channels RoPE turns together with a model's original weights, from the layout that its GGUF has."""
    return RopeLayout(rope.dims, rope.traditional and architecture not in PERMUTED_ARCHITECTURES)


def outline_of_gguf(file: GGUFFile) -> ModelOutline:
    """The outline of an open model; errors as `read_model_config`."""
    config = read_model_config(file)
    rope = rope_layout(config.architecture, config.rope_dim)
    layers = tuple(CachedLayer(i, shape, rope) for i, shape in enumerate(config.layer_shapes()))
    return ModelOutline(config.architecture, layers, config.vocab_size, config.name, fingerprint_gguf(file))


def outline_of_widths(architecture: str, shapes: Sequence[LayerShape]) -> ModelOutline:
    """The outline of an unknown model whose layers have these caches, all of whose channels RoPE turns."""
    layers = (CachedLayer(i, shape, rope_layout(architecture, shape.head_dim_k)) for i, shape in enumerate(shapes))
    return ModelOutline(architecture, tuple(layers))
