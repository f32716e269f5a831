"""What `tqgguf inspect` does: read the file, choose what is asked for, print."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase

from tqgguf.cli import inspect_json, inspect_lists, inspect_text
from tqgguf.cli.inspect_request import EVERY_KEY, InspectRequest
from tqgguf.cli.json_text import json_text
from tqgguf.formats.errors import RequestError
from tqgguf.formats.file_kind import CACHE_KINDS, FileKind
from tqgguf.formats.inspection.cache import MLX_CACHE_KIND
from tqgguf.formats.inspection.facts import Inspection, MetadataValue
from tqgguf.formats.inspection.inspect import inspect as inspect_file
from tqgguf.formats.wording import shown


def inspect(request: InspectRequest) -> int:
    """Print what is asked for and return the exit status."""
    found, key, tensors = inspect_file(request.file), request.key, request.tensors
    entries = None if key is None else chosen(found, key)
    if request.json_output:
        values = inspect_json.as_json(found, tensors, entries, request.in_full)
        print(json_text(values), flush=True)
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines: list[str] = []
    if entries is not None:
        whole = key if key in entries else None
        lines += inspect_lists.value(entries[whole]) if whole else inspect_lists.metadata(entries, width)
    if tensors:
        lines += inspect_lists.tensors(found, width)
    print("\n".join(lines if tensors or entries is not None else inspect_text.lines(found, width)), flush=True)
    return 0


def inspect_cache(path: str, json_output: bool) -> int:
    """`inspect` of a file that must be a prompt cache. RequestError: it is another kind of file."""
    kind = inspect_file(path).kind
    if kind not in CACHE_KINDS - {FileKind.SAFETENSORS} | {MLX_CACHE_KIND}:
        raise RequestError(f"{path}: expected a prompt cache, found a file of kind {kind}; see `tqgguf inspect`")
    return inspect(InspectRequest(path, json_output=json_output))


def chosen(found: Inspection, key: str) -> Mapping[str, MetadataValue]:
    """The entries that a key or pattern names. RequestError: none."""
    if key == EVERY_KEY or key in found.metadata:
        return found.metadata if key == EVERY_KEY else {key: found.metadata[key]}
    entries = {name: value for name, value in found.metadata.items() if fnmatchcase(name, key)}
    if not entries:
        near = difflib.get_close_matches(key, found.metadata, n=3, cutoff=0.4)
        advice = f"; did you mean {' or '.join(map(shown, near))}?" if near else ""
        raise RequestError(f"--metadata {shown(key)}: {found.path} has no such key{advice}")
    return entries
