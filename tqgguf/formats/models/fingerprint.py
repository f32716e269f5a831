"""What a model is known by: SHA-256 hashes that say whether a cache or a calibration was made with it.

spec/fingerprint.md has them byte by byte. Version 1. Four hashes, so that a refusal can name what differs:

* weights: of every tensor, sorted by name: name, shape, type, number of bytes, first and last 4 KiB of its data. Not
  where tensors lie: shards and the merged file are one model.
* hyperparameters: what else decides the computation: of a GGUF `general.architecture` and the keys `<architecture>.*`,
  of an MLX folder config.json; without the context length, which decides nothing, and what only describes.
* rope: the RoPE parameters among these, or what the user has put in their places.
* tokenizer: of a GGUF the keys `tokenizer.*`, of a folder tokenizer.json and tokenizer_config.json; without chat
  templates, which make no token another one.

Each hash is fed lines of JSON (keys sorted) and raw bytes, every one after its length, so that no two models feed it
the same. Integers count by their value, whatever their width in the file. A few pages of each tensor are read: a change
in the middle of a large one is not seen; this tells models apart, and protects from nobody.

In a GGUF that belongs to a model the hashes stand under `tqgguf.fingerprint.*`, with their version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tqgguf.formats.gguf.metadata import MetadataAccess
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.json_file import read_bytes, read_json
from tqgguf.formats.models.folder_files import WEIGHT_FILES
from tqgguf.formats.safetensors import open_safetensors
from tqgguf.formats.wording import shown

VERSION = 1
KEYS = "tqgguf.fingerprint."
SAMPLE_BYTES = 4096  # of a tensor's data, from its beginning and from its end

_CONTEXT_LENGTH = "context_length"
_ROPE = "rope."
_CHAT_TEMPLATE = "tokenizer.chat_template"
_IDENTITY_DIGITS = 32

# config.json of an MLX folder: what is RoPE's, and what decides nothing about keys and values.
_FOLDER_ROPE = ("rope", "rotary")
_DESCRIPTIVE = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
_FOLDER_TEMPLATE = "chat_template"


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 in hexadecimal digits of each part of a model; see the module."""

    weights: str
    hyperparameters: str
    rope: str
    tokenizer: str

    @property
    def identity(self) -> str:
        """32 hexadecimal digits for weights and hyperparameters, to name files by."""
        return sha256((self.weights + self.hyperparameters).encode()).hexdigest()[:_IDENTITY_DIGITS]

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the parts that differ, in the order of the fields."""
        return tuple(part for part in PARTS if getattr(self, part) != getattr(other, part))

    def entries(self) -> dict[str, str | int]:
        """Metadata entries of a GGUF that belongs to the model; `read_fingerprint` is the way back."""
        return {f"{KEYS}version": VERSION, **{KEYS + part: getattr(self, part) for part in PARTS}}


PARTS = tuple(field.name for field in fields(Fingerprint))


def read_fingerprint(file: MetadataAccess) -> Fingerprint:
    """The fingerprint that a GGUF says it belongs to. FormatError: none, a damaged one, or one of another version."""
    version = file.uint(f"{KEYS}version")
    if version != VERSION:
        raise file.bad_value(f"{KEYS}version", f"a model's fingerprint of version {VERSION}", f"version {version}")
    parts = {part: file.text(KEYS + part) for part in PARTS}
    for part, digits in parts.items():
        if re.fullmatch(r"[0-9a-f]{64}", digits) is None:
            raise file.bad_value(KEYS + part, "64 hexadecimal digits", shown(digits))
    return Fingerprint(**parts)


def fingerprint_gguf(file: GGUFFile, rope: Mapping[str, float] | None = None) -> Fingerprint:
    """The fingerprint of an open GGUF model. rope: what the user has put in the place of `<architecture>.rope.*` keys,
    by their suffixes after the last `rope.` ("freq_base"). GgufError: a tensor whose type is unknown.
    """
    architecture = file.text("general.architecture")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    turning = {key.removeprefix(_ROPE): value for key, value in own.items() if key.startswith(_ROPE)}
    others = {key: value for key, value in own.items() if not key.startswith(_ROPE) and key != _CONTEXT_LENGTH}
    words = {
        key: value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.") and not key.startswith(_CHAT_TEMPLATE)
    }
    tensors = (
        (name, (file.tensors[name].shape, file.tensors[name].ggml_type), file.raw(name).data)
        for name in sorted(file.tensors)
    )
    return Fingerprint(
        weights=_hash_tensors(tensors),
        hyperparameters=_hash_entries("hyperparameters", {"architecture": architecture, **others}),
        rope=_hash_entries("rope", {**turning, **(rope or {})}),
        tokenizer=_hash_entries("tokenizer", words),
    )


def fingerprint_folder(folder: str | os.PathLike[str]) -> Fingerprint:
    """The fingerprint of an MLX safetensors folder. FormatError, TqggufError: a file is damaged, or cannot be read."""
    path = Path(folder)
    config = dict(_flat(read_json(path / "config.json")))
    turning = {key: value for key, value in config.items() if any(word in key for word in _FOLDER_ROPE)}
    others = {k: v for k, v in config.items() if k not in turning and k.rpartition(".")[2] not in _DESCRIPTIVE}
    words: dict[str, Any] = {"tokenizer.json": sha256(read_bytes(path / "tokenizer.json")).hexdigest()}
    if (path / "tokenizer_config.json").exists():
        settings = read_json(path / "tokenizer_config.json")
        words |= {key: value for key, value in settings.items() if key != _FOLDER_TEMPLATE}
    tensors = {
        name: tensor for file in sorted(path.glob(WEIGHT_FILES)) for name, tensor in open_safetensors(file).items()
    }
    return Fingerprint(
        weights=_hash_tensors((name, (t.shape, t.dtype), t.data) for name, t in sorted(tensors.items())),
        hyperparameters=_hash_entries("hyperparameters", others),
        rope=_hash_entries("rope", turning),
        tokenizer=_hash_entries("tokenizer", words),
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested objects, each under its path with dots."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def _begin(part: str) -> _Hash:
    return sha256(f"tqgguf fingerprint {VERSION}: {part}\n".encode())


def _feed(digest: _Hash, data: bytes | memoryview) -> None:
    digest.update(memoryview(data).nbytes.to_bytes(8, "little"))
    digest.update(data)


def _feed_json(digest: _Hash, value: Any) -> None:
    _feed(digest, json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode())


def _hash_tensors(tensors: Iterable[tuple[str, tuple[tuple[int, ...], int | str], memoryview]]) -> str:
    """Of (name, (shape in numpy's order, type), bytes), sorted by name."""
    digest = _begin("weights")
    for name, (shape, kind), data in tensors:
        _feed_json(digest, [name, list(shape), kind, data.nbytes])
        _feed(digest, data[:SAMPLE_BYTES])
        _feed(digest, data[-SAMPLE_BYTES:])
    return digest.hexdigest()


def _hash_entries(part: str, entries: Mapping[str, Any]) -> str:
    digest = _begin(part)
    for key, value in sorted(entries.items()):
        _feed_json(digest, key)
        _feed_value(digest, value)
    return digest.hexdigest()


def _feed_value(digest: _Hash, value: Any) -> None:
    """A metadata value. Long arrays go as bytes: a vocabulary has 262,144 words."""
    if isinstance(value, np.ndarray):
        kind = "f" if value.dtype.kind == "f" else "i"
        _feed_json(digest, [kind, len(value)])
        _feed(digest, value.astype("<f8" if kind == "f" else "<i8").tobytes())
    elif isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        _feed_json(digest, ["s", len(value)])
        _feed(digest, np.fromiter(map(len, value), "<i8", len(value)).tobytes())
        _feed(digest, "".join(value).encode("utf-8", "surrogateescape"))
    elif isinstance(value, list):
        _feed_json(digest, ["l", len(value)])
        for element in value:
            _feed_value(digest, element)
    else:
        _feed_json(digest, value)
