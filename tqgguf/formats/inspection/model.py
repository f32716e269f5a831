"""What a model's GGUF says of the model, of any architecture: read leniently, for what is absent or odd is left out.

Whether a model can be run, and whether its file is sound, is decided elsewhere (`models.config`, `gguf.model_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.config import MAX_LAYERS, MAX_SIZE, WINDOW_PATTERN

SPECIAL_TOKENS = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "separator", "mask", "fim_pre",
                  "fim_suf", "fim_mid")  # fmt: skip
"""As in the keys `tokenizer.ggml.NAME_token_id`; the misspelt one is llama.cpp's."""

PerLayer = int | tuple[int, ...]


@dataclass(frozen=True)
class SpecialToken:
    """A token that the metadata name. text: None where the vocabulary has no such id."""

    id: int
    text: str | None


@dataclass(frozen=True)
class TokenizerFacts:
    """model, pre: llama.cpp's names. n_merges: None where it has none. chat_template: its length in characters."""

    model: str | None
    pre: str | None
    n_tokens: int | None
    n_merges: int | None
    special: Mapping[str, SpecialToken]
    adds_bos: bool | None
    adds_eos: bool | None
    chat_template: int | None


@dataclass(frozen=True)
class RopeFacts:
    """dims: values of a head that it turns. base_window: of layers that see a window."""

    base: float | None
    base_window: float | None
    dims: int | None
    scaling: str | None
    factor: float | None
    original_context: int | None
    has_factors: bool


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model; None where the file does not say. Numbers that differ between layers are one for each layer.

    n_parameters: values of all tensors. window: keys that a query of `n_window_layers` layers sees; None for these:
    not known which. n_kv_layers: layers that have a KV cache.
    """

    architecture: str | None
    name: str | None
    size_label: str | None
    license: str | None
    file_type: str | None
    n_parameters: int
    vocab_size: int | None
    n_layers: int | None
    n_kv_layers: int | None
    hidden_size: int | None
    feed_forward: PerLayer | None
    n_heads: PerLayer | None
    n_kv_heads: PerLayer | None
    head_dim_k: int | None
    head_dim_v: int | None
    context_length: int | None
    window: int | None
    n_window_layers: int | None
    n_experts: int | None
    n_experts_used: int | None
    tied_embeddings: bool | None
    rope: RopeFacts
    tokenizer: TokenizerFacts | None


def model_facts(file: GGUFFile) -> tuple[ModelFacts, tuple[LayerShape, ...], tuple[str, ...]]:
    """The facts, the shape of each layer that has a KV cache (none where that cannot be told), and notes."""
    keys = _Keys(file)
    n_layers = keys.number("block_count", MAX_LAYERS)
    shapes, notes = _shapes(keys, n_layers)
    window = keys.number("attention.sliding_window") or None
    n_window_layers = sum(shape.window is not None for shape in shapes) if shapes else None
    if window and shapes and not n_window_layers and not keys.sees_all:
        n_window_layers = None
        notes = (*notes, f"which layers see a window of {window:,} keys is not known here; all are counted as full")
    facts = ModelFacts(
        architecture=keys.architecture,
        name=keys.text("general.name"),
        size_label=keys.text("general.size_label"),
        license=keys.text("general.license"),
        file_type=_file_type(keys.value("general.file_type")),
        n_parameters=sum(info.n_values for info in file.tensors.values()),
        vocab_size=_vocabulary_size(file),
        n_layers=n_layers,
        n_kv_layers=len(shapes) or None,
        hidden_size=keys.number("embedding_length"),
        feed_forward=keys.per_layer("feed_forward_length"),
        n_heads=keys.per_layer("attention.head_count"),
        n_kv_heads=keys.per_layer("attention.head_count_kv") or keys.per_layer("attention.head_count"),
        head_dim_k=keys.head_dim("key"),
        head_dim_v=keys.head_dim("value"),
        context_length=keys.number("context_length"),
        window=window,
        n_window_layers=n_window_layers if window else 0,
        n_experts=keys.number("expert_count") or None,
        n_experts_used=keys.number("expert_used_count") or None,
        tied_embeddings="output.weight" not in file.tensors if "token_embd.weight" in file.tensors else None,
        rope=_rope(keys),
        tokenizer=_tokenizer(keys),
    )
    return facts, shapes, notes


class _Keys:
    """Values that are of the expected type, or None."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = self.text("general.architecture")
        self.sees_all = False
        """Whether the file says of every layer that it sees everything."""

    def value(self, key: str) -> Any:
        return self.file.metadata.get(key)

    def own(self, suffix: str) -> Any:
        return self.value(f"{self.architecture}.{suffix}")

    def text(self, key: str) -> str | None:
        value = self.value(key)
        return value if isinstance(value, str) else None

    def number(self, suffix: str, limit: int = MAX_SIZE) -> int | None:
        value = self.own(suffix)
        return value if type(value) is int and 0 <= value <= limit else None

    def real(self, suffix: str) -> float | None:
        value = self.own(suffix)
        return value if isinstance(value, float) else None

    def per_layer(self, suffix: str) -> PerLayer | None:
        """A number, or one for each layer where they differ."""
        value = self.own(suffix)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and 0 < len(value) <= MAX_LAYERS:
            numbers = value.tolist()
            if all(0 <= number <= MAX_SIZE for number in numbers):
                return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)
        return self.number(suffix)

    def head_dim(self, side: str) -> int | None:
        """Values of a head: stated, or what the embedding divides into."""
        stated = self.number(f"attention.{side}_length")
        hidden, heads = self.number("embedding_length"), self.per_layer("attention.head_count")
        if stated is not None or not hidden or not isinstance(heads, int) or not heads or hidden % heads:
            return stated
        return hidden // heads


def _shapes(keys: _Keys, n_layers: int | None) -> tuple[tuple[LayerShape, ...], tuple[str, ...]]:
    """The KV shape of every layer that has a cache, or why that cannot be told."""
    kv_heads = keys.per_layer("attention.head_count_kv") or keys.per_layer("attention.head_count")
    dims = keys.head_dim("key"), keys.head_dim("value")
    if keys.number("attention.kv_lora_rank"):
        return (), ("multi-head latent attention: its cache holds no heads, and block types do not fit it",)
    if keys.own("attention.causal") is False:
        return (), ("attention is not causal: there is no KV cache",)
    state_keys = (f"{keys.architecture}.ssm.", f"{keys.architecture}.wkv.")
    recurrent = any(key.startswith(state_keys) for key in keys.file.metadata)
    if recurrent and isinstance(kv_heads, int) and kv_heads:
        return (), ("some layers are recurrent, and the header does not say which: the KV cache is not stated",)
    if not n_layers or not kv_heads or dims[0] is None or dims[1] is None or not all(dims):
        return (), () if n_layers is None else ("the header does not give the sizes of a KV cache",)
    each = (kv_heads,) * n_layers if isinstance(kv_heads, int) else kv_heads
    if len(each) != n_layers:
        return (), (f"head_count_kv has {len(each)} entries for {n_layers} layers: the KV cache is not stated",)
    n_own = n_layers - min(keys.number("attention.shared_kv_layers") or 0, n_layers)
    windows = _windows(keys, n_layers)
    notes = ("layers without KV heads are recurrent, and their state is not counted",) if 0 in each else ()
    return tuple(
        LayerShape(n, dims[0], dims[1], window) for n, window in zip(each[:n_own], windows[:n_own], strict=True) if n
    ), notes


def _windows(keys: _Keys, n_layers: int) -> Sequence[int | None]:
    """For each layer how many keys a query sees, None for all of them or where that is not known."""
    window = keys.number("attention.sliding_window")
    if not window:
        return (None,) * n_layers
    pattern = keys.own("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and len(pattern) == n_layers:
        keys.sees_all = not pattern.any()
        return [window if sees_window else None for sees_window in pattern.tolist()]
    if type(pattern) is not int:
        pattern = WINDOW_PATTERN.get(keys.architecture or "", 0)
    if not 0 < pattern <= MAX_LAYERS:
        return (None,) * n_layers
    keys.sees_all = pattern == 1
    return [None if (layer + 1) % pattern == 0 else window for layer in range(n_layers)]


def _rope(keys: _Keys) -> RopeFacts:
    scaling = keys.own("rope.scaling.type")
    factor = keys.real("rope.scaling.factor") or keys.real("rope.scale_linear")
    return RopeFacts(
        base=keys.real("rope.freq_base"),
        base_window=keys.real("rope.freq_base_swa"),
        dims=keys.number("rope.dimension_count") or keys.head_dim("key"),
        scaling=scaling if isinstance(scaling, str) else "linear" if factor else None,
        factor=factor,
        original_context=keys.number("rope.scaling.original_context_length"),
        has_factors=any(name.startswith("rope_f") for name in keys.file.tensors),
    )


def _tokenizer(keys: _Keys) -> TokenizerFacts | None:
    if not any(key.startswith("tokenizer.") for key in keys.file.metadata):
        return None
    tokens = keys.value("tokenizer.ggml.tokens")
    texts: Sequence[Any] = tokens if isinstance(tokens, list) else ()
    ids = {name: keys.value(f"tokenizer.ggml.{name}_token_id") for name in SPECIAL_TOKENS}
    template = keys.text("tokenizer.chat_template")
    merges = keys.value("tokenizer.ggml.merges")

    def flag(name: str) -> bool | None:
        value = keys.value(f"tokenizer.ggml.{name}")
        return value if isinstance(value, bool) else None

    return TokenizerFacts(
        model=keys.text("tokenizer.ggml.model"),
        pre=keys.text("tokenizer.ggml.pre"),
        n_tokens=len(texts) or None,
        n_merges=len(merges) if isinstance(merges, list) else None,
        special={
            name: SpecialToken(i, texts[i] if 0 <= i < len(texts) and isinstance(texts[i], str) else None)
            for name, i in ids.items()
            if type(i) is int
        },
        adds_bos=flag("add_bos_token"),
        adds_eos=flag("add_eos_token"),
        chat_template=None if template is None else len(template),
    )


def _vocabulary_size(file: GGUFFile) -> int | None:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _file_type(number: object) -> str | None:
    """llama.cpp's name of a mix of tensor types."""
    if type(number) is not int:
        return None
    from gguf.constants import LlamaFileType  # lazily: it takes as long to import as a model's header to read

    return next((kind.name.removeprefix("MOSTLY_") for kind in LlamaFileType if kind == number), f"type {number}")
