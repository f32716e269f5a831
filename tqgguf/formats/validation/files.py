"""Validates many files side by side, in threads: what takes time, the data, is read without Python's lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqgguf.formats.cores import cores
from tqgguf.formats.models.belonging import ModelIdentity
from tqgguf.formats.rules.finding import Finding
from tqgguf.formats.validation.validate import Validation

Progress = Callable[[int, int], None]
"""Bytes that were looked at, and all there are. Called by several threads, never by two at once."""


@dataclass(frozen=True)
class Outcome:
    """What became of one file, or of a set of shards: paths that were looked at, what was found, or why it could not be
    read. error: a TqggufError says that; any other exception is a defect of the validator.
    """

    paths: tuple[str, ...]
    findings: tuple[Finding, ...]
    error: Exception | None = None


def validate_files(
    groups: Sequence[Sequence[str]], model: ModelIdentity | None, progress: Progress, n_threads: int | None = None
) -> Generator[Outcome, None, None]:
    """The outcomes of files in their order, as soon as each and all before it are there.

    groups: shards of one set together, see `file_search.group_sets`; such files are not looked at twice. n_threads: by
    default as many as there are cores. When the iterator is closed early, running threads end within some megabytes.
    """
    total = _Total(sum(_size(path) for group in groups for path in group), progress)
    with ThreadPoolExecutor(n_threads or cores()) as pool:
        try:
            futures = [pool.submit(_outcomes, group, model, total) for group in groups]
            for future in futures:
                yield from future.result()
        finally:
            total.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)


def _outcomes(group: Sequence[str], model: ModelIdentity | None, total: _Total) -> list[Outcome]:
    outcomes: list[Outcome] = []
    seen: set[str] = set()
    for path in group:
        if os.path.abspath(path) in seen:
            continue
        validation = Validation(path, model, total.add)
        findings: list[Finding] = []
        error: Exception | None = None
        try:
            findings = validation.findings()
        except _StoppedError:
            raise
        except Exception as failure:  # of this file: others are still looked at
            error = failure
        seen |= {os.path.abspath(each) for each in validation.paths}
        outcomes.append(Outcome(validation.paths, tuple(findings), error))
    return outcomes


class _StoppedError(Exception):
    """Nobody waits for the outcome any more."""


class _Total:
    """Adds up the bytes that all threads have looked at."""

    def __init__(self, n_bytes: int, progress: Progress) -> None:
        self.n_bytes, self.done = n_bytes, 0
        self.stopped = False
        self._progress, self._lock = progress, threading.Lock()

    def add(self, n_bytes: int) -> None:
        if self.stopped:
            raise _StoppedError
        with self._lock:
            self.done += n_bytes
            self._progress(min(self.done, self.n_bytes), self.n_bytes)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
