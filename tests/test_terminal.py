"""Typing into a chat on a real terminal (a pty): nothing is cut, pastes are one piece, all is as before at the end."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.line_editor import PASTE_BEGINS, PASTE_ENDS, Event, LineEditor
from tqgguf.cli.prompts import chat_turns
from tqgguf.cli.run_request import RunRequest
from tqgguf.cli.terminal import Terminal

WAIT = 60


class Pty:
    """The two ends of a pty; what is drawn is read by a thread, as a terminal does."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.drawn = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 1 << 16):
                self.drawn += data

    def shows(self, text: bytes, times: int = 1) -> bool:
        """Whether that is drawn, within a while."""
        end = time.monotonic() + WAIT
        while self.drawn.count(text) < times and time.monotonic() < end:
            time.sleep(0.005)
        return self.drawn.count(text) >= times

    def type(self, *parts: bytes) -> None:
        """Like a person: beside what the program does, each part at a prompt of its own."""

        before = self.drawn.count(b"> ")

        def write() -> None:
            for i, part in enumerate(parts, 1):
                self.shows(b"> ", before + i)
                while part:
                    part = part[os.write(self.master, part) :]

        threading.Thread(target=write, daemon=True).start()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    monkeypatch.setenv("TERM", "xterm")
    made = Pty()
    yield made
    os.close(made.slave)


def messages(terminal: Pty, *typed: bytes, **request: object) -> list[str]:
    """What a chat gets of what is typed at its prompts; the end is Ctrl-D."""
    before = termios.tcgetattr(terminal.slave)
    with open(os.devnull, "rb") as nothing, Terminal(terminal.slave) as chat:
        terminal.type(*typed[:-1], typed[-1] + b"\x04")
        found = list(chat_turns(RunRequest(**request), nothing, chat))  # type: ignore[arg-type]
    assert termios.tcgetattr(terminal.slave) == before
    return found


def pasted(text: str) -> bytes:
    return PASTE_BEGINS + text.replace("\n", "\r").encode() + PASTE_ENDS


@pytest.mark.parametrize("n", [4094, 4095, 4096, 7030, 1_000_000])
def test_a_line_of_any_length_arrives_whole(terminal: Pty, n: int) -> None:
    line = ("0123456789é" * (n // 10 + 1))[: n - 1] + "?"
    assert messages(terminal, line.encode() + b"\r") == [line]
    assert messages(terminal, pasted(line) + b"\r") == [line]


def test_pasted_lines_are_one_message(terminal: Pty) -> None:
    assert messages(terminal, b"Look: " + pasted("one\n\n  two\nthree\n") + b"\rnext\r") == [
        "Look: one\n\n  two\nthree",
        "next",
    ]
    assert terminal.shows(b"Look: one\r\n\r\n  two\r\nthree")


def test_a_large_paste_is_shown_by_its_size(terminal: Pty) -> None:
    text = "line\n" * 2000
    assert messages(terminal, pasted(text) + b" why?\r") == [text + " why?"]
    assert terminal.shows(b"[pasted: 10,000 characters in 2,001 lines] why?")


def test_a_paste_is_taken_as_it_is_and_typing_has_escapes(terminal: Pty) -> None:
    assert messages(terminal, rb"a\tb " + pasted('puts("\\n\\')[:-6] + PASTE_ENDS + b"\r") == ['a\tb puts("\\n\\']
    assert messages(terminal, b"one\\\rtwo\r") == ["one\ntwo"]
    assert messages(terminal, b"one\rtwo\\\rthree\\\r", multiline_input=True) == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (b"helo\x7flo", "hello"),
        ("aé👍\x7f\x7fb".encode(), "ab"),
        ("e\u0301\x7fx".encode(), "x"),  # a letter and its accent
        (b"one two  \x17three", "one three"),
        (b"one two\x15three", "three"),
        (b"a\x1b[D\x1b[C\x1b[A\x1bOH\x1b[3~\x1b[1;5Cb", "ab"),
        (b"a\x1b\x1bb\x1b\x1b[Dc", "ac"),  # Escape, and Alt with a key
        (b"a\x1b\rb", "a\nb"),
        (b"\x7f\x17\x15x\x00\x01", "x"),
        (b"a\tb", "a\tb"),
        (pasted("x" * 2000) + b"\x7fshort", "short"),
        (b"a\x04b", "ab"),
    ],
)
def test_keys_edit_and_none_leaves_garbage(terminal: Pty, keys: bytes, line: str) -> None:
    assert messages(terminal, keys + b"\r") == [line]


def test_a_character_that_comes_in_two_reads_is_whole() -> None:
    editor, events = LineEditor(), []
    for byte in "é👍".encode() + PASTE_BEGINS + "ü".encode() + PASTE_ENDS + b"\x1b[A\r":
        events += editor.feed(bytes([byte]))
    assert events == [Event.ENTER]
    assert "".join(piece.text for piece in editor.take()) == "é👍ü"


def test_what_is_not_utf8_is_told_and_the_chat_goes_on(terminal: Pty, capsys: pytest.CaptureFixture[str]) -> None:
    assert messages(terminal, b"one\ra\xffb\r\\xff\rtwo\r") == ["one", "two"]
    assert capsys.readouterr().err.count("expected UTF-8 text") == 2


@pytest.mark.parametrize("half", [b"half a line", b"a line\\\r", pasted("a paste")])
def test_ctrl_c_clears_a_message_and_keeps_the_chat(
    terminal: Pty, half: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert messages(terminal, half + b"\x03whole\r") == ["whole"]
    assert "the message is cleared; Ctrl-C once more, or Ctrl-D, ends the chat" in capsys.readouterr().err


def test_ctrl_c_before_a_message_ends_the_chat_with_the_terminal_as_it_was(terminal: Pty) -> None:
    before = termios.tcgetattr(terminal.slave)
    with pytest.raises(KeyboardInterrupt):
        messages(terminal, b"one\r", b"\x03")
    assert termios.tcgetattr(terminal.slave) == before
    assert terminal.shows(b"\x1b[?2004h") and terminal.shows(b"\x1b[?2004l")


def test_what_is_drawn_is_erased_over_several_rows(terminal: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with Terminal(terminal.slave) as chat:
        terminal.type(b"x" * 158)  # with the prompt, two rows
        threading.Thread(
            target=lambda: terminal.shows(b"x" * 158) and os.write(terminal.master, b"\x17y\r"), daemon=True
        ).start()
        line = chat.read_line("\n> ")
    assert line is not None and line[0].text == "y"
    assert terminal.shows(b"\x1b[1A\r\x1b[J> y")


def test_the_terminal_is_as_it_was_after_an_error(terminal: Pty) -> None:
    before = termios.tcgetattr(terminal.slave)
    with pytest.raises(ZeroDivisionError), Terminal(terminal.slave):
        assert not termios.tcgetattr(terminal.slave)[3] & termios.ICANON
        raise ZeroDivisionError
    assert termios.tcgetattr(terminal.slave) == before


# The whole program, in a process whose terminal is a pty


class Program:
    """A call of the program in a session of its own. A shell stands between, so that it can be stopped and go on."""

    def __init__(self, *argv: str) -> None:
        self.shown = b""
        self.pid, self.fd = pty.fork()
        if not self.pid:  # a new process, since this one's threads are gone here
            os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("pty_shell.py")), *argv])
        self.child = int(self.until(rb"child (\d+)\r\n")[1])

    def until(self, pattern: bytes) -> re.Match[bytes]:
        """Read until the terminal shows this, and take it off."""
        end = time.monotonic() + WAIT
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end, self.shown[-2000:]
            if select.select([self.fd], [], [], 1)[0]:
                with contextlib.suppress(OSError):
                    self.shown += os.read(self.fd, 1 << 16)
        self.shown = self.shown[found.end() :]
        return found

    def type(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.fd, data) :]

    def ends(self) -> int:
        self.until(rb"terminal restored\r\n")
        status = int(self.until(rb"status (-?\d+)\r\n")[1])
        os.waitpid(self.pid, 0)
        os.close(self.fd)
        return status


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Program]:
    monkeypatch.setenv("TERM", "xterm")
    model = write_tiny(tmp_path / "m.gguf", TinyModel())

    def start(*flags: str) -> Program:
        argv = ["run", "-m", str(model), "--temp", "0", "-n", "4", "--ignore-eos", *flags]
        return Program(*argv)

    return start


def test_a_chat_answers_what_is_typed_and_tells_the_speed_of_each_answer(chat: Callable[..., Program]) -> None:
    program = chat()
    program.until(rb"> ")
    program.type(b"first\r")
    program.until(rb"prompt: [\d,]+ tokens, .*; answer: 4 tokens, .*; context: [\d,]+ of [\d,]+")
    program.until(rb"> ")
    program.type(b"half\x03")
    program.until(rb"\^C")
    program.until(rb"the message is cleared")
    program.until(rb"> ")
    program.type(b"\x03")
    assert program.ends() == 130


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(chat: Callable[..., Program]) -> None:
    program = chat("--no-perf")
    program.until(rb"> ")
    program.type(b"half")
    program.until(rb"half")
    program.type(b"\x1a")
    program.until(rb"terminal restored\r\n")
    program.until(rb"stopped")
    program.until(rb"> half")
    program.type(b" and whole\r")
    program.until(rb"> ")
    assert b"context:" not in program.shown
    program.type(b"\x04")
    assert program.ends() == 0


def test_sigterm_leaves_the_terminal_as_it_was(chat: Callable[..., Program]) -> None:
    program = chat()
    program.until(rb"> ")
    program.type(b"half")
    program.until(rb"half")
    os.kill(program.child, signal.SIGTERM)
    assert program.ends() == 143


def test_a_full_context_says_what_to_do_and_what_became_of_the_message(chat: Callable[..., Program]) -> None:
    program = chat("-c", "128", "--no-perf")
    program.until(rb"> ")
    program.type(pasted("word " * 200) + b"\r")
    told = program.until(rb"the message was not sent: with it the chat has \d+ tokens or more(.|\r\n)*?begin anew")[0]
    assert b"raise -c (the model takes up to" in told
    program.until(rb"> ")
    program.type(b"short\r")
    program.until(rb"> ")
    program.type(b"\x04")
    assert program.ends() == 0
