"""Progress on stderr: a line that is drawn again on a terminal, and nothing but the last word elsewhere."""

from __future__ import annotations

import sys
import time

REDRAW_SECONDS = 0.1


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
            self._write(f"\r{self.task} {done / max(total, 1):4.0%} of {total:,} {self.unit}{left}\x1b[K")

    def end(self) -> None:
        """Leave an empty line to what comes next."""
        if self.shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
