"""What `tqgguf convert` does with a request: what SRC holds decides who serves it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from tqgguf.cli.convert_cache import convert_cache
from tqgguf.cli.convert_request import CACHE_FLAGS, MODEL_FLAGS, ConvertRequest, refuse_flags
from tqgguf.cli.convert_weights import convert_checkpoint, convert_weights
from tqgguf.formats.carriers import head_kind
from tqgguf.formats.errors import RequestError
from tqgguf.formats.file_kind import FileKind, gguf_kind
from tqgguf.formats.gguf_reader import open_gguf


class Route(NamedTuple):
    """Who serves a kind of SRC: its name in messages, the flags that are not about it and what they are about."""

    name: str
    foreign_flags: dict[str, str]
    flags_are_about: str
    convert: Callable[[ConvertRequest], int]


_CACHE = Route("a prompt cache", MODEL_FLAGS, "models", convert_cache)
_MODEL = Route("a model", CACHE_FLAGS, "prompt caches", convert_weights)

ROUTES: dict[FileKind, Route] = {
    FileKind.SNAPSHOT: _CACHE,
    FileKind.SESSION: _CACHE,
    FileKind.SEQUENCE: _CACHE,
    FileKind.SAFETENSORS: _CACHE,
    FileKind.MODEL: _MODEL,
    FileKind.GGUF: _MODEL._replace(name="a GGUF without a prompt cache"),
}


CHECKPOINT = _MODEL._replace(name="a folder with a model", convert=convert_checkpoint)
"""Of a SRC that is a folder."""


def convert(request: ConvertRequest) -> int:
    """Serve the request and return the exit status. What can be refused is refused before anything is written."""
    if os.path.isdir(request.source):
        refuse_flags(request, CHECKPOINT.foreign_flags, CHECKPOINT.flags_are_about, CHECKPOINT.name)
        return CHECKPOINT.convert(request)
    kind = _source_kind(request.source)
    if kind not in ROUTES:
        raise RequestError(f"{request.source}: expected a model or a prompt cache, found a {kind.value}; copy it")
    route = ROUTES[kind]
    refuse_flags(request, route.foreign_flags, route.flags_are_about, route.name)
    return route.convert(request)


def _source_kind(path: str) -> FileKind:
    """What SRC is; what is of no known kind is left to the reader of models, whose refusal says what it is."""
    kind = head_kind(path)
    if kind is not FileKind.GGUF:
        return kind or FileKind.MODEL
    with open_gguf(path) as file:
        return gguf_kind(file.metadata.get, file.tensors)
