"""What a GGUF's header says of its model, read before any weight is touched: sizes, heads, windows, RoPE, context.

Knows the llama.cpp keys (`<architecture>.block_count` ...); knows neither mlx-lm's argument names nor tensors' values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.gguf_reader import GGUFFile
from tqgguf.formats.kv_size import LayerShape

MAX_LAYERS = 4096  # far above any model; keeps a damaged header from asking for millions of layers


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. Head sizes count values per head; windows hold one entry per layer (None: full attention)."""

    architecture: str
    name: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    context_length: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_dim: int
    rope_scaling: dict[str, object] | None
    windows: tuple[int | None, ...]
    tied_embeddings: bool

    def layer_shapes(self) -> list[LayerShape]:
        """The sizes of every layer's KV cache."""
        return [LayerShape(self.n_kv_heads, self.head_dim_k, self.head_dim_v, window) for window in self.windows]


def read_model_config(file: GGUFFile) -> ModelConfig:
    """Read the sizes from an open GGUF. FormatError: a key is missing or absurd; UnsupportedModelError: a feature that is not served."""
    architecture = file.text("general.architecture")

    def key(suffix: str) -> str:
        return f"{architecture}.{suffix}"

    def positive(suffix: str, limit: int = 2**31 - 1) -> int:
        value = file.uint(key(suffix))
        if not 0 < value <= limit:
            raise FormatError(f"{key(suffix)}: expected 1 to {limit}, found {value}")
        return value

    def per_layer_equal(suffix: str, default: int | None = None) -> int:
        found = file.metadata.get(key(suffix), default)
        values = {int(v) for v in found} if hasattr(found, "__len__") and not isinstance(found, str) else None
        if values is None:
            return positive(suffix) if default is None or key(suffix) in file.metadata else default
        if len(values) != 1:
            raise UnsupportedModelError(f"{key(suffix)} differs between layers ({sorted(values)}): not supported yet")
        return values.pop()

    n_layers = positive("block_count", MAX_LAYERS)
    hidden_size = positive("embedding_length")
    n_heads = per_layer_equal("attention.head_count")
    n_kv_heads = per_layer_equal("attention.head_count_kv", n_heads)
    if n_heads < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise FormatError(f"{architecture}: expected query heads to be a multiple of KV heads, found {n_heads} and {n_kv_heads}")
    if key("attention.key_length") not in file.metadata and hidden_size % n_heads:
        raise FormatError(f"{key('attention.key_length')} is missing and {hidden_size} values do not divide into {n_heads} heads")
    head_dim = hidden_size // n_heads
    if file.uint(key("expert_count"), 0):
        raise UnsupportedModelError(f"{architecture} with {file.uint(key('expert_count'))} experts: mixture-of-experts models are not supported yet")
    if file.real(key("final_logit_softcapping"), 0.0):
        raise UnsupportedModelError(f"{key('final_logit_softcapping')}: soft-capped logits are not supported for {architecture}")
    head_dim_k = positive("attention.key_length") if key("attention.key_length") in file.metadata else head_dim
    head_dim_v = positive("attention.value_length") if key("attention.value_length") in file.metadata else head_dim

    return ModelConfig(
        architecture=architecture,
        name=file.text("general.name", ""),
        n_layers=n_layers,
        hidden_size=hidden_size,
        intermediate_size=per_layer_equal("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        context_length=positive("context_length"),
        vocab_size=_vocabulary_size(file, architecture),
        rms_norm_eps=file.real(key("attention.layer_norm_rms_epsilon")),
        rope_theta=file.real(key("rope.freq_base"), 10000.0),
        rope_dim=file.uint(key("rope.dimension_count"), head_dim_k),
        rope_scaling=_rope_scaling(file, architecture),
        windows=_windows(file, architecture, n_layers),
        tied_embeddings="output.weight" not in file.tensors,
    )


def _vocabulary_size(file: GGUFFile, architecture: str) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError("token_embd.weight: expected a matrix (vocabulary x embedding length), found none; is this a model?")
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, object] | None:
    """The scaling that the file asks for, in mlx-lm's words. Linear only; YaRN and others are refused by name."""
    kind = file.text(f"{architecture}.rope.scaling.type", "none")
    factor = file.real(f"{architecture}.rope.scaling.factor", 0.0) or file.real(f"{architecture}.rope.scale_linear", 0.0)
    if kind == "none" and not factor:
        return None
    if kind in ("none", "linear"):
        return None if factor in (0.0, 1.0) else {"type": "linear", "factor": factor}
    raise UnsupportedModelError(f"{architecture}.rope.scaling.type: expected none or linear, found {kind!r}, which is not supported yet")


# Every n-th layer attends to everything; the rest see a window. As llama.cpp fixes it where the file does not say.
WINDOW_PATTERN = {"gemma3": 6}


def _windows(file: GGUFFile, architecture: str, n_layers: int) -> tuple[int | None, ...]:
    pattern = WINDOW_PATTERN.get(architecture)
    window = file.uint(f"{architecture}.attention.sliding_window", 0)
    if pattern is None or not window:
        return (None,) * n_layers
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(n_layers))
