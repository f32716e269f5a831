"""Verbs whose product is a file name it on stdout, for the command that takes it."""

from __future__ import annotations

import os
import sys

from tqgguf.cli.printable import printable


def name_product(path: str | os.PathLike[str]) -> None:
    """The file's name as a line: in its own bytes for a command, readable on a terminal."""
    name = printable(os.fsdecode(path)).encode() if sys.stdout.isatty() else os.fsencode(path)
    sys.stdout.buffer.write(name + b"\n")
    sys.stdout.flush()
