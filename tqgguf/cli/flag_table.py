"""The table of flags that do something, of all verbs, and what is read off it."""

from __future__ import annotations

from typing import Final

from tqgguf.cli.file_flags import FILE_FLAGS
from tqgguf.cli.flags import Flag
from tqgguf.cli.model_flags import MODEL_FLAGS
from tqgguf.cli.ranges import Ranges

TABLE: Final[tuple[Flag, ...]] = (*FILE_FLAGS, *MODEL_FLAGS)


def rows_of(verb: str) -> tuple[Flag, ...]:
    """The rows of a verb, in the order of its --help."""
    return tuple(flag for flag in TABLE if verb in flag.verbs)


def ranges_of(verb: str) -> Ranges:
    """What whole numbers a verb's request may have, by field."""
    return {
        flag.field: (flag.names[0], flag.lowest, flag.highest)
        for flag in rows_of(verb)
        if flag.lowest is not None and flag.highest is not None
    }
