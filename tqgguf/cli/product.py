"""Verbs whose product is a file name it on stdout, for the command that takes it."""

from __future__ import annotations

import os
import sys


def name_product(path: str | os.PathLike[str]) -> None:
    """The file's name as a line, in its own bytes."""
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.flush()
