"""The error of GGUF files."""

from __future__ import annotations

from tqgguf.formats.rules.table import DefectError


class GgufError(DefectError):
    """A GGUF file breaks a rule of its format."""
