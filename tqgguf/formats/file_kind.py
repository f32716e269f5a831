"""What a file is, by its first bytes, and of a GGUF by what it says of itself: the one table for every verb that takes
files of several kinds. Nothing is opened here, and nothing is believed beyond the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.types import MAGIC
from tqgguf.formats.wording import shown

HEAD_BYTES: Final = 512
"""Enough of a file's beginning for everything below."""


class FileKind(StrEnum):
    """What a file holds. The value is its name in output."""

    MODEL = "model"
    SNAPSHOT = "snapshot"
    CALIBRATION = "calibration"
    GGUF = "gguf"
    """A GGUF of another purpose: an adapter, a projector, an importance matrix, a carrier of nothing known here."""
    SESSION = "session"
    SEQUENCE = "sequence"
    SAFETENSORS = "safetensors"


CACHE_KINDS: Final = frozenset({FileKind.SNAPSHOT, FileKind.SESSION, FileKind.SEQUENCE, FileKind.SAFETENSORS})
"""Kinds that can hold a prompt cache."""

GENERAL_TYPES: Final[dict[str, FileKind]] = {
    "model": FileKind.MODEL,
    "kv-snapshot": FileKind.SNAPSHOT,
    "kv-calibration": FileKind.CALIBRATION,
}
"""Values of `general.type` in a GGUF; any other is FileKind.GGUF. Where it is absent, the architecture decides."""

OWN_KEYS: Final[dict[str, FileKind]] = {
    "tqgguf.snapshot.": FileKind.SNAPSHOT,
    "tqgguf.checksum.": FileKind.SNAPSHOT,
    "tqgguf.calibration.": FileKind.CALIBRATION,
}
"""What keys begin with that only one kind of file has, whatever its `general.type` was damaged to."""

OTHER_PURPOSES: Final[dict[str, str]] = {
    "adapter": "a LoRA adapter, to be used beside a model",
    "mmproj": "a projector of images or sound, to be used beside a model",
    "imatrix": "an importance matrix, for quantising a model",
}
"""In words, what llama.cpp's further values of `general.type` mean."""

EMBEDDING: Final = "token_embd.weight"
"""A tensor that every language model has, and no adapter, projector or cache."""

STATE_MAGICS: Final[dict[bytes, FileKind]] = {b"nsgg": FileKind.SESSION, b"qsgg": FileKind.SEQUENCE}
STATE_KINDS: Final = frozenset(STATE_MAGICS.values())
"""llama.cpp's files that hold a prompt cache."""

MAX_SAFETENSORS_HEADER: Final = 1 << 24
"""Bytes of JSON, of which a hostile file can make thirty times as much memory. A model with a hundred thousand tensors
in one file has some 12 MB, a shard a few; the safetensors library goes up to 100 MB.
"""


class OtherFile(NamedTuple):
    """What people hand over instead of a model: its first bytes, the rule it breaks, what it is in words."""

    prefix: bytes
    code: str
    what: str


_HTML: Final = "an HTML page: a download saved a web page instead of the model"

OTHER_FILES: Final[tuple[OtherFile, ...]] = (
    OtherFile(
        b"version https://git-lfs",
        "lfs-pointer",
        "a Git LFS pointer: the model itself was not downloaded; run `git lfs pull`",
    ),
    OtherFile(b"<!doctype html", "html-page", _HTML),
    OtherFile(b"<html", "html-page", _HTML),
    OtherFile(b"<?xml", "html-page", "an XML page: a download saved an error page instead of the model"),
    OtherFile(
        b"pk\x03\x04", "other-format", "a zip archive (or a PyTorch checkpoint); convert the model to GGUF first"
    ),
    OtherFile(b"\x1f\x8b", "other-format", "compressed with gzip; unpack it first"),
    OtherFile(b"lmgg", "other-format", "an old GGML file; convert the original model to GGUF again"),
    OtherFile(b"fmgg", "other-format", "an old GGML file (ggmf); convert the original model to GGUF again"),
    OtherFile(b"tjgg", "other-format", "an old GGML file (ggjt); convert the original model to GGUF again"),
    OtherFile(b"nsgg", "other-format", "a llama.cpp session file, which holds a prompt cache and no model"),
    OtherFile(b"qsgg", "other-format", "a llama.cpp sequence file, which holds a prompt cache and no model"),
    OtherFile(b"{", "other-format", "JSON text; a download may have saved an error message instead of the model"),
)


def kind_by_head(head: bytes) -> FileKind | None:
    """The kind of a file that begins so; FileKind.GGUF for every GGUF (`gguf_kind` says more), None for other files."""
    if head and MAGIC.startswith(head[:4]):  # or one that is cut within its magic
        return FileKind.GGUF
    if head[:4] in STATE_MAGICS:
        return STATE_MAGICS[head[:4]]
    return FileKind.SAFETENSORS if is_safetensors(head) else None


def is_safetensors(head: bytes) -> bool:
    """Whether a file begins as safetensors do: u64 length of a JSON header, then the header itself. To be asked before
    `other_kind`, as that length may look like any text.
    """
    return head[8:9] == b"{" and head[9:10] in b'"} \n' and int.from_bytes(head[:8], "little") < 1 << 32


def other_kind(head: bytes) -> OtherFile | None:
    """What a file that begins so is, if it is of a kind that is often taken for a model."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return next((other for other in OTHER_FILES if text.startswith(other.prefix)), None)


def gguf_kind(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> FileKind:
    """The kind of a GGUF, by its metadata and its tensors' names. Our own keys count for more than `general.type`, and
    so does the embedding of a language model where `general.type` is nothing that is known here.
    """
    for prefix, kind in OWN_KEYS.items():
        if any(key.startswith(prefix) for key in metadata):
            return kind
    general_type = metadata.get("general.type")
    if isinstance(general_type, str) and general_type in (GENERAL_TYPES | OTHER_PURPOSES):
        return GENERAL_TYPES.get(general_type, FileKind.GGUF)
    if general_type is not None:
        return FileKind.MODEL if EMBEDDING in tensor_names else FileKind.GGUF
    if "general.architecture" in metadata or any(map(is_model_tensor, tensor_names)):
        return FileKind.MODEL
    return FileKind.GGUF


def gguf_purpose(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> str:
    """What a GGUF is, in words, whatever its kind."""
    kind = gguf_kind(metadata, tensor_names)
    if kind is not FileKind.GGUF:
        return f"a {kind}"
    said = metadata.get("general.type")
    if not isinstance(said, str):
        return "a GGUF that does not say what it is"
    return OTHER_PURPOSES.get(said, f"a GGUF of type {shown(said)}")


def check_is_model(path: str, metadata: Mapping[str, Any], tensor_names: Collection[str]) -> None:
    """FormatError for a GGUF of another purpose."""
    if gguf_kind(metadata, tensor_names) is not FileKind.MODEL:
        raise FormatError(f"{path}: expected a model, found {gguf_purpose(metadata, tensor_names)}")


def is_model_tensor(name: str) -> bool:
    """Whether a tensor's name is one that language models have."""
    return name.startswith(("blk.", "token_embd."))


def found_instead(head: bytes) -> tuple[str, str]:
    """The rule that a file breaks which begins with `head` and is not what was expected, and what it is in words."""
    if not head:
        return "empty-file", "an empty file (0 bytes)"
    if is_safetensors(head):
        return "other-format", "a safetensors file; name its folder instead"
    other = other_kind(head)
    return ("not-gguf", f"a file that begins with {_words(head[:4])}") if other is None else (other.code, other.what)


def _words(head: bytes) -> str:
    """Bytes as they stand in messages: a text where they are one, else hexadecimal numbers."""
    text = head.decode("ascii", "replace")
    return text if text.isascii() and text.isprintable() and not text.isspace() else f"bytes {head.hex(' ')}"
