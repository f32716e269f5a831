"""The C library as the tests use it: built or not, and with each path that this machine can run."""

from __future__ import annotations

import sys

from tqgguf.runtime.attention.c_backend import CBackend
from tqgguf.runtime.native.library import Library, load_library

LIBRARY = load_library()
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 320, 512)
C_PATHS = [] if LIBRARY is None else LIBRARY.runnable_paths()


def library(path: str) -> Library:
    """The library, with a path of C_PATHS serving from now on."""
    assert LIBRARY is not None and LIBRARY.select_path(path)
    return LIBRARY


def c_backend(path: str) -> CBackend:
    """A backend that answers steps of any length in C, also where long ones are faster otherwise."""
    return CBackend(library(path), most_rows=sys.maxsize)
