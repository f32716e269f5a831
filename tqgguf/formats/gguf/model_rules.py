"""Judges what a GGUF model says of itself: are its metadata of the right kinds, can its numbers be, do they agree with
each other and with the tensors?

Rules are generators of defects, not raised. What is not in the tables of gguf_model_keys is not looked at, so models
of other architectures have little to fear. Nor are the tensors' values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.model_keys import (
    ARCHITECTURE_KEYS,
    ARRAY_KEYS,
    AS_LONG_AS_TOKENS,
    AT_MOST,
    BIASES,
    DENSE_ARCHITECTURES,
    DENSE_KEYS,
    EXPERTS,
    INTEGER,
    MATRICES,
    MAX_HEADS,
    MAX_LAYERS,
    MODEL_TENSORS,
    PER_LAYER_KEYS,
    PLAIN_KEYS,
    RECURRENT,
    REQUIRED_KEYS,
    VECTORS,
)
from tqgguf.formats.gguf.parse import ARRAY_HEADER_BYTES, Entry, ParsedGguf, TensorRecord
from tqgguf.formats.gguf.types import INTEGER_TYPES, ValueType
from tqgguf.formats.wording import shown

_BLOCK: Final = re.compile(r"blk\.(\d{1,9})\.(.+)", re.DOTALL)
_TOKEN_ID: Final = re.compile(r"tokenizer\.ggml\.\w+_token_ids?")
_TOKENS: Final = "tokenizer.ggml.tokens"


def judge_metadata(path: str, entries: Iterable[Entry]) -> Iterator[GgufError]:
    """Defects in what one file's metadata say, whatever else is there."""
    yield from _Metadata(path, entries).defects()


def judge_tensors(files: Sequence[ParsedGguf]) -> Iterator[GgufError]:
    """Defects between the metadata of a whole model, which the first of its files has, and its tensors."""
    tensors = {tensor.name: (parsed, tensor) for parsed in files for tensor in parsed.tensors}
    yield from _Tensors(_Metadata(files[0].path, files[0].entries), tensors).defects()


class _Metadata:
    """The metadata of a model. Getters answer None where a key is absent or of another type."""

    def __init__(self, path: str, entries: Iterable[Entry]) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        for entry in entries:
            self.entries.setdefault(entry.key, entry)
        architecture = self.entries.get("general.architecture")
        is_text = architecture is not None and architecture.type.value is ValueType.STRING
        self.architecture: str | None = architecture.value if architecture is not None and is_text else None

    def entry(self, suffix: str) -> Entry | None:
        return self.entries.get(f"{self.architecture}.{suffix}")

    def integer(self, suffix: str) -> int | None:
        entry = self.entry(suffix)
        return int(entry.value) if entry is not None and entry.type.value in INTEGER_TYPES else None

    def integers(self, suffix: str) -> list[int] | None:
        """The values for all layers of a key that may have one for all or one for each."""
        entry = self.entry(suffix)
        if entry is None:
            return None
        if entry.type.element in INTEGER_TYPES:
            return [int(value) for value in entry.value[: MAX_LAYERS + 1]]
        return [int(entry.value)] if entry.type.value in INTEGER_TYPES else None

    def bad(self, code: str, entry: Entry, expected: str, found: object, at: int | None = None) -> GgufError:
        offset = entry.value_offset if at is None else at
        message = f"metadata key {shown(entry.key)}: expected {expected}, found {found}"
        return GgufError(code, self.path, message, offset=offset, expected=expected, found=found)

    def defects(self) -> Iterator[GgufError]:
        yield from self._types()
        said = self.entries.get("general.type")
        if said is not None and said.type.value is ValueType.STRING and said.value != "model":
            yield self.bad("general-type", said, "model, as the file's tensors are", shown(said.value))
        yield from self._sizes()
        yield from self._heads()
        yield from self._vocabulary()

    def _types(self) -> Iterator[GgufError]:
        named = {f"{self.architecture}.{suffix}": kind for suffix, kind in ARCHITECTURE_KEYS.items()}
        per_layer = {f"{self.architecture}.{suffix}" for suffix in PER_LAYER_KEYS}
        for key, entry in self.entries.items():
            kind = PLAIN_KEYS.get(key) or named.get(key)
            if key in ARRAY_KEYS:
                yield from self._elements(entry, ARRAY_KEYS[key])
            elif key in per_layer:
                if entry.type.scalar not in INTEGER_TYPES:
                    yield self.bad("metadata-type", entry, "an integer, or one for each layer", str(entry.type))
            elif kind is not None and (entry.type.scalar if key in named else entry.type.value) not in kind[1]:
                yield self.bad("metadata-type", entry, kind[0], str(entry.type))
            elif kind is not None and isinstance(entry.value, float) and not math.isfinite(entry.value):
                yield self.bad("metadata-value", entry, "a finite number", entry.value)

    def _elements(self, entry: Entry, allowed: tuple[ValueType, ...]) -> Iterator[GgufError]:
        expected = f"an array of {' or '.join(each.name for each in allowed)}"
        if entry.type.element is None:
            yield self.bad("metadata-type", entry, expected, str(entry.type))
        elif entry.type.element not in allowed:
            yield self.bad("element-type", entry, expected, str(entry.type))

    def _sizes(self) -> Iterator[GgufError]:
        n_layers, entry = self.integer("block_count"), self.entry("block_count")
        if entry is not None and n_layers is not None and not 0 < n_layers <= MAX_LAYERS:
            yield self.bad("block-count", entry, f"1 to {MAX_LAYERS}", n_layers)
        for suffix, most in AT_MOST.items():
            value, entry = self.integer(suffix), self.entry(suffix)
            if entry is not None and value is not None and not 0 < value <= most:
                code = "head-count" if suffix.startswith("attention.") else "metadata-value"
                yield self.bad(code, entry, f"1 to {most}", value)
        for suffix in PER_LAYER_KEYS:
            entry = self.entry(suffix)
            is_array = entry is not None and entry.type.element in INTEGER_TYPES
            if entry is not None and is_array and n_layers and len(entry.value) != n_layers:
                code = "head-count" if suffix.startswith("attention.") else "metadata-value"
                found = f"{len(entry.value)} values"
                yield self.bad(code, entry, f"a value for each of {n_layers} layers", found, entry.value_offset + 4)

    def _heads(self) -> Iterator[GgufError]:
        heads, entry = self.integers("attention.head_count"), self.entry("attention.head_count")
        hidden = self.integer("embedding_length")
        if entry is None or not heads or (self.architecture or "").startswith(RECURRENT):
            return
        most = min(hidden, MAX_HEADS) if hidden and hidden > 0 else MAX_HEADS
        is_array = entry.type.element is not None
        for n in heads:
            if not (0 if is_array else 1) <= n <= most:
                yield self.bad("head-count", entry, f"1 to {most} heads", n)
                return
        if hidden and self.entry("attention.key_length") is None and not is_array and hidden % heads[0]:
            yield self.bad("head-count", entry, f"heads that the embedding length {hidden} divides into", heads[0])
        kv_heads, kv_entry = self.integers("attention.head_count_kv"), self.entry("attention.head_count_kv")
        if kv_entry is None or not kv_heads:
            return
        if len(heads) == len(kv_heads) or 1 in (len(heads), len(kv_heads)):
            n = max(len(heads), len(kv_heads))
            for q, kv in zip(heads * (n // len(heads)), kv_heads * (n // len(kv_heads)), strict=False):
                may_be_none = kv_entry.type.element is not None and kv == 0
                if q and not may_be_none and not (0 < kv <= q and q % kv == 0):
                    yield self.bad("head-count", kv_entry, f"a divisor of the {q} query heads", kv)
                    return

    def _vocabulary(self) -> Iterator[GgufError]:
        tokens = self.entries.get(_TOKENS)
        if tokens is None or tokens.type.element is not ValueType.STRING or not tokens.value:
            return
        n = len(tokens.value)
        for key in AS_LONG_AS_TOKENS:
            entry = self.entries.get(key)
            if entry is not None and entry.type.element in ARRAY_KEYS[key] and len(entry.value) != n:
                expected, found = f"a value for each of {n} tokens", f"{len(entry.value)} values"
                yield self.bad("vocabulary-size", entry, expected, found, entry.value_offset + 4)
        for key, entry in self.entries.items():
            if _TOKEN_ID.fullmatch(key):
                yield from self._token_id(entry, n)
        model, pre = self.entries.get("tokenizer.ggml.model"), self.entries.get("tokenizer.ggml.pre")
        if model is not None and model.says("gpt2") and (pre is None or pre.says("default")):
            found = "none" if pre is None else "'default'"
            message = f"tokenizer.ggml.pre: expected the name of a way to cut texts into words, found {found}"
            at = None if pre is None else pre.value_offset
            yield GgufError("pretokenizer", self.path, message, offset=at, found=found)

    def _token_id(self, entry: Entry, n: int) -> Iterator[GgufError]:
        is_array = entry.type.element is not None
        if entry.type.scalar not in INTEGER_TYPES:
            yield self.bad("metadata-type", entry, INTEGER[0], str(entry.type))
            return
        values = np.atleast_1d(entry.value)
        bad = np.flatnonzero((values < 0) | (values >= n))
        if bad.size:
            i = int(bad[0])
            at = entry.value_offset + (ARRAY_HEADER_BYTES + i * values.itemsize if is_array else 0)
            yield self.bad("special-token", entry, f"a token of the vocabulary, 0 to {n - 1}", int(values[i]), at)


class _Tensors:
    """The tensors of a model, held against its metadata."""

    def __init__(self, metadata: _Metadata, tensors: Mapping[str, tuple[ParsedGguf, TensorRecord]]) -> None:
        self.metadata, self.tensors, self.path = metadata, tensors, metadata.path
        self.layers: dict[int, str] = {}  # layer -> the first of its tensors
        for name in tensors:
            if match := _BLOCK.fullmatch(name):
                self.layers.setdefault(int(match[1]), name)

    def defects(self) -> Iterator[GgufError]:
        metadata = self.metadata
        if not self.layers:
            return
        if metadata.architecture is None:
            if "general.architecture" not in metadata.entries:
                yield self._missing_key("general.architecture")
            return
        n_layers = metadata.integer("block_count")
        layer_tensors = DENSE_ARCHITECTURES.get(metadata.architecture, ())
        needed_keys = DENSE_KEYS if layer_tensors else REQUIRED_KEYS
        missing_keys = [suffix for suffix in needed_keys if metadata.entry(suffix) is None]
        if n_layers is not None and 0 < n_layers <= MAX_LAYERS:
            yield from self._count(n_layers)
        needed = self._needed(min(n_layers or 0, MAX_LAYERS) or len(self.layers), layer_tensors)
        missing = [name for name in needed if name not in self.tensors]
        if len(missing_keys) + len(missing) > (len(needed_keys) + len(needed)) / 2:
            parts = len(needed_keys) + len(needed)
            found = f"{parts - len(missing_keys) - len(missing)} of {parts}"
            message = f"such a model has at least {parts} keys and tensors, of which this file has {found.split()[0]}"
            yield GgufError("model-fragment", self.path, message, expected=parts, found=found)
            return
        for suffix in missing_keys:
            yield self._missing_key(f"{metadata.architecture}.{suffix}")
        for name in missing:
            message = f"tensor {shown(name)} is missing, which such a model needs"
            yield GgufError("tensor-missing", self.path, message, tensor=name, expected=name)
        if layer_tensors and n_layers is not None:
            yield from self._shapes(min(n_layers, MAX_LAYERS))

    def _needed(self, n_layers: int, layer_tensors: Sequence[str]) -> list[str]:
        """Tensors of a dense model, without those of layers of which there is none. Of other models none are known."""
        if not layer_tensors:
            return []
        absent = EXPERTS if self.metadata.integer("expert_count") else frozenset()
        layers = [
            f"blk.{layer}.{part}.weight"
            for layer in range(n_layers)
            if layer in self.layers
            for part in layer_tensors
            if part not in absent
        ]
        biases = BIASES.get(self.metadata.architecture or "", ())
        layers += [f"blk.{n}.{part}.bias" for n in range(n_layers) if n in self.layers for part in biases]
        return [*MODEL_TENSORS, *layers]

    def _missing_key(self, key: str) -> GgufError:
        message = f"metadata key {shown(key)} is missing, which such a model needs"
        return GgufError("metadata-missing", self.path, message, expected=key)

    def _count(self, n_layers: int) -> Iterator[GgufError]:
        last, entry = max(self.layers), self.metadata.entry("block_count")
        if last >= n_layers and entry is not None:
            found = f"{n_layers}, and tensor {shown(self.layers[last])}"
            yield self.metadata.bad("block-count", entry, f"{last + 1} or more layers", found)
        for layer in range(n_layers):
            if layer not in self.layers:
                yield GgufError(
                    "tensor-missing", self.path, f"layer {layer} of {n_layers} has no tensors", tensor=f"blk.{layer}.*"
                )

    def _shapes(self, n_layers: int) -> Iterator[GgufError]:
        sizes = self._sizes()
        if sizes is None:
            return
        yield from self._shape("token_embd.weight", (sizes["hidden"], sizes["tokens"]))
        yield from self._shape("output.weight", (sizes["hidden"], sizes["tokens"]))
        yield from self._shape("output_norm.weight", (sizes["hidden"],))
        yield from self._shape("rope_freqs.weight", (sizes["pairs"],))
        for layer in range(n_layers):
            for part, (n_in, n_out) in MATRICES.items():
                yield from self._shape(f"blk.{layer}.{part}.weight", (sizes[n_in], sizes[n_out]))
                yield from self._shape(f"blk.{layer}.{part}.bias", (sizes[n_out],))
            for part, n in VECTORS.items():
                yield from self._shape(f"blk.{layer}.{part}.weight", (sizes[n],))

    def _sizes(self) -> dict[str, int | None] | None:
        """Sizes by the names of MATRICES and VECTORS; None if they are not the same in all layers, or not all there."""
        metadata = self.metadata
        hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
        kv_heads = metadata.integer("attention.head_count_kv") or heads
        ffn = metadata.integer("feed_forward_length")
        if not hidden or not heads or not kv_heads or not ffn:
            return None
        k = metadata.integer("attention.key_length") or hidden // heads
        v = metadata.integer("attention.value_length") or hidden // heads
        turned = metadata.integer("rope.dimension_count") or k
        tokens: Any = metadata.entries.get(_TOKENS)
        is_list = tokens is not None and tokens.type.element is ValueType.STRING and tokens.value
        return {
            "hidden": hidden, "q": heads * k, "k": kv_heads * k, "v": kv_heads * v, "output": heads * v, "ffn": ffn,
            "head": k, "pairs": turned // 2,
            "tokens": len(tokens.value) if is_list else None,
        }  # fmt: skip

    def _shape(self, name: str, expected: tuple[int | None, ...]) -> Iterator[GgufError]:
        parsed, tensor = self.tensors.get(name, (None, None))
        if parsed is None or tensor is None:
            return
        found = tensor.dims
        if len(found) == len(expected) and all(
            want in (None, have) for want, have in zip(expected, found, strict=True)
        ):
            return
        wanted, have = (" x ".join("any" if n is None else str(n) for n in shape) for shape in (expected, found))
        message = f"tensor {shown(name)}: expected shape {wanted} by the metadata, found {have or 'a scalar'}"
        yield GgufError(
            "tensor-shape", parsed.path, message, offset=tensor.dims_offset, tensor=name, expected=wanted, found=have
        )
