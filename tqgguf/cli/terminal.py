"""The terminal that a chat is typed into: lines of any length, pastes as one piece, and all as it was at the end.

A terminal's own line editing cuts a line at 4,095 bytes (1,024 on macOS) and says nothing. So from before the model is
loaded until the chat ends, lines are put together here: what is typed or pasted meanwhile waits, whatever its length.
Between messages Ctrl-C and Ctrl-Z are signals as ever; at the prompt they are keys, which come in their order.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

from tqgguf.cli.line_editor import NEWLINE, Event, LineEditor, Piece, n_columns

_READ_BYTES = 1 << 16
_KEY_SECONDS = 0.05  # within which the rest of a key's sequence comes; Escape alone has none
_FLUSH_SECONDS = 1.0  # for which a terminal that takes nothing is waited for
_PASTE_MARKS_ON, _PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"
_INPUT, _LOCAL, _KEYS = 0, 3, 6  # places in what tcgetattr returns


class Discarded(Exception):
    """Ctrl-C while a message was being typed: it is gone, the chat goes on."""


class Terminal:
    """A context manager around a chat. descriptor: of a terminal that is open for reading."""

    def __init__(self, descriptor: int) -> None:
        self._given = descriptor
        self._editor = LineEditor()
        self._prompt = ""
        self._drawn = ""
        self._out = b""
        self._is_reading = False
        self._marks_pastes = os.environ.get("TERM", "dumb") not in ("", "dumb")
        self._handlers: dict[int, Any] = {}

    @classmethod
    def of(cls, descriptor: int) -> Terminal | None:
        """The terminal that a descriptor leads to, if it is one."""
        return cls(descriptor) if termios is not None and os.isatty(descriptor) else None

    def __enter__(self) -> Terminal:
        try:  # an open file of its own, so that nobody else's reads and writes stop waiting
            self._fd = os.open(os.ttyname(self._given), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            self._fd = os.dup(self._given)
        self._before = termios.tcgetattr(self._fd)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTSTP, signal.SIGQUIT):
                self._handlers[number] = signal.signal(number, self._on_stop)
            self._handlers[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._on_continue)
        self._set_up()
        self._mark_pastes(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._put_back()
        os.close(self._fd)

    def read_line(self, prompt: str, goes_on: bool = False) -> list[Piece] | None:
        """One line; None at the end of the input: Ctrl-D on an empty line, or the terminal is gone.

        goes_on: the line is not a message's first. Discarded: Ctrl-C within a message; KeyboardInterrupt: before one.
        """
        self._is_reading = True
        self._set_up()
        self._prompt, self._drawn = prompt, ""
        self._write(prompt)
        try:
            data: bytes | None = b""
            while data is not None:
                for event in self._editor.feed(data):
                    if event is Event.ENTER:
                        self._draw()
                        return self._editor.take()
                    if event is Event.END and not self._editor:
                        return None
                    if event is Event.INTERRUPT:
                        self._interrupt(goes_on)
                    self._serve(event)
                data = self._read()
            return None
        finally:
            self._write(NEWLINE)
            self._flush()

    def end_message(self) -> None:
        """All lines of a message are read: Ctrl-C and Ctrl-Z are signals again."""
        self._is_reading = False
        self._set_up()

    def _interrupt(self, goes_on: bool) -> None:
        self._draw()
        self._write("^C")
        if not self._editor and not goes_on:
            raise KeyboardInterrupt
        self._editor.clear()
        raise Discarded

    def _serve(self, event: Event) -> None:
        if event is Event.SUSPEND:
            self._stop(signal.SIGTSTP, whole_group=True)
        elif event is Event.QUIT:
            self._stop(signal.SIGQUIT, whole_group=True)
        elif event is Event.REDRAW and self._marks_pastes:
            self._write("\x1b[2J\x1b[H")
            self._draw_anew()

    def _read(self) -> bytes | None:
        """What was typed, once there is something, while the line is drawn; b"": a key has had its time. None: the
        terminal is gone.
        """
        while True:
            if not self._out:
                self._draw()
            wait = _KEY_SECONDS if self._editor.is_within_a_key else None
            readable, writable, _ = select.select([self._fd], [self._fd] if self._out else [], [], wait)
            if writable:
                self._write_some()
            if readable:
                try:
                    return os.read(self._fd, _READ_BYTES) or None
                except BlockingIOError:  # another process was faster
                    pass
                except OSError:
                    return None
            elif not writable and wait is not None:
                self._editor.forget_key()
                return b""

    # Drawing

    def _draw(self) -> None:
        """Bring what stands behind the prompt up to what is on the line."""
        text = self._editor.shown()
        if text == self._drawn:
            return
        if text.startswith(self._drawn):
            self._write(text[len(self._drawn) :])
        elif self._marks_pastes:
            rows = _n_rows(self._last_row(self._prompt) + self._drawn, shutil.get_terminal_size().columns)
            self._write((f"\x1b[{rows - 1}A" if rows > 1 else "") + "\r\x1b[J" + self._last_row(self._prompt) + text)
        else:
            self._write(NEWLINE + self._last_row(self._prompt) + text)
        self._drawn = text

    def _draw_anew(self) -> None:
        self._drawn = self._editor.shown()
        self._write(self._last_row(self._prompt) + self._drawn)

    @staticmethod
    def _last_row(prompt: str) -> str:
        return prompt.rpartition(NEWLINE)[2]

    def _write(self, text: str) -> None:
        self._out += text.encode()

    def _write_some(self) -> None:
        try:
            self._out = self._out[os.write(self._fd, self._out) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, which reading will find
            self._out = b""

    def _flush(self) -> None:
        """Write what is left, as long as the terminal takes it."""
        end = time.monotonic() + _FLUSH_SECONDS
        while self._out and (left := end - time.monotonic()) > 0:
            if select.select([], [self._fd], [], left)[1]:
                self._write_some()
        self._out = b""

    # Its settings

    def _set_up(self) -> None:
        """No line editing and no echo; keys for signals unless a message is being read."""
        settings = [*self._before[:_KEYS], list(self._before[_KEYS])]
        settings[_INPUT] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP)
        settings[_LOCAL] &= ~(termios.ICANON | termios.ECHO | termios.ECHONL | termios.IEXTEN)
        if self._is_reading:
            settings[_INPUT] &= ~termios.IXON
            settings[_LOCAL] &= ~termios.ISIG
        else:
            settings[_LOCAL] |= termios.NOFLSH  # Ctrl-C ends an answer, and leaves what was typed meanwhile
        settings[_KEYS][termios.VMIN], settings[_KEYS][termios.VTIME] = 1, 0
        self._apply(settings)

    def _put_back(self) -> None:
        self._mark_pastes(False)
        self._apply(self._before)

    def _apply(self, settings: list[Any]) -> None:
        with contextlib.suppress(termios.error):
            if self._is_ours():
                termios.tcsetattr(self._fd, termios.TCSANOW, settings)

    def _mark_pastes(self, wanted: bool) -> None:
        if self._marks_pastes and self._is_ours():
            self._write(_PASTE_MARKS_ON if wanted else _PASTE_MARKS_OFF)
            self._flush()

    def _is_ours(self) -> bool:
        """Whether the program is in the foreground; in the background it would be stopped for touching the terminal."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not the terminal that controls this process: there is no background
            return True

    # Signals

    def _stop(self, number: int, whole_group: bool = False) -> None:
        """Let a signal do what it does, with the terminal as it was. whole_group: it came from a key."""
        self._put_back()
        handler = signal.signal(number, signal.SIG_DFL) if self._handlers else None
        os.kill(0 if whole_group else os.getpid(), number)
        if handler is not None:
            signal.signal(number, handler)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop(number)

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        self._set_up()
        self._mark_pastes(True)
        if self._is_reading:
            self._draw_anew()
            self._flush()


def _n_rows(text: str, columns: int) -> int:
    """How many rows a text takes that begins at the left."""
    rows, column = 1, 0
    for character in text:
        width = n_columns(character)
        if character == NEWLINE:
            rows, column = rows + 1, 0
        elif column + width > columns:
            rows, column = rows + 1, width
        else:
            column += width
    return rows
