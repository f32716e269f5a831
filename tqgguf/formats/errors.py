"""The one family of errors: what was expected, what was found, where, and what to do about it.

The command line prints an error's message as one line and exits with its `exit_status`:
1 when the input is bad (a damaged file), 2 when the request is bad (an unknown type, a model that cannot be served).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

MAX_MESSAGE: Final = 4000
"""Characters of an error's message: files and libraries have megabytes to say."""
MAX_WORDS: Final = 300
"""Characters of a library's exception within a message."""
NO_DOWNLOAD: Final = "tqgguf downloads nothing; fetch the file and give its path with -m"
"""What is said where somebody names something that is not on this machine."""


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """A text as one line of `limit` characters at most; what does not fit is left out of its middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[5 - limit // 2 :]}"
    lines = text.splitlines()
    return text if lines == [text] else " ".join(line.strip() for line in lines if line.strip())


def words_of(error: BaseException) -> str:
    """What a library's exception says, as it stands in a message: on one line, not endless."""
    return one_line(str(error), MAX_WORDS)


class TqggufError(Exception):
    """Base of every error that tqgguf raises on purpose. Its message is one line of at most `MAX_MESSAGE` characters;
    `exit_status` is what a command line ends with.
    """

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(str(message)))


class FormatError(TqggufError):
    """A file or a buffer breaks its format. `offset` is the byte offset of the defect in the file, if known."""

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})")
        self.offset = offset


class EncodeError(TqggufError):
    """Values cannot be encoded: they are not finite. The message names the first position."""


class RequestError(TqggufError):
    """The request cannot be served: an unknown cache type, a head size a type cannot hold, a bad flag value.

    One message for each thing that is wrong; `Problems` collects them.
    """

    exit_status = 2

    def __init__(self, *messages: str) -> None:
        super().__init__("; ".join(messages))
        self.messages = tuple(map(one_line, messages))


class Problems:
    """Collects what is wrong with a request, so that its user is told all of it at once."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def note(self, *messages: str) -> None:
        self._messages += messages

    @contextlib.contextmanager
    def noting(self, where: str = "") -> Iterator[None]:
        """Notes the RequestError that the block raises, with `where` before its messages, and goes on after it."""
        try:
            yield
        except RequestError as error:
            self.note(*(f"{where}: {message}" if where else message for message in error.messages))

    def check(self) -> None:
        """RequestError with all messages, each once, if there are any."""
        if self._messages:
            raise RequestError(*dict.fromkeys(self._messages))


class UnsupportedModelError(RequestError):
    """The model is sound, but its architecture, weights or tokenizer are not supported."""


class MissingMLXError(RequestError, ImportError):
    """MLX is not installed, and what was asked for needs it. The message names the extra that installs it."""


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Puts a file's name before the message of an error that the block raises without knowing it."""
    try:
        yield
    except (FormatError, EncodeError, RequestError) as error:
        kind = next(kind for kind in (FormatError, EncodeError, RequestError) if isinstance(error, kind))
        raise kind(f"{path}: {error}") from error
