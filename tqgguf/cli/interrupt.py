"""Ctrl-C as a request that is answered between two tokens, so that nothing is left half done. A second one is not kept
waiting.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupt:
    """While entered, the first Ctrl-C only sets `asked`; the second raises KeyboardInterrupt."""

    asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was asked for."""
        if self.asked:
            raise KeyboardInterrupt
