"""Renders chat templates in a process of its own, which outlives no limit: see `interpreter.py`.

A template comes from a stranger's file and computes. Within this process one call into C could take any time and any
memory; so a small interpreter without MLX renders them. It starts with the first template, stays for all that follow,
and is started again after its death. Not on Windows.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tqgguf.formats.errors import RequestError, TqggufError

MAX_SIZE = 2**24
"""Characters that a rendered text may have: four million tokens' worth."""
MAX_SECONDS = 5.0
"""CPU time of one render; real templates take milliseconds."""
MAX_SECONDS_OF_ALL = 10.0
"""Of all the renders that one conversation takes, on the clock."""
MAX_WAIT = 60.0
"""Seconds on the clock that one render may take, on a machine that has much else to do."""
MAX_BYTES = 2**30
"""Memory of the process that renders."""

_INTERPRETER = Path(__file__).with_name("interpreter.py")
_LIBRARIES = ("jinja2", "markupsafe")
_WATCH_SECONDS = 0.01  # between two looks at how much memory it takes, where the system does not limit that
_ENDING_SECONDS = 10.0  # for a process to end, its memory given back
_OUT_OF_MEMORY = 3  # interpreter.OUT_OF_MEMORY


class TemplateMistakeError(RequestError):
    """A template does not compile. The message ends with Jinja's words."""


class TemplateFailureError(RequestError):
    """A template fails while it is rendered. The message ends with its own words, or with Python's."""


class TemplateLimitError(RequestError):
    """A template takes more time or memory than it is given."""


class Budget:
    """The time that all renders of one conversation have together."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS_OF_ALL

    def left(self) -> float:
        """Seconds. TemplateLimitError: none are left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise _too_long(MAX_SECONDS_OF_ALL)
        return left


_ERRORS: dict[bytes, tuple[type[RequestError], str]] = {
    b"m": (TemplateMistakeError, "chat template: expected Jinja, found a mistake: "),
    b"f": (TemplateFailureError, "chat template: cannot render this conversation: "),
}


class TemplateProcess:
    """The process, as it is needed. Threads take turns."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a copy of this process, which would mix up the answers."""
        self._child, self._lock = None, threading.Lock()

    def start(self) -> None:
        """Start the process if it is not there, without waiting for it: it gets ready while other work is done."""
        with self._lock:
            self._started()

    def render(
        self, source: str, variables: Mapping[str, Any], now: datetime | None = None, budget: Budget | None = None
    ) -> str:
        """What a template makes of variables, which are what JSON can hold (of other values it sees the type's name).

        now: what `strftime_now` takes for the present; None: the present. budget: of this render and others.
        Raises TemplateMistakeError, TemplateFailureError, TemplateLimitError.
        """
        question = {"source": source, "variables": dict(variables), "now": (now or datetime.now()).isoformat()}
        return self._asked(question, budget)

    def compile(self, source: str) -> None:
        """Raises TemplateMistakeError where a template does not compile, TemplateLimitError where it takes too long."""
        self._asked({"source": source, "variables": None})

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _asked(self, question: dict[str, Any], budget: Budget | None = None) -> str:
        seconds = MAX_SECONDS if budget is None else min(MAX_SECONDS, budget.left())
        limits = {"seconds": seconds, "bytes": MAX_BYTES, "characters": MAX_SIZE}
        request = json.dumps({**question, **limits}, default=lambda value: f"<{type(value).__name__}>").encode()
        with self._lock:
            child = self._started()
            try:
                kind, text = _exchange(child, request)
            except (BrokenPipeError, EOFError):
                raise _death(_status(child), seconds) from None
            finally:  # an exchange that did not end, be it by Ctrl-C, leaves nobody who could answer the next one
                if sys.exc_info()[0] is not None:
                    self.close()
        if kind in _ERRORS:
            error, heading = _ERRORS[kind]
            raise error(heading + text)
        return text

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            found = (importlib.util.find_spec(name) for name in _LIBRARIES)
            folders = {str(Path(spec.origin).parents[1]): None for spec in found if spec is not None and spec.origin}
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_INTERPRETER), *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C is not for it
            )
        return self._child


def _exchange(child: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, str]:
    """Send a request and wait for the answer. EOFError, BrokenPipeError: the child has ended."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(len(request).to_bytes(8) + request)
    child.stdin.flush()
    deadline = time.monotonic() + MAX_WAIT
    head = _read(child, 9, deadline)
    length = int.from_bytes(head[1:])
    if length > 4 * MAX_SIZE:  # bytes of UTF-8
        raise TqggufError(f"the process that renders chat templates answers with {length:,} bytes")
    return head[:1], _read(child, length, deadline).decode("utf-8", "surrogatepass")


def _read(child: subprocess.Popen[bytes], length: int, deadline: float) -> bytes:
    assert child.stdout is not None
    found = bytearray()
    while len(found) < length:
        if not select.select([child.stdout], [], [], _WATCH_SECONDS)[0]:
            if time.monotonic() > deadline:
                raise TemplateLimitError(f"chat template: it takes more than {MAX_WAIT:.0f} s")
            if resident_bytes(child.pid) > MAX_BYTES:
                raise _too_much_memory()
            continue
        part = os.read(child.stdout.fileno(), min(length - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _status(child: subprocess.Popen[bytes]) -> int:
    """The status of a child that has closed its end of the pipe, and so should be about to end."""
    try:
        return child.wait(timeout=_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _death(status: int, seconds: float) -> TqggufError:
    """What is said of a child that ended before it answered. seconds: of CPU time that it was given."""
    if status == -signal.SIGPROF:
        return _too_long(MAX_SECONDS if seconds == MAX_SECONDS else MAX_SECONDS_OF_ALL)
    if status == _OUT_OF_MEMORY:
        return _too_much_memory()
    how = f"the signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return TemplateLimitError(f"chat template: the process that renders it ended with {how}")


def _too_long(seconds: float) -> TemplateLimitError:
    what = "of CPU time" if seconds == MAX_SECONDS else "for one conversation"
    return TemplateLimitError(f"chat template: it takes more than {seconds:g} s {what}")


def _too_much_memory() -> TemplateLimitError:
    return TemplateLimitError(f"chat template: it takes more than {MAX_BYTES >> 20} MiB of memory")


class _Usage(ctypes.Structure):
    """macOS's rusage_info_v0, from its sys/resource.h."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in ("user", "system", "idle_wakeups", "interrupts", "pageins", "wired")),
        *((name, ctypes.c_uint64) for name in ("resident", "footprint", "started", "ended")),
    )


def resident_bytes(pid: int) -> int:
    """Memory of one of our processes; 0 where the system does not say."""
    try:
        if sys.platform == "darwin":
            usage = _Usage()
            ctypes.CDLL(None).proc_pid_rusage(pid, 0, ctypes.byref(usage))
            return int(usage.footprint)
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0


PROCESS = TemplateProcess()
"""The one that everybody shares."""

atexit.register(PROCESS.close)
