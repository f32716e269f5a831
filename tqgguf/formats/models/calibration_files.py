"""Where calibration sidecars lie: beside a model under its name, and in the user's cache folder by fingerprint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.split import SHARD_NAME
from tqgguf.formats.models.fingerprint import Fingerprint

SUFFIX = ".kv-calibration.gguf"
_PROGRAM = "tqgguf"


def beside(model: str | os.PathLike[str]) -> Path:
    """The sidecar's path beside a model: `NAME.kv-calibration.gguf` for NAME.gguf, for NAME-00001-of-0000N.gguf and for
    a folder NAME.
    """
    path = Path(os.path.abspath(model))
    shard = SHARD_NAME.fullmatch(path.name)
    stem = shard["prefix"] if shard else path.name if path.is_dir() else path.name.removesuffix(".gguf")
    return path.with_name(stem + SUFFIX)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of calibrations without a place: `$XDG_CACHE_HOME/tqgguf`, else `~/Library/Caches/tqgguf` on macOS and
    `~/.cache/tqgguf` elsewhere. It need not exist.
    """
    home = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):  # others are to be ignored, by the XDG specification
        return Path(home, _PROGRAM)
    return Path(os.path.expanduser("~"), "Library/Caches" if sys.platform == "darwin" else ".cache", _PROGRAM)


def cached(fingerprint: Fingerprint) -> Path:
    """The sidecar's path in the cache folder."""
    return cache_folder() / (fingerprint.identity + SUFFIX)


def make_cache_folder() -> None:
    """RequestError if it cannot be made."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder}: cannot be made: {error.strerror or error}; name a file with -o") from error


def any_cached() -> bool:
    """Whether the cache folder holds a sidecar of any model, so that it is worth asking for this one's fingerprint."""
    try:
        return any(name.endswith(SUFFIX) for name in os.listdir(cache_folder()))
    except OSError:
        return False


def candidates(model: str | os.PathLike[str], fingerprint: Callable[[], Fingerprint]) -> Iterator[Path]:
    """A model's sidecars that exist, beside it first. The fingerprint is asked for only where one may have its name."""
    if (path := beside(model)).exists():
        yield path
    if any_cached() and (path := cached(fingerprint())).exists():
        yield path
