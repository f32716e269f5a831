"""Finds the files in folders that are of a kind known here, by content or by name; nothing is read but heads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.file_kind import kind_by_head
from tqgguf.formats.gguf.split import SHARD_NAME
from tqgguf.formats.mapped_file import read_head

SUFFIXES: Final = (".gguf", ".safetensors")
"""Names of files that are to be of a known kind: where they are not, that is worth telling."""

_SNIFFED_BYTES: Final = 16


def find_files(path: str, report: Callable[[TqggufError], None]) -> Iterator[str]:
    """`path` itself if it is no folder; else the files below it that are of a known kind, in the order of their names.
    Links to folders are not followed. report: takes the error of each folder that cannot be read; the search goes on.
    """

    def unreadable(error: OSError) -> None:
        report(TqggufError(f"{error.filename}: cannot be read: {error.strerror or error}"))

    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=unreadable):
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
    if not os.path.isfile(path):  # opening a device may do something
        return False
    try:
        head = read_head(path, _SNIFFED_BYTES, "a file")
        return len(head) == _SNIFFED_BYTES and kind_by_head(head) is not None
    except TqggufError:
        return False  # it has not the name of such a file either
