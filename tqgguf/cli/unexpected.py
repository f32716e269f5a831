"""What is said of an exception that nothing here raises on purpose."""

from __future__ import annotations

from tqgguf.formats.errors import words_of


def unexpected(error: Exception) -> str:
    """One line: it is ours, and how to see more."""
    return f"{type(error).__name__}: {words_of(error)} (a defect of tqgguf; --debug shows where)"
