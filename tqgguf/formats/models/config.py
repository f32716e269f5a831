"""What a GGUF's header says of its model, read before any weight is touched: sizes, heads, windows, RoPE, context.

Knows the llama.cpp keys (`<architecture>.block_count` ...) and what llama.cpp assumes where they are absent; knows
neither mlx-lm's argument names nor tensors' values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError, UnsupportedModelError
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.model_keys import MAX_LAYERS, MAX_SIZE
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.gguf.tensor_values import undecodable
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.formats.wording import shown

# Far beyond any model's. Inside, the largest angle (position x scale x frequency) is finite in float32.
ROPE_BASES = (2.0**-32, 2.0**64)
ROPE_FACTORS = (2.0**-32, 2.0**32)


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
    rope_theta_local: float
    """Base of the layers that see a window, which no scaling touches."""
    rope_dim: int
    rope_factor: float
    """Positions are divided by it (linear scaling); 1.0: not scaled."""
    windows: tuple[int | None, ...]
    window_pattern: int
    """Every n-th layer sees everything; 1: all do."""
    tied_embeddings: bool
    rope_overridden: bool = False
    lacks_window: bool = False
    """Its context ends where a sliding window would be needed that nobody here computes."""

    def layer_shapes(self) -> list[LayerShape]:
        """The sizes of every layer's KV cache."""
        return [LayerShape(self.n_kv_heads, self.head_dim_k, self.head_dim_v, window) for window in self.windows]


def read_model_config(file: GGUFFile) -> ModelConfig:
    """Read the sizes from an open GGUF.

    GgufError: a key is missing, absurd, or contradicts a tensor; UnsupportedModelError: a feature that is not served.
    """
    keys = _Keys(file)
    keys.refuse_features()
    n_layers = keys.positive("block_count", MAX_LAYERS)
    hidden_size = keys.positive("embedding_length")
    n_heads = keys.per_layer("attention.head_count", n_layers)
    n_kv_heads = keys.per_layer("attention.head_count_kv", n_layers, n_heads)
    if n_heads % n_kv_heads:
        raise keys.error(
            "attention.head_count", f"expected a multiple of the {n_kv_heads} KV heads, found {n_heads} query heads"
        )
    if not keys.has("attention.key_length") and hidden_size % n_heads:
        problem = f"missing, and the embedding length {hidden_size} does not divide into {n_heads} heads"
        raise keys.error("attention.key_length", problem)
    head_dim = hidden_size // n_heads
    head_dim_k = keys.positive("attention.key_length", default=head_dim)
    windows, window_pattern = _windows(keys, n_layers)
    config = ModelConfig(
        architecture=keys.architecture,
        name=file.text("general.name", ""),
        n_layers=n_layers,
        hidden_size=hidden_size,
        intermediate_size=keys.per_layer("feed_forward_length", n_layers),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim_k=head_dim_k,
        head_dim_v=keys.positive("attention.value_length", default=head_dim),
        context_length=keys.positive("context_length"),
        vocab_size=_vocabulary_size(file),
        rms_norm_eps=keys.above_zero("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.above_zero("rope.freq_base", 10000.0, ROPE_BASES),
        rope_theta_local=keys.above_zero("rope.freq_base_swa", 10000.0, ROPE_BASES),
        rope_dim=keys.positive("rope.dimension_count", default=head_dim_k),
        rope_factor=_rope_factor(keys),
        windows=windows,
        window_pattern=window_pattern,
        tied_embeddings="output.weight" not in file.tensors,
    )
    _check_tensors(file, config)
    return config


def override_rope(
    config: ModelConfig, *, freq_base: float | None = None, freq_scale: float | None = None
) -> ModelConfig:
    """The same model with other RoPE parameters (llama.cpp's --rope-freq-base and --rope-freq-scale; --rope-scale N is
    freq_scale = 1 / N). None and 0 leave the model's own. Layers that see a window keep theirs, as in llama.cpp.

    RequestError for numbers that are not above zero, or that no angle can be computed with.
    """
    for name, value, (low, high) in (("base", freq_base, ROPE_BASES), ("scale", freq_scale, ROPE_FACTORS)):
        if value is not None and not 0 <= value < math.inf:
            raise RequestError(f"RoPE frequency {name}: expected a number above 0 (0: the model's own), found {value}")
        if value and not low <= value <= high:
            raise RequestError(f"RoPE frequency {name}: expected {low:.3g} to {high:.3g}, found {value}")
    if not freq_base and not freq_scale:
        return config
    return replace(
        config,
        rope_theta=freq_base or config.rope_theta,
        rope_factor=1.0 / freq_scale if freq_scale else config.rope_factor,
        rope_overridden=True,
    )


def resolve_context(config: HasContext, asked: int) -> int:
    """The context to use where -c asks for `asked` tokens (0: the model's own).

    RequestError if it is beyond what the model was trained for and RoPE is as it was trained.
    """
    trained = config.context_length
    if asked < 0:
        raise RequestError(f"-c {asked}: expected a number of tokens, or 0 for the model's own context of {trained}")
    if asked > trained and config.lacks_window:
        raise RequestError(
            f"-c {asked}: expected at most {trained}, as the model needs a sliding window beyond, which mlx-lm's "
            "class of it does not have"
        )
    if asked > trained and not config.rope_overridden:
        is_gguf = isinstance(config, ModelConfig)
        how = f"--rope-scale {math.ceil(asked / trained)}" if is_gguf else "rope_scaling in config.json"
        raise RequestError(
            f"-c {asked}: the model was trained for {trained} tokens; "
            f"expected at most that, or stretched positions ({how})"
        )
    return asked or trained


class HasContext(Protocol):
    """What is known of a model's context: its length in tokens, whether RoPE was overridden, and whether a window that
    its architecture has is missing in the file."""

    @property
    def context_length(self) -> int: ...
    @property
    def rope_overridden(self) -> bool: ...
    @property
    def lacks_window(self) -> bool: ...


class _Keys:
    """Getters of `<architecture>.<suffix>` that also check the value's range."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.text("general.architecture")

    def name(self, suffix: str) -> str:
        return f"{self.architecture}.{suffix}"

    def has(self, suffix: str) -> bool:
        return self.name(suffix) in self.file.metadata

    def is_array(self, suffix: str) -> bool:
        return self.has(suffix) and self.file.metadata_type(self.name(suffix)).element is not None

    def error(self, suffix: str, problem: str) -> GgufError:
        name, file = self.name(suffix), self.file
        code = "head-count" if suffix.startswith(("attention.head_count", "attention.key")) else "metadata-value"
        at = file.value_offset(name) if self.has(suffix) else None
        return GgufError(code, file.path, f"metadata key {shown(name)}: {problem}", offset=at)

    def positive(self, suffix: str, limit: int = MAX_SIZE, default: int | None = None) -> int:
        if default is not None and not self.has(suffix):
            return default
        value = self.file.uint(self.name(suffix))
        if not 0 < value <= limit:
            raise self.error(suffix, f"expected 1 to {limit}, found {value}")
        return value

    def above_zero(
        self, suffix: str, default: float | None = None, limits: tuple[float, float] = (0.0, math.inf)
    ) -> float:
        name = self.name(suffix)
        value = self.file.real(name) if default is None else self.file.real(name, default)
        if value <= 0:
            raise self.error(suffix, f"expected a number above 0, found {value}")
        if not limits[0] <= value <= limits[1]:
            raise self.error(suffix, f"expected {limits[0]:.3g} to {limits[1]:.3g}, found {value}")
        return value

    def per_layer(self, suffix: str, n_layers: int, default: int | None = None) -> int:
        """A number that may also be given once per layer, and must then be the same for all."""
        if not self.is_array(suffix):
            return self.positive(suffix, default=default)
        values = self.file.uints(self.name(suffix))
        if len(values) != n_layers:
            raise self.error(suffix, f"expected a value for each of {n_layers} layers, found {len(values)}")
        different = np.unique(values)
        if len(different) > 1:
            some = ", ".join(map(str, different[:4]))
            raise UnsupportedModelError(f"{self.name(suffix)} differs between layers ({some}): not supported yet")
        if not 0 < different[0] <= MAX_SIZE:
            raise self.error(suffix, f"expected 1 to {MAX_SIZE}, found {different[0]}")
        return int(different[0])

    def refuse_features(self) -> None:
        """Refuse what changes the arithmetic and is not served: a key that says something else than nothing."""
        for suffix, (nothing, feature) in FEATURES.items():
            found = self.file.metadata.get(self.name(suffix), nothing)
            if self.is_array(suffix) or found != nothing:
                raise UnsupportedModelError(f"{self.name(suffix)} is {shown(found)}: {feature} not supported yet")


# Key -> (the value that asks for nothing, what any other asks for).
FEATURES: dict[str, tuple[object, str]] = {
    "expert_count": (0, "mixture-of-experts models are"),
    "final_logit_softcapping": (0.0, "soft-capped logits are"),
    "attn_logit_softcapping": (0.0, "soft-capped attention is"),
    "attention.causal": (True, "attention that is not causal is"),
    "attention.clamp_kqv": (0.0, "clamped attention inputs are"),
    "attention.max_alibi_bias": (0.0, "ALiBi is"),
    "rope.scaling.attn_factor": (1.0, "a RoPE attention factor is"),
    "use_parallel_residual": (False, "a parallel residual is"),
}


def _vocabulary_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        message = "tensor token_embd.weight is missing; is this a language model?"
        raise GgufError("tensor-missing", file.path, message, tensor="token_embd.weight")
    if len(embedding.shape) != 2:
        message = f"tensor token_embd.weight: expected a matrix, found shape {embedding.shape}"
        raise GgufError("tensor-shape", file.path, message, tensor="token_embd.weight")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, list) else 0
    if n_tokens and n_tokens != embedding.shape[0]:
        message = f"tensor token_embd.weight: expected a row for each of {n_tokens} tokens, found {embedding.shape[0]}"
        raise GgufError("tensor-shape", file.path, message, tensor="token_embd.weight")
    return embedding.shape[0]


def _rope_factor(keys: _Keys) -> float:
    """The linear factor that the file asks for; YaRN and others are refused by name. A factor alone means linear."""
    kind = keys.file.text(keys.name("rope.scaling.type"), "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise UnsupportedModelError(
            f"{keys.name('rope.scaling.type')}: expected none or linear, found {shown(kind)}, not supported yet"
        )
    suffix = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.file.real(keys.name(suffix), 0.0)
    if factor < 0:
        raise keys.error(suffix, f"expected a number above 0 (0: not scaled), found {factor}")
    if factor and not ROPE_FACTORS[0] <= factor <= ROPE_FACTORS[1]:
        raise keys.error(suffix, f"expected {ROPE_FACTORS[0]:.3g} to {ROPE_FACTORS[1]:.3g}, found {factor}")
    return factor or 1.0


# Architectures with window layers -> every how many layers one sees everything, where the file does not say.
WINDOW_PATTERN = {"gemma3": 6}


def _windows(keys: _Keys, n_layers: int) -> tuple[tuple[int | None, ...], int]:
    window = keys.file.uint(keys.name("attention.sliding_window"), 0)
    if keys.architecture not in WINDOW_PATTERN or not window:
        return (None,) * n_layers, 1
    suffix = "attention.sliding_window_pattern"
    if keys.is_array(suffix):
        sees_window = [bool(value) for value in keys.file.metadata[keys.name(suffix)]]
        if len(sees_window) != n_layers:
            raise keys.error(suffix, f"expected a value for each of {n_layers} layers, found {len(sees_window)}")
        pattern = next((i + 1 for i, windowed in enumerate(sees_window) if not windowed), n_layers + 1)
        if sees_window != [(layer + 1) % pattern != 0 for layer in range(n_layers)]:
            raise UnsupportedModelError(f"{keys.name(suffix)}: window layers without a fixed period are not supported")
    else:
        pattern = keys.positive(suffix, default=WINDOW_PATTERN[keys.architecture])
    if pattern > n_layers:
        raise UnsupportedModelError(
            f"{keys.name(suffix)}: expected at most {n_layers}, the number of layers, found {pattern}: "
            "a model of window layers alone is not supported yet"
        )
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(n_layers)), pattern


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Hold every size against a tensor, whose bytes are in the file: afterwards no size is larger than the file."""
    last = config.n_layers - 1
    q, kv = config.n_heads * config.head_dim_k, config.n_kv_heads
    expected = {
        "token_embd.weight": (config.vocab_size, config.hidden_size),
        f"blk.{last}.attn_q.weight": (q, config.hidden_size),
        f"blk.{last}.attn_k.weight": (kv * config.head_dim_k, config.hidden_size),
        f"blk.{last}.attn_v.weight": (kv * config.head_dim_v, config.hidden_size),
        f"blk.{last}.ffn_up.weight": (config.intermediate_size, config.hidden_size),
    }
    for name, shape in expected.items():
        found = file.tensors.get(name)
        if found is None:
            message = f"tensor {name} is missing: expected {config.n_layers} layers of {config.architecture}"
            raise GgufError("tensor-missing", file.path, message, tensor=name)
        if found.shape != shape:
            message = f"tensor {name}: expected shape {shape} by the header's sizes, found {found.shape}"
            raise GgufError("tensor-shape", file.path, message, tensor=name)
        if found.ggml_type not in GGML_TYPES:
            raise undecodable(file, found)
