"""What goes to stderr: lines, and progress, which is drawn again on a terminal and is not shown elsewhere.

What cannot be written there is dropped, for the product on stdout must not be lost with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from tqgguf.cli.figures import size
from tqgguf.cli.printable import printable
from tqgguf.formats.errors import one_line

REDRAW_SECONDS = 0.1


def say(line: str) -> None:
    """A line of the program on stderr, with what must not be printed escaped: names of files are in it."""
    tell(f"tqgguf: {printable(one_line(line))}\n")


@contextlib.contextmanager
def telling() -> Iterator[list[str]]:
    """A list for notices, each of which is said at the block's end, also where an error ends it."""
    notices: list[str] = []
    try:
        yield notices
    finally:
        for notice in notices:
            say(notice)


def tell(text: str) -> None:
    """Write to stderr. If that fails (a full disk, a closed pipe), it is nowhere from then on."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        let_go(sys.stderr)


def let_go(stream: TextIO) -> None:
    """Point a stream at nothing, so that the interpreter's last flush of it cannot fail as well."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


class ProgressLine:
    """One task that counts. `update(done, total)` fits runtime's progress calls; `end` closes the line."""

    def __init__(self, task: str, unit: str, quiet: bool = False) -> None:
        self.task, self.unit = task, unit
        self.shown = not quiet and sys.stderr.isatty()
        self.started = time.perf_counter()
        self.drawn = 0.0

    def update(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self.shown and (now - self.drawn >= REDRAW_SECONDS or done >= total):
            self.drawn = now
            rate = done / max(now - self.started, 1e-9)
            left = f", {(total - done) / rate:.0f} s left" if 0 < done < total and now - self.started > 1 else ""
            tell(f"\r{self.task} {done / max(total, 1):4.0%} of {self.amount(total, rate)}{left}\x1b[K")

    def amount(self, total: int, rate: float) -> str:
        """How much there is to do, with its unit. rate: units in a second."""
        return f"{total:,} {self.unit}"

    def end(self) -> None:
        """Leave an empty line to what comes next."""
        if self.shown:
            tell("\r\x1b[K")


class BytesLine(ProgressLine):
    """Progress in bytes, with how many pass in a second."""

    def __init__(self, task: str, quiet: bool = False) -> None:
        super().__init__(task, "bytes", quiet)

    def amount(self, total: int, rate: float) -> str:
        return f"{size(total)}, {size(int(rate))}/s"
