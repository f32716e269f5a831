"""The lists of `tqgguf inspect`: tensors, metadata, single values.

What files hold is shown as text that a terminal can take: control characters and bytes that are no UTF-8 are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tqgguf.cli.figures import aligned, size
from tqgguf.cli.printable import printable
from tqgguf.formats.errors import RequestError
from tqgguf.formats.inspection.facts import DIMS_FASTEST_FIRST, Inspection, MetadataValue

FIRST_ELEMENTS = 8
"""Of an array that is shown in part."""


def clipped(text: str, width: int | None) -> str:
    """text, shortened in its middle where a terminal is narrower."""
    if width is None or len(text) <= width:
        return text
    kept = max(width - 3, 8)
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def tensors(found: Inspection, width: int | None) -> list[str]:
    """A line for each tensor, in the order of the file. RequestError: there are none in such files."""
    if not found.tensors and not found.metadata:
        raise RequestError(f"--tensors: {found.path}: a {found.container} has none")
    several = len(found.files) > 1
    rows = [
        [
            tensor.type,
            " x ".join(map(str, tensor.dims)) or "scalar",
            "?" if tensor.n_bytes is None else size(tensor.n_bytes),
            *([str(tensor.file + 1)] if several else []),
        ]
        for tensor in found.tensors
    ]
    order = "" if found.dims_order == DIMS_FASTEST_FIRST else " (slowest first)"
    heads = ["type", f"dimensions{order}", "bytes", *(["file"] if several else [])]
    names = [printable(tensor.name) for tensor in found.tensors]
    columns = aligned([heads, *rows])
    room = None if width is None else width - max(map(len, columns)) - 2
    names = [clipped(name, room) for name in ("tensor", *names)]
    widest = max(map(len, names))
    return [f"{name.ljust(widest)}  {rest}" for name, rest in zip(names, columns, strict=True)]


def metadata(entries: Mapping[str, MetadataValue], width: int | None) -> list[str]:
    """A line for each entry: key, type, value; of long arrays the beginning."""
    rows = [[printable(key), entry.type, summary(entry.value)] for key, entry in entries.items()]
    return [line if width is None else line[:width] for line in aligned(rows, n_left=3)]


def value(entry: MetadataValue) -> list[str]:
    """A value in full: text as it is, of an array an element a line."""
    if isinstance(entry.value, str):
        return [printable(line.replace("\t", "    ")) for line in entry.value.split("\n")]
    if isinstance(entry.value, (list, np.ndarray)):
        return [element(item) for item in items(entry.value)]
    return [element(entry.value)]


def summary(found: Any) -> str:
    """A value on one line."""
    if not isinstance(found, (list, np.ndarray)):
        return printable(found) if isinstance(found, str) else element(found)
    beginning = ", ".join(element(item) for item in items(found[:FIRST_ELEMENTS]))
    more = ", ..." if len(found) > FIRST_ELEMENTS else ""
    return f"{len(found):,}: {beginning}{more}" if len(found) else "none"


def items(found: Any) -> Iterator[Any]:
    """The elements of a metadata array, numpy's as Python's own."""
    yield from found.tolist() if isinstance(found, np.ndarray) else found


def element(item: Any) -> str:
    """One element of a metadata array in a line of a terminal."""
    if isinstance(item, str):
        return f'"{printable(item)}"'
    if isinstance(item, (list, np.ndarray)):
        return f"[{summary(item)}]"
    if isinstance(item, bool):
        return "true" if item else "false"
    return f"{item:.9g}" if isinstance(item, float) else printable(str(item))
