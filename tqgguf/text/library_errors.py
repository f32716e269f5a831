"""What the `tokenizers` library raises, as one line: errors of no special class, and panics, which are no Exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tqgguf.formats.errors import FormatError, words_of


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Raise whatever the library fails with as a FormatError that begins with `what`."""
    try:
        yield
    except FormatError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise FormatError(f"{what}: {words_of(error)}") from error


def is_panic(error: BaseException) -> bool:
    """Whether the library ended in a panic."""
    return type(error).__name__ == "PanicException"
