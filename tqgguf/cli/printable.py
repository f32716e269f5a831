"""Text from files, and their names, as they stand on a line: a terminal obeys none of it."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line of text, with everything escaped that is not to be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was no UTF-8, as `surrogateescape` has it
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
