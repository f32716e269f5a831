"""The program in this process, as a shell calls it in a folder: its exit status and what it printed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tqgguf.cli.main import main


@dataclass(frozen=True)
class Done:
    """As subprocess has it."""

    returncode: int
    stdout: str
    stderr: str


def tqgguf(folder: Path, *argv: str, stdin: str = "") -> Done:
    """A call without llama.cpp's environment variables, whose standard streams are no terminal."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    given, out, err = (io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (stdin.encode(), b"", b""))
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(list(argv))
    return Done(status, *(_text(stream) for stream in (out, err)))


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
