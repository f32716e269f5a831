"""What --json prints on stdout where a verb fails: an object with an error in it, beside the line on stderr."""

from __future__ import annotations

from typing import Any

from tqgguf.formats.errors import TqggufError, one_line


def error_object(error: Exception, message: str, exit_status: int) -> dict[str, Any]:
    """kind: the class of the error. message: what stands on stderr, on one line."""
    return {"error": {"kind": type(error).__name__, "message": one_line(message), "exit_status": exit_status}}


def own_error(error: TqggufError) -> dict[str, Any]:
    """The same of an error that says its message and status itself."""
    return error_object(error, str(error), error.exit_status)
