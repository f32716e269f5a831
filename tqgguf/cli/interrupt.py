"""Ctrl-C and SIGTERM as requests that are answered between two tokens, so that nothing is left half done. A second one
is not kept waiting.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM: what a Ctrl-C does, and no chat goes on after it."""


class Interrupt:
    """While entered, the first signals, `patience` of them, are only noted; the next raises what `check` would raise.

    An evaluation that is broken off leaves nothing to save. One of a token is soon over, so that an impatient second
    Ctrl-C is noted there too.
    """

    number = 0
    patience = 1
    _n_asked = 0

    def __enter__(self) -> Interrupt:
        self._before = [signal.signal(number, self._ask) for number in _SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._n_asked += 1
        if self._n_asked > self.patience:
            self.check()

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was asked for."""
        if self.number:
            raise Terminated if self.number == signal.SIGTERM else KeyboardInterrupt


def heed_sigterm() -> None:
    """Let SIGTERM end the program as Ctrl-C does from here on, unless somebody decided otherwise."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
