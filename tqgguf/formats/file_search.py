"""Finds the files in folders that are of a kind known here, by content or by name; nothing is read but heads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.file_kind import kind_by_head
from tqgguf.formats.gguf_split import SHARD_NAME

SUFFIXES: Final = (".gguf", ".safetensors")
"""Names of files that are to be of a known kind: where they are not, that is worth telling."""

_SNIFFED_BYTES: Final = 16


def find_files(path: str) -> Iterator[str]:
    """`path` itself if it is no folder; else the files below it that are of a known kind, in the order of their names.
    Links to folders are not followed. TqggufError: a folder cannot be read.
    """
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=_refuse):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(folder, name)
            if name.endswith(SUFFIXES) or _is_known(file):
                yield file


def group_sets(paths: Iterable[str]) -> list[list[str]]:
    """The paths, each once, in order; those whose names say that they are shards of one set are together."""
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        shard = SHARD_NAME.fullmatch(os.path.abspath(path))
        groups.setdefault(f"{shard['prefix']}-of-{shard['count']}" if shard else f"{path}/", []).append(path)
    return list(groups.values())


def _is_known(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED_BYTES)
            return len(head) == _SNIFFED_BYTES and kind_by_head(head) is not None
    except OSError:
        return False  # it has not the name of such a file either


def _refuse(error: OSError) -> None:
    raise TqggufError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
