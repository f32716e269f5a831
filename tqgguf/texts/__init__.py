"""The text that is measured on where none is named; SOURCES.md beside it says what it is made of and its licences.

Knows nothing of tokenizers, models or windows.
"""

from __future__ import annotations

from importlib.resources import files


def default_text() -> str:
    """300 KB of prose in English and French, Python, C and Markdown: about 82,000 tokens of SmolLM2's tokenizer."""
    return (files(__name__) / "default.txt").read_text(encoding="utf-8")
