"""Names and values from files as they stand in messages, for whoever writes one."""

from __future__ import annotations

import os
from itertools import islice
from typing import Final

SHOWN_CHARACTERS: Final = 80  # of a name or value in a message: a damaged file's may have thousands


def shown(value: object) -> str:
    """A name or value from a file as it stands in a message: on one line, printable, not endless."""
    if hasattr(value, "reshape"):  # an array; numpy itself is not needed here, and --help need not wait for it
        value = value.reshape(-1)[: SHOWN_CHARACTERS + 1].tolist()
    if isinstance(value, str | bytes | list | tuple):
        value = value[: SHOWN_CHARACTERS + 1]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), SHOWN_CHARACTERS))
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def readable(name: str | os.PathLike[str]) -> str:
    """A file's name as text that is UTF-8, for JSON, pages and metadata: other bytes become \\xHH."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
