"""Writing files so that a crash leaves the old file or the new one, whole, and a failure leaves nothing behind.

A temporary sibling is written, flushed to the disk, renamed, and the folder flushed. Of a set of files all are written
before the first is renamed, and the one that makes the others readable comes last. Two writers of one file do not
disturb each other: the last one to finish wins, whole. What a killed writer left behind goes with the next write into
that folder: a living writer's files are locked. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tqgguf.formats.errors import RequestError, TqggufError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_OWNER_ALONE = stat.S_IRUSR | stat.S_IWUSR
_FOLDER_NAMES = ("", os.curdir, os.pardir)
"""Last parts of names that only a folder can have: nothing stands after the slash, or a way to another folder."""
_PREFIX, _SUFFIX = ".tqgguf-", ".tmp"
_ORPHAN_SECONDS = 24 * 3600
"""Age from which a temporary file is nobody's on a file system that has no locks."""


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that a write to `path` would replace or make, links followed; nothing is left changed.

    RequestError: it is a folder or another thing that is no file, its folder is missing or cannot be written to. To be
    called before work whose result goes there.
    """
    if os.path.basename(os.fsdecode(path)) in _FOLDER_NAMES:
        raise RequestError(f"{os.fsdecode(path)}: expected the name of a file to write, found a folder's name")
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():  # after realpath: links in a circle
            raise RequestError(f"{path}: expected the name of a file to write, found a link that leads nowhere")
        mode = target.stat().st_mode if target.exists() else stat.S_IFREG
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise RequestError(f"{path}: expected the name of a file to write, found {what}")
        if not target.parent.is_dir():
            raise RequestError(f"{path}: the folder {target.parent} does not exist; make it first")
        trial = _temporary(target)
        os.close(_create(trial, 0o666))
        trial.unlink(missing_ok=True)  # another writer may have taken it for an orphan
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be written: {_reason(error)}") from error
    return target


def check_space(path: str, n_bytes: int) -> None:
    """TqggufError where the disk that is to hold `path` has too little room. An older file there is not counted: it
    goes only once the new one is whole. What a killed writer left there goes first.
    """
    folder = Path(os.path.realpath(path)).parent
    _remove_orphans(folder)
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise TqggufError(f"{path}: {n_bytes:,} bytes are to be written, and {free:,} are free on that disk")


def refuse_source(path: str, sources: Iterable[str]) -> None:
    """RequestError where `path` is one of the files that are to be read, by whatever name."""
    for source in sources:
        if os.path.exists(path) and os.path.samefile(path, source):
            raise RequestError(f"{path}: is a file to be converted; give another name")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[Path]:
    """Gives an empty temporary file beside `path` to write, which takes its place when the block ends without an error.

    An existing file's permissions are kept. private: a new file is for its owner alone, whatever the umask (else it
    gets the permissions that new files get). RequestError: as `check_target`. TqggufError: the file could not be
    written (a full disk); whatever ends the block, the temporary file is gone and `path` holds the old file or the new
    one.
    """
    with replacing_set([path], private=private) as temporaries:
        yield temporaries[0]


@contextlib.contextmanager
def replacing_set(paths: Sequence[str | os.PathLike[str]], *, private: bool = False) -> Iterator[list[Path]]:
    """`replacing` for files that belong together, the first of which makes the others readable.

    When the block ends without an error, all are flushed, then renamed, the first last. An older first file goes before
    that, so that whoever stops in the middle leaves a set without its first, not one of old and new files.
    RequestError also where two of the names lead to one file.
    """
    targets = _different_targets(paths)
    writers: list[_Writer] = []
    try:
        for target in targets:
            writers.append(_Writer(target, private))
        yield [writer.temporary for writer in writers]
        for writer in writers:
            writer.flush()
        if len(writers) > 1:
            writers[0].target.unlink(missing_ok=True)
            _flush_folder(writers[0].target.parent)
        for writer in reversed(writers):
            os.replace(writer.temporary, writer.target)
            _flush_folder(writer.target.parent)
    except OSError as error:
        raise TqggufError(f"{paths[0]}: could not be written: {_reason(error)}") from error
    finally:
        for writer in writers:
            writer.close()


def _different_targets(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    names: dict[Path, str | os.PathLike[str]] = {}
    for path in paths:
        target = check_target(path)
        if target in names:
            raise RequestError(
                f"{path}: leads to the same file as {names[target]}; remove the link or give another name"
            )
        names[target] = path
    return list(names)


class _Writer:
    """A temporary file beside `target`, locked while it is written. kept: the permissions that it is to have, None
    where they are those that new files get.
    """

    def __init__(self, target: Path, private: bool) -> None:
        self.target = target
        self.kept = stat.S_IMODE(target.stat().st_mode) if target.exists() else _OWNER_ALONE if private else None
        _remove_orphans(target.parent)
        mode = 0o666 if self.kept is None else self.kept | stat.S_IWUSR
        self.temporary, self.held = _locked(target, lambda path: _create(path, mode))
        if self.kept is not None:
            self.temporary.chmod(mode)  # the umask may have taken what its owner needs to write it

    def flush(self) -> None:
        """All of it to the disk, with the permissions that the target has."""
        _flush(self.temporary, os.O_RDWR)
        if self.kept is not None:
            self.temporary.chmod(self.kept)

    def close(self) -> None:
        if self.held is not None:
            os.close(self.held)
        with contextlib.suppress(OSError):
            self.temporary.unlink()


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives an empty temporary folder beside `path` to fill, which becomes `path` when the block ends without an error.

    RequestError: as `check_new_folder`. TqggufError: it could not be written; whatever ends the block, nothing is left
    of it then.
    """
    target = check_new_folder(path)
    temporary: Path | None = None
    held: int | None = None
    try:
        _remove_orphans(target.parent)
        temporary, held = _locked(target, _create_folder)
        yield temporary
        for file in temporary.iterdir():
            _flush(file, os.O_RDWR)
        _flush_folder(temporary)
        os.replace(temporary, target)  # an empty folder may be there
        _flush_folder(target.parent)
    except OSError as error:
        raise TqggufError(f"{path}: could not be written: {_reason(error)}") from error
    finally:
        if held is not None:
            os.close(held)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def check_new_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that `path` names, which must not be there yet, or be empty; RequestError otherwise, or where its own
    folder is missing or cannot be written to. To be called before work whose result goes there.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():  # after realpath: links in a circle
            raise RequestError(f"{path}: expected the name of a new folder, found a link that leads nowhere")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            what = "one that is not empty" if target.is_dir() else "a file"
            raise RequestError(f"{path}: expected the name of a new folder, found {what}; give another name")
        if not target.parent.is_dir():
            raise RequestError(f"{path}: the folder {target.parent} does not exist; make it first")
        trial = _temporary(target)
        trial.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another writer may have taken it for an orphan
            trial.rmdir()
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be written: {_reason(error)}") from error
    return target


def _temporary(target: Path) -> Path:
    return target.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


def _locked(target: Path, create: Callable[[Path], int | None]) -> tuple[Path, int | None]:
    """A temporary file or folder beside `target`, made by `create`, and the descriptor by which it is locked."""
    while True:
        temporary = _temporary(target)
        held = create(temporary)
        if held is None or (_lock(held) is not False and _is_there(temporary, held)):
            return temporary, held
        os.close(held)  # another writer took it for an orphan before it was locked


def _lock(descriptor: int) -> bool | None:
    """Mark a temporary file as a living process's; False if it is another one's, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_orphans(folder: Path) -> None:
    """Remove temporary files and folders whose writers are gone. What cannot be looked at or removed stays."""
    if fcntl is None:
        return
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                locked = _lock(descriptor)
                if locked or (locked is None and time.time() - found.st_mtime > _ORPHAN_SECONDS):
                    _remove(path, found.st_mode)
            finally:
                os.close(descriptor)


def _remove(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    elif stat.S_ISREG(mode):
        path.unlink()


def _create(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def _create_folder(path: Path) -> int | None:
    """Make a folder; its descriptor, where folders have any."""
    path.mkdir()
    return os.open(path, os.O_RDONLY) if os.name == "posix" else None


def _flush_folder(path: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened
        _flush(path, os.O_RDONLY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
