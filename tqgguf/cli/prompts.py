"""From a RunRequest to the texts of the conversation: prompt files, standard input, escapes, chat turns.

Follows llama-completion: -f loses one newline at its end, escapes are processed in prompts (files included), in reverse
prompts and in chat input, but not in system prompts. Where it differs, a chat goes on after an answer to -p or -f only
with -cnv, and a prompt can come through a pipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tqgguf.cli.line_editor import Piece
from tqgguf.cli.progress import say
from tqgguf.cli.run_request import RunRequest
from tqgguf.cli.terminal import Discarded, Terminal
from tqgguf.formats.errors import FormatError, RequestError, TqggufError

MOST_TEXT_BYTES = 256 << 20  # some 60 million tokens, more than any context; a device may have no end
_STDIN = "-"
PROMPT = "\n> "
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


@dataclass(frozen=True)
class Texts:
    """All text that a request starts from."""

    prompt: str | None
    """The first message, or the text to continue. None: the first message comes from a chat turn."""
    system_prompt: str | None
    chat_template: str | None
    """Jinja source that replaces the model's."""
    reverse_prompts: tuple[str, ...]
    chats_on: bool
    """Read further messages from standard input after the first answer (or before it, without a prompt)."""
    goes_on: bool = False
    """There is no prompt and no chat: what the prompt cache holds is to be continued."""
    notices: tuple[str, ...] = ()


def read_texts(request: RunRequest, stdin: BinaryIO, stdin_is_terminal: bool) -> Texts:
    """Read what the request names. RequestError if there is no prompt where one is needed or a file cannot be read."""
    prompt, source = _read_prompt(request, stdin, stdin_is_terminal)
    notices: tuple[str, ...] = ()
    if prompt and request.escape:
        processed = process_escapes(prompt, source)
        if processed != prompt and source != "-p":
            notices = (f"{source}: backslash escapes were processed, as llama.cpp does; --no-escape keeps the text",)
        prompt = processed
    system_prompt = _checked("-sys", request.system_prompt or "")
    if request.system_prompt_file is not None:
        system_prompt = without_last_newline(read_text("-sysf", request.system_prompt_file, stdin))
    if system_prompt and request.conversation is False:
        notices += ("the system prompt has no effect with -no-cnv",)
    template = _checked("--chat-template", request.chat_template or "")
    if request.chat_template_file is not None:
        template = read_text("--chat-template-file", request.chat_template_file, stdin)
    reverse_prompts = tuple(_checked("-r", text) for text in request.reverse_prompts)
    if request.escape:
        reverse_prompts = tuple(process_escapes(text, "-r") for text in reverse_prompts)
    return Texts(
        prompt=prompt or None,
        system_prompt=system_prompt or None,
        chat_template=template or None,
        reverse_prompts=tuple(filter(None, reverse_prompts)),
        chats_on=prompt is None or (request.conversation is True and not request.single_turn),
        goes_on=prompt == "",
        notices=notices,
    )


def chat_turns(request: RunRequest, stdin: BinaryIO, terminal: Terminal | None) -> Iterator[str]:
    """The user's messages, one per iteration, until the input ends. Empty messages are passed over.

    On a terminal a message that is not UTF-8 is told and passed over; elsewhere it is an error. With -st there is one
    message.
    """

    def read_line(goes_on: bool) -> list[Piece] | None:
        return _line_of(stdin) if terminal is None else terminal.read_line("" if goes_on else PROMPT, goes_on)

    while True:
        try:
            message = _read_message(read_line, request)
        except Discarded:
            say("the message is cleared; Ctrl-C once more, or Ctrl-D, ends the chat")
            continue
        except TqggufError as error:
            if terminal is None:
                raise
            say(f"{error}; nothing was sent")
            continue
        if message is None:
            return
        if not message.strip():
            continue
        if terminal is not None:
            terminal.end_message()
        yield message
        if request.single_turn:
            return


def process_escapes(text: str, source: str) -> str:
    r"""Replace \n \r \t \' \" \\ and \xHH (a byte) as llama.cpp does; any other backslash stays.

    Raises RequestError, naming `source`, if the bytes no longer are UTF-8.
    """

    def replaced(found: re.Match[bytes]) -> bytes:
        what = found[1]
        return bytes([int(what[1:], 16)]) if len(what) == 3 else _ESCAPES.get(what, found[0])

    try:
        return _ESCAPE.sub(replaced, text.encode("utf-8")).decode("utf-8")
    except UnicodeError as error:
        raise RequestError(f"{source}: expected UTF-8 text, found otherwise after its escapes: {error}") from None


def _read_prompt(request: RunRequest, stdin: BinaryIO, stdin_is_terminal: bool) -> tuple[str | None, str]:
    """The prompt, if there is one, with what to call it in a message."""
    for flag, name in (("-bf", request.binary_file), ("-f", request.prompt_file)):
        if name is not None:
            text = read_text(flag, name, stdin)
            text = without_last_newline(text) if flag == "-f" else text
            if not text:
                raise RequestError(f"{flag} {name}: expected a prompt, found an empty file")
            return text, f"{flag} {name}"
    if request.prompt:
        return _checked("-p", request.prompt), "-p"
    chats = request.conversation is True or (stdin_is_terminal and request.conversation is None)
    if chats and request.purpose != "keep":
        return None, "-p"
    text = "" if stdin_is_terminal else without_last_newline(read_text("stdin", _STDIN, stdin))
    if not text and (request.prompt_cache is None or request.purpose != "answer"):
        raise no_prompt(request)
    return text, "stdin"


def no_prompt(request: RunRequest) -> RequestError:
    """There is nothing to continue or to answer."""
    if request.conversation is False:
        return RequestError("-no-cnv: expected a text to continue, found none; give it with -p or -f, or pipe it in")
    return RequestError("expected a prompt, found none; give it with -p or -f, or pipe it in")


def _checked(source: str, text: str) -> str:
    """An argument as the UTF-8 that it must be, whatever the locale took it for: other bytes arrive as surrogates."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = len(data[: error.start].decode("utf-8"))
        raise RequestError(f"{source}: expected UTF-8 text, found another byte at character {at}") from None


def read_text(flag: str, name: str, stdin: BinaryIO) -> str:
    """A UTF-8 file, or "-" for stdin. RequestError: it cannot be read; FormatError: it is not UTF-8, or without end."""
    where = "stdin" if name == _STDIN else name
    try:
        if name == _STDIN:
            data = stdin.read(MOST_TEXT_BYTES + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{flag} {name}: {error.strerror or error}") from None
    if len(data) > MOST_TEXT_BYTES:
        raise FormatError(f"{where}: expected a text of at most {MOST_TEXT_BYTES >> 20} MiB, found more; cut it")
    return _decoded(where, data)


def _decoded(where: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x}; convert the file to UTF-8",
            offset=error.start,
        ) from None


def without_last_newline(text: str) -> str:
    """A text file's text: the newline that editors end it with does not count."""
    return text.removesuffix("\n")


Line = Callable[[bool], "list[Piece] | None"]
"""Reads a line; whether it goes on with a message."""


def _line_of(stdin: BinaryIO) -> list[Piece] | None:
    data = stdin.readline(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES:
        raise FormatError(f"stdin: expected lines of at most {MOST_TEXT_BYTES >> 20} MiB, found a longer one")
    return [Piece(data.decode("utf-8", "surrogateescape").rstrip("\r\n"), is_paste=False)] if data else None


def _read_message(read_line: Line, request: RunRequest) -> str | None:
    """One message without its last newline. A backslash at a line's end continues it, or with -mli ends it. In what was
    pasted a backslash is a backslash.
    """
    lines: list[list[Piece]] = []
    while (pieces := read_line(bool(lines))) is not None:
        marked = bool(pieces) and not pieces[-1].is_paste and pieces[-1].text.endswith("\\")
        if marked:
            pieces[-1] = pieces[-1]._replace(text=pieces[-1].text[:-1])
        lines.append(pieces)
        if marked == request.multiline_input:
            break
    texts = ("".join(_text_of(piece, request.escape) for piece in line) for line in lines)
    return without_last_newline("\n".join(texts)) if lines else None


def _text_of(piece: Piece, escape: bool) -> str:
    text = _decoded("stdin", piece.text.encode("utf-8", "surrogateescape"))
    return process_escapes(text, "the message") if escape and not piece.is_paste else text
