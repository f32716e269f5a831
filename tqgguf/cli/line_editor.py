"""What is typed into a chat's prompt, byte by byte, and the text that comes of it: keys that edit, pastes as one piece.

A paste is known by the marks that terminals put around it (bracketed paste), so that its newlines do not end the
message. Typing goes on at the end of the text; moving about in it is left to a line editor proper. Knows no terminal:
`terminal` reads the bytes and draws the text.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

PASTE_BEGINS, PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
MOST_PASTE_SHOWN = 1000  # characters of a paste that are shown as they are; of a larger one its size is
MOST_TYPED_SHOWN = 2000  # characters of other text that are shown; of more, its end
NEWLINE = "\n"
_NO_WIDTH = ("Mn", "Me", "Cf")
_UNSEEN = ("Cc", "Cf", "Cs")  # controls and marks that would move the cursor or turn the writing

_INTERRUPT, _END, _SUSPEND, _QUIT = b"\x03", b"\x04", b"\x1a", b"\x1c"
_ERASE_KEYS, _ERASE_WORD, _ERASE_ALL, _REDRAW = (b"\x7f", b"\x08"), b"\x17", b"\x15", b"\x0c"
_NEWLINE_KEYS = (b"\x1b\r", b"\x1b\n")  # Alt and Enter
_TOKEN = re.compile(
    rb"(?P<text>[^\x00-\x08\x0a-\x1f\x7f]+)"
    rb"|(?P<enter>\r\n?|\n)"
    rb"|(?P<key>\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bO[ -~]"
    rb"|\x1b(?=\x1b)|\x1b[^\[\]OPX^_\x1b]|[^\x1b])"
)
"""Text, a line's end, or a key: a control character, or what ECMA-48 calls a control sequence or string."""


class Event(Enum):
    """What keys ask of whoever reads the message."""

    ENTER = "enter"
    INTERRUPT = "interrupt"
    END = "end"
    SUSPEND = "suspend"
    QUIT = "quit"
    REDRAW = "redraw"


_EVENTS = {
    _INTERRUPT: Event.INTERRUPT,
    _END: Event.END,
    _SUSPEND: Event.SUSPEND,
    _QUIT: Event.QUIT,
    _REDRAW: Event.REDRAW,
}


class Piece(NamedTuple):
    """A run of the message. Bytes that are not UTF-8 are surrogates, as Python's "surrogateescape" makes them."""

    text: str
    is_paste: bool


class LineEditor:
    """One line of input (a paste may bring newlines into it). `feed` it bytes; `pieces` is its text so far."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._rest = bytearray()
        self._in_paste = False
        self._searched = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def __bool__(self) -> bool:
        """Whether anything is on the line."""
        return bool(self.pieces or self._decoder.getstate()[0] or self._in_paste)

    @property
    def is_within_a_key(self) -> bool:
        """Whether the bytes so far end in what may be the beginning of a key's sequence."""
        return bool(self._rest) and not self._in_paste

    def forget_key(self) -> None:
        """The key Escape was meant, and nothing of its sequence will come."""
        self._rest.clear()

    def take(self) -> list[Piece]:
        """The line, which is empty then."""
        self._type(self._decoder.decode(b"", final=True))
        pieces, self.pieces = self.pieces, []
        return pieces

    def clear(self) -> None:
        self.pieces = []
        self._decoder.reset()

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take in what was typed; stops at each event, behind which the line can be taken before it goes on."""
        if self._in_paste and data == _INTERRUPT:  # a paste whose end never came
            self._in_paste = False
            self._rest.clear()
        self._rest += data
        while self._rest:
            if self._in_paste:
                if not self._end_paste():
                    return
                continue
            found = _TOKEN.match(self._rest)
            if found is None:
                return
            token, kind = bytes(found[0]), found.lastgroup
            del self._rest[: found.end()]
            if kind == "text":
                self._type(self._decoder.decode(token))
            elif kind == "enter":
                yield Event.ENTER
            elif token == PASTE_BEGINS:
                self._in_paste, self._searched = True, 0
            elif token in _EVENTS:
                yield _EVENTS[token]
            else:
                self._edit(token)

    def _end_paste(self) -> bool:
        end = self._rest.find(PASTE_ENDS, self._searched)
        if end < 0:
            self._searched = max(0, len(self._rest) - len(PASTE_ENDS))
            return False
        text = bytes(self._rest[:end]).decode("utf-8", "surrogateescape")
        del self._rest[: end + len(PASTE_ENDS)]
        self._in_paste = False
        if text:
            self.pieces.append(Piece(text.replace("\r\n", "\n").replace("\r", "\n"), is_paste=True))
        return True

    def _type(self, text: str) -> None:
        if text and self.pieces and not self.pieces[-1].is_paste:
            text = self.pieces.pop().text + text
        if text:
            self.pieces.append(Piece(text, is_paste=False))

    def _edit(self, key: bytes) -> None:
        """Keys that are none of these do nothing."""
        if key in _NEWLINE_KEYS:
            self._type("\n")
        elif key == _ERASE_ALL:
            self.clear()
        elif key in _ERASE_KEYS or key == _ERASE_WORD:
            self._decoder.reset()
            self._erase(_without_last_word if key == _ERASE_WORD else _without_last_character)

    def _erase(self, shorten: Callable[[str], str]) -> None:
        """A paste that is shown by its size goes as a whole."""
        if not self.pieces:
            return
        last = self.pieces.pop()
        text = "" if last.is_paste and _is_large(last.text) else shorten(last.text)
        if text:
            self.pieces.append(last._replace(text=text))

    def shown(self) -> str:
        """The line as it is drawn: no control characters but newlines, large pastes by their size."""
        return "".join(map(_shown, self.pieces))


def _is_large(paste: str) -> bool:
    return len(paste) > MOST_PASTE_SHOWN


def _shown(piece: Piece) -> str:
    text = piece.text
    if piece.is_paste and _is_large(text):
        return f"[pasted: {len(text):,} characters in {text.count(NEWLINE) + 1:,} lines]"
    return "".join(map(_visible, text if piece.is_paste else text[-MOST_TYPED_SHOWN:]))


def _visible(character: str) -> str:
    if character == "\t":
        return "    "
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8
        return "\ufffd"
    return character if character == NEWLINE or unicodedata.category(character) not in _UNSEEN else ""


def n_columns(text: str) -> int:
    """How many columns of a terminal a text without newlines takes."""
    return sum(
        0 if unicodedata.combining(c) or unicodedata.category(c) in _NO_WIDTH
        else 2 if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )  # fmt: skip


def _without_last_character(text: str) -> str:
    """Without what looks like one character: with it go the marks that stand above or below it."""
    end = len(text)
    while end > 1 and not n_columns(text[end - 1]) and text[end - 1] != NEWLINE:
        end -= 1
    return text[: max(0, end - 1)]


def _without_last_word(text: str) -> str:
    words = text.rstrip()
    return words[: len(words) - len(re.split(r"\s", words)[-1])]
