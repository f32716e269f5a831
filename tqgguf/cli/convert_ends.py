"""What `tqgguf convert` goes from and to: what SRC is by its content, what DST is to be by --to or its name."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.formats.carriers.table import head_kind
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.file_kind import HEAD_BYTES, FileKind, found_instead, gguf_kind
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.wording import readable


class End(StrEnum):
    """One end of a conversion. The value is its name in messages."""

    GGUF = "a GGUF of weights"
    CHECKPOINT = "a Hugging Face folder"
    FOLDER = "a folder for mlx-lm"
    OWN = "a prompt cache of ours"
    SESSION = "a llama.cpp session"
    SEQUENCE = "a llama.cpp sequence file"
    MLX = "a prompt cache of mlx-lm"


CACHE_KINDS: Final[dict[End, FileKind]] = {
    End.OWN: FileKind.SNAPSHOT,
    End.SESSION: FileKind.SESSION,
    End.SEQUENCE: FileKind.SEQUENCE,
    End.MLX: FileKind.SAFETENSORS,
}
"""The ends that are prompt caches."""

_SOURCES: Final[dict[FileKind, End]] = {
    FileKind.MODEL: End.GGUF,
    FileKind.GGUF: End.GGUF,
    **{kind: end for end, kind in CACHE_KINDS.items()},
}

_CACHES = {"gguf": End.OWN, "session": End.SESSION, "sequence": End.SEQUENCE, "mlx-lm": End.MLX}
_CACHE_ENDINGS = {
    ".gguf": End.OWN,
    ".session": End.SESSION,
    ".promptcache": End.SESSION,
    ".seq": End.SEQUENCE,
    ".slot": End.SEQUENCE,
    ".safetensors": End.MLX,
}
_MODELS = {"gguf": End.GGUF, "mlx-lm": End.FOLDER}
_MODEL_ENDINGS = {".gguf": End.GGUF, "": End.FOLDER}


def source_end(path: str) -> End:
    """What SRC is. FormatError: nothing that is converted; RequestError: what is only copied."""
    if os.path.isdir(path):
        return End.CHECKPOINT
    kind = head_kind(path)
    if kind is None:
        raise _no_source(path)
    if kind is FileKind.GGUF:
        with open_gguf(path) as file:
            kind = gguf_kind(file.metadata, file.tensors)
    if kind not in _SOURCES:
        raise RequestError(f"{path}: expected a model or a prompt cache, found a {kind.value}; copy it")
    return _SOURCES[kind]


def target_end(request: ConvertRequest, source: End) -> End:
    """What DST is to be; RequestError where neither --to nor its name says it, or SRC cannot become that."""
    is_cache = source in CACHE_KINDS
    ending = os.path.splitext(request.target)[1].lower()
    if request.to is not None:
        end = (_CACHES if is_cache else _MODELS).get(request.to)
    else:
        end = (_CACHE_ENDINGS if is_cache else _MODEL_ENDINGS).get(ending)
    if end is None and is_cache:
        raise RequestError(f"{request.target}: expected a name ending in {', '.join(_CACHE_ENDINGS)}, or --to FORMAT")
    if end is None:
        raise RequestError(
            f"{request.target}: a model becomes a GGUF or a folder for mlx-lm; expected a name ending in .gguf, one "
            "without an ending, --to gguf or --to mlx-lm"
        )
    if source is End.CHECKPOINT and end is not End.GGUF:
        raise RequestError(f"{request.source}: a folder becomes a GGUF; expected a DST ending in .gguf, or --to gguf")
    return end


def _no_source(path: str) -> FormatError:
    with open(path, "rb") as file:
        _, what = found_instead(file.read(HEAD_BYTES))
    return FormatError(
        f"{readable(path)}: expected a model (a GGUF, a Hugging Face folder) or a prompt cache (a GGUF, llama.cpp's "
        f"session or sequence file, mlx-lm's safetensors), found {what}"
    )
