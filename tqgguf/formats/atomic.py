"""Writing files so that a crash leaves the old file or the new one, whole, and a failure leaves nothing behind.

A temporary sibling is written, flushed to the disk, renamed, and the folder flushed. Two writers of one file do not
disturb each other: the last one to finish wins, whole. What a killed writer left behind goes with the next write into
that folder. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqgguf.formats.errors import RequestError, TqggufError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX, _SUFFIX = ".tqgguf-", ".tmp"
_ORPHAN_SECONDS = 60
"""Age from which an unlocked temporary file is nobody's: a writer locks its own at once."""


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that a write to `path` would replace or make, links followed; nothing is left changed.

    RequestError: it is a folder or another thing that is no file, its folder is missing or cannot be written to. To be
    called before work whose result goes there.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else stat.S_IFREG
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise RequestError(f"{path}: expected the name of a file to write, found {what}")
        if not target.parent.is_dir():
            raise RequestError(f"{path}: the folder {target.parent} does not exist; make it first")
        trial = _temporary(target)
        os.close(_create(trial, 0o666))
        trial.unlink()
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be written: {_reason(error)}") from error
    return target


def check_space(path: str, n_bytes: int) -> None:
    """TqggufError where the disk that is to hold `path` has too little room. An older file there is not counted: it
    goes only once the new one is whole.
    """
    free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
    if n_bytes > free:
        raise TqggufError(f"{path}: {n_bytes:,} bytes are to be written, and {free:,} are free on that disk")


def refuse_source(path: str, sources: Iterable[str]) -> None:
    """RequestError where `path` is one of the files that are to be read, by whatever name."""
    for source in sources:
        if os.path.exists(path) and os.path.samefile(path, source):
            raise RequestError(f"{path}: is a file to be converted; give another name")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives an empty temporary file beside `path` to write, which takes its place when the block ends without an error.

    An existing file's permissions are kept. RequestError: as `check_target`. TqggufError: the file could not be written
    (a full disk); whatever ends the block, the temporary file is gone and `path` holds the old file or the new one.
    """
    target = check_target(path)
    temporary = _temporary(target)
    held: int | None = None
    try:
        _remove_orphans(target.parent)
        kept = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        held = _create(temporary, 0o666 if kept is None else kept | stat.S_IWUSR)
        _lock(held)
        yield temporary
        _flush(temporary, os.O_RDWR)
        if kept is not None:
            temporary.chmod(kept)
        os.replace(temporary, target)
        if os.name == "posix":  # elsewhere folders cannot be opened
            _flush(target.parent, os.O_RDONLY)
    except OSError as error:
        raise TqggufError(f"{path}: could not be written: {_reason(error)}") from error
    finally:
        if held is not None:
            os.close(held)
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives an empty temporary folder beside `path` to fill, which becomes `path` when the block ends without an error.

    RequestError: as `check_new_folder`. TqggufError: it could not be written; whatever ends the block, nothing is left
    of it then.
    """
    target = check_new_folder(path)
    temporary = _temporary(target)
    held: int | None = None
    try:
        _remove_orphans(target.parent)
        temporary.mkdir()
        if os.name == "posix":
            held = os.open(temporary, os.O_RDONLY)
            _lock(held)
        yield temporary
        for file in temporary.iterdir():
            _flush(file, os.O_RDWR)
        if os.name == "posix":
            _flush(temporary, os.O_RDONLY)
        os.replace(temporary, target)  # an empty folder may be there
        if os.name == "posix":
            _flush(target.parent, os.O_RDONLY)
    except OSError as error:
        raise TqggufError(f"{path}: could not be written: {_reason(error)}") from error
    finally:
        if held is not None:
            os.close(held)
        shutil.rmtree(temporary, ignore_errors=True)


def check_new_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that `path` names, which must not be there yet, or be empty; RequestError otherwise, or where its own
    folder is missing.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "one that is not empty" if target.is_dir() else "a file"
        raise RequestError(f"{path}: expected the name of a new folder, found {what}; give another name")
    if not target.parent.is_dir():
        raise RequestError(f"{path}: the folder {target.parent} does not exist; make it first")
    return target


def _temporary(target: Path) -> Path:
    return target.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


def _lock(descriptor: int) -> bool:
    """Mark a temporary file as a living process's; False if it is another one's."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # a file system without locks marks nothing
    return True


def _remove_orphans(folder: Path) -> None:
    """Remove temporary files and folders whose writers are gone. What cannot be looked at or removed stays."""
    if fcntl is None:
        return
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _ORPHAN_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _lock(descriptor):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(descriptor)


def _create(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
