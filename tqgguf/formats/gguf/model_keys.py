"""What is known of a model's metadata keys and tensors: types, what must be there, what shapes follow. Tables only.

Source: gguf-py's constants, and what llama.cpp demands when it loads a model (llama-model.cpp).
"""

from __future__ import annotations

from typing import Final

from tqgguf.formats.gguf.types import FLOAT_TYPES, INTEGER_TYPES, ValueType

INTEGER: Final = ("an integer", INTEGER_TYPES)
REAL: Final = ("a floating-point number", FLOAT_TYPES)
TEXT: Final = ("a string", frozenset({ValueType.STRING}))
FLAG: Final = ("a boolean", frozenset({ValueType.BOOL}))

MAX_LAYERS: Final = 4096
"""Far above any model; keeps a damaged header from asking for millions of layers."""
MAX_HEADS: Final = 1 << 12
MAX_HEAD_DIM: Final = 1 << 16
MAX_SIZE: Final = 2**31 - 1
"""Of one dimension: ggml's kernels and mlx count in int32."""

PLAIN_KEYS: Final[dict[str, tuple[str, frozenset[ValueType]]]] = {
    "general.architecture": TEXT,
    "general.type": TEXT,
    "general.name": TEXT,
    "general.file_type": INTEGER,
    "general.quantization_version": INTEGER,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_eos_token": FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
    "tokenizer.chat_template": TEXT,
}
"""Whole keys with the type of their values."""

ARCHITECTURE_KEYS: Final[dict[str, tuple[str, frozenset[ValueType]]]] = {
    "block_count": INTEGER,
    "context_length": INTEGER,
    "embedding_length": INTEGER,
    "vocab_size": INTEGER,
    "attention.key_length": INTEGER,
    "attention.value_length": INTEGER,
    "attention.layer_norm_rms_epsilon": REAL,
    "attention.layer_norm_epsilon": REAL,
    "attention.sliding_window": INTEGER,
    "expert_count": INTEGER,
    "expert_used_count": INTEGER,
    "rope.dimension_count": INTEGER,
    "rope.freq_base": REAL,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": REAL,
}
"""What follows `<architecture>.`; values that are the same for all layers."""

PER_LAYER_KEYS: Final = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Integers, or an array with one for each layer."""

AT_MOST: Final = {
    "context_length": MAX_SIZE,
    "embedding_length": MAX_SIZE,
    "attention.key_length": MAX_HEAD_DIM,
    "attention.value_length": MAX_HEAD_DIM,
}
"""Integers that are 1 or more, and at most this."""

ARRAY_KEYS: Final[dict[str, tuple[ValueType, ...]]] = {
    "tokenizer.ggml.tokens": (ValueType.STRING,),
    "tokenizer.ggml.merges": (ValueType.STRING,),
    "tokenizer.ggml.scores": (ValueType.F32,),
    "tokenizer.ggml.token_type": (ValueType.I32, ValueType.U32),
    "tokenizer.ggml.precompiled_charsmap": (ValueType.U8, ValueType.I8),
}
"""Arrays with the types that their elements may have. llama.cpp reads these without a conversion."""

AS_LONG_AS_TOKENS: Final = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")

RECURRENT: Final = ("mamba", "rwkv", "arwkv")
"""What the names of architectures begin with that have no attention, and 0 heads."""

REQUIRED_KEYS: Final = ("block_count", "context_length", "embedding_length")
"""Of every model that has layers."""

DENSE_KEYS: Final = (
    *REQUIRED_KEYS, "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
DENSE_LAYER: Final = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
EXPERTS: Final = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
"""Absent where a layer has experts instead."""

DENSE_ARCHITECTURES: Final[dict[str, tuple[str, ...]]] = {
    "llama": DENSE_LAYER,
    "qwen2": DENSE_LAYER,
    "qwen3": (*DENSE_LAYER, "attn_q_norm", "attn_k_norm"),
    "gemma": DENSE_LAYER,
    "gemma2": (*DENSE_LAYER, "post_attention_norm", "post_ffw_norm"),
    "gemma3": (*DENSE_LAYER, "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
}
"""Architectures whose layers are all alike -> the weights of each. Of others only that every layer has some tensor."""

SERVED: Final = ("llama", "qwen2", "qwen3", "gemma3")
"""Architectures that the runtime evaluates. Their layers are those of DENSE_ARCHITECTURES and BIASES."""

HEADS_AS_WIDE_AS_MODEL: Final = frozenset({"qwen2"})
"""Those of SERVED whose query heads together are as wide as the embedding."""

WITH_ROPE_FACTORS: Final = frozenset({"llama"})
"""Those of SERVED that may have rope_freqs.weight."""

BIASES: Final[dict[str, tuple[str, ...]]] = {"qwen2": ("attn_q", "attn_k", "attn_v")}
"""Architecture -> what has a bias in each layer."""

MODEL_TENSORS: Final = ("token_embd.weight", "output_norm.weight")
"""What a dense model has beside its layers. output.weight may be absent: the embedding serves for it."""

MATRICES: Final[dict[str, tuple[str, str]]] = {
    "attn_q": ("hidden", "q"),
    "attn_k": ("hidden", "k"),
    "attn_v": ("hidden", "v"),
    "attn_output": ("output", "hidden"),
    "ffn_gate": ("hidden", "ffn"),
    "ffn_up": ("hidden", "ffn"),
    "ffn_down": ("ffn", "hidden"),
}
"""Matrices of a dense layer -> the sizes of input and output, in ggml's order of dimensions."""

VECTORS: Final[dict[str, str]] = {
    "attn_norm": "hidden",
    "ffn_norm": "hidden",
    "post_attention_norm": "hidden",
    "post_ffw_norm": "hidden",
    "attn_q_norm": "head",
    "attn_k_norm": "head",
}
"""Norms of a dense layer -> their size. A bias has that of its matrix's output."""
