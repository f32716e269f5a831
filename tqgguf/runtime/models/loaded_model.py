"""What loading ends in, whatever the model came from: an mlx-lm model, its tokenizer and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.text.text_tokenizer import TextTokenizer

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) while weights load."""

Form = Literal["dense", "packed", "blocks"]
"""dense: weights become float32. packed: they stay as compact and exact as mlx can hold them. blocks: a GGUF's matrices
stay in its blocks, between activations of half precision; other models' are packed."""


def default_form() -> Form:
    """Blocks on an NVIDIA GPU; packed on a Mac's, where nobody has measured yet which of both is faster; dense on a
    CPU, where mlx is slow with everything but float32."""
    if mx.default_device() == mx.cpu:
        return "dense"
    return "blocks" if mx.cuda.is_available() else "packed"


class ServedConfig(Protocol):
    """What a session and a command line ask of a model's sizes."""

    @property
    def architecture(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rope_overridden(self) -> bool: ...
    @property
    def lacks_window(self) -> bool: ...
    def layer_shapes(self) -> list[LayerShape]:
        """The sizes of every attention layer's KV cache."""


_FINGERPRINT = "_tqgguf_fingerprint"
"""Attribute of an mlx-lm model, so that caches know what they were made for."""


def fingerprint_of(model: Any) -> Fingerprint | None:
    """Of an mlx-lm model that was loaded here; None for others."""
    return getattr(model, _FINGERPRINT, None)


def network_of(model: Any) -> Any:
    """The mlx-lm model, of itself or of a `LoadedModel`. RequestError: it is neither."""
    network = model.model if isinstance(model, LoadedModel) else model
    if not (hasattr(network, "layers") or hasattr(network, "make_cache")):
        raise RequestError(
            f"model: expected an mlx-lm model, or what tqgguf.load_model gave, found {type(model).__name__}"
        )
    return network


@dataclass(frozen=True)
class LoadedModel:
    """`model` maps token ids [1, n] and a cache to logits [1, n, vocabulary]. fingerprint: what it is known by."""

    model: Any
    tokenizer: TextTokenizer
    config: ServedConfig
    fingerprint: Fingerprint | None = None

    def __post_init__(self) -> None:
        if self.fingerprint is not None:
            setattr(self.model, _FINGERPRINT, self.fingerprint)

    def fill(self, tokens: mx.array, cache: list[Any]) -> None:
        """Have the cache hold tokens [1, n] too, once it is evaluated; their logits are not wanted."""
        self.outputs(tokens, cache)

    def last_logits(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Logits [vocabulary] after the last of tokens [1, n]."""
        return self.logits(self.outputs(tokens, cache)[:, -1:])[0, -1]

    def outputs(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """What `logits` makes logits of, [1, n, ...], for tokens [1, n]: here the logits themselves."""
        return self.model(tokens, cache=cache)

    def logits(self, outputs: mx.array) -> mx.array:
        """Logits [1, rows, vocabulary] of any rows of `outputs`."""
        return outputs
