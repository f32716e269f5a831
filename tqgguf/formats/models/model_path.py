"""Which file or folder is meant by a model's path: a GGUF, a folder of a split set, an MLX folder, or none of these.

What is named is looked for on this machine alone. Nothing is opened but folders.
"""

from __future__ import annotations

import os
import re
from typing import Final

from tqgguf.formats.errors import NO_DOWNLOAD, RequestError
from tqgguf.formats.file_search import group_sets
from tqgguf.formats.gguf.split import SHARD_NAME
from tqgguf.formats.wording import readable

_REMOTE: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("an address", re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)),
    ("the name of a repository", re.compile(r"(?:hf|huggingface|ollama|modelscope):.+", re.DOTALL)),
    ("the name of a repository", re.compile(r"(?!\.)[\w.-]+/[\w.-]+(?<!\.gguf)(?::[\w.-]+)?", re.IGNORECASE)),
    ("the name of a model in a registry", re.compile(r"(?!\.)[\w.-]+:[\w.-]+")),
)
"""What people write instead of a path, whole."""

_LISTED: Final = 8


def model_path(path: str | os.PathLike[str]) -> str:
    """The path to open: of a folder that holds one whole split set of GGUFs its first file, else `path` itself.

    RequestError: a folder of other GGUFs, which the message lists, or the name of what is not on this machine.
    """
    name = os.fsdecode(path)
    if os.path.isdir(name):
        return _in_folder(name)
    if not os.path.lexists(name):
        what = _remote(name)
        if what is not None:
            raise RequestError(f"{readable(name)}: expected the path of a model, found {what}; {NO_DOWNLOAD}")
    return name


def _remote(name: str) -> str | None:
    """What a name that no file has is, if it is no path. A folder that is there makes it one."""
    folder = os.path.dirname(name)
    for what, pattern in _REMOTE:
        if pattern.fullmatch(name) and not (folder and os.path.isdir(folder)):
            return what
    return None


def _in_folder(folder: str) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return folder  # whoever opens it says so
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if not ggufs or "config.json" in names:
        return folder
    sets = group_sets(os.path.join(folder, name) for name in ggufs)
    if len(sets) == 1 and _is_whole(sets[0]):
        return sets[0][0]
    shown = ", ".join(readable(name) for name in ggufs[:_LISTED])
    more = f" and {len(ggufs) - _LISTED} more" if len(ggufs) > _LISTED else ""
    raise RequestError(f"{readable(folder)}: expected a model, found a folder of GGUF files; name one of {shown}{more}")


def _is_whole(paths: list[str]) -> bool:
    """Whether files are all shards of a set by their names."""
    shards = [SHARD_NAME.fullmatch(os.path.basename(path)) for path in paths]
    numbers = [int(shard["number"]) for shard in shards if shard is not None]
    counts = {int(shard["count"]) for shard in shards if shard is not None}
    return len(counts) == 1 and sorted(numbers) == list(range(1, counts.pop() + 1))
