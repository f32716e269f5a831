"""What `tqgguf run` does with a request: read the texts, load the model, answer, report."""

from __future__ import annotations

import sys

from tqgguf.cli.prompts import read_texts
from tqgguf.cli.run_request import RunRequest
from tqgguf.formats.errors import RequestError


def run(request: RunRequest) -> int:
    """Serve the request and return the exit status. Texts are read, and their errors raised, before any weight."""
    texts = read_texts(request, sys.stdin.buffer, sys.stdin.isatty())
    for notice in request.notices + texts.notices:
        print(f"tqgguf: {notice}", file=sys.stderr)
    raise RequestError("generation is not connected yet")
