"""Figures as people read them: columns, bytes."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], n_left: int = 1, beside: Sequence[Sequence[str]] = ()) -> list[str]:
    """Columns of one width each, the first `n_left` to the left, the others to the right. beside: rows that are printed
    at other times, below or above."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, *beside, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < n_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(n_bytes: int) -> str:
    """Bytes in a unit of powers of ten."""
    for unit, unit_bytes in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= unit_bytes:
            return f"{n_bytes / unit_bytes:.2f} {unit}"
    return f"{n_bytes} B"
