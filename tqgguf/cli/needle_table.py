"""Which needles were found, as a table for a terminal and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from tqgguf.cli.figures import aligned
from tqgguf.measuring.evaluation.needle import NeedleCell, NeedleTest

_FOUND = {True: "yes", False: "no", None: "-"}


def lines(test: NeedleTest) -> list[str]:
    """A table for each length, whose columns are depths."""
    found: list[str] = []
    for length, group in groupby(test.cells, lambda cell: cell.prompt.length):
        found += ["", *aligned(_table(test, length, list(group)))]
    if any(len(cell.answers) < len(test.rows) for cell in test.cells):
        found += ["", f"{_FOUND[None]}: f16 fails, so nothing can be said of others"]
    return found[1:]


def as_json(test: NeedleTest) -> list[dict[str, Any]]:
    """Every cell with every answer; found is null where f16 failed and nobody else was asked."""
    return [
        {
            "length": cell.prompt.length,
            "depth": cell.prompt.depth,
            "prompt_tokens": len(cell.prompt.ids),
            "number": cell.prompt.number,
            "answers": [
                {"label": row.label, "found": _found(cell, row.label), **_answer(cell, row.label)} for row in test.rows
            ],
        }
        for cell in test.cells
    ]


def _answer(cell: NeedleCell, label: str) -> dict[str, Any]:
    answer = cell.answers.get(label)
    return {"text": answer and answer.text, "reads": answer and asdict(answer.reads)}


def _found(cell: NeedleCell, label: str) -> bool | None:
    """None: it was not asked."""
    return cell.answers[label].found if label in cell.answers else None


def _table(test: NeedleTest, length: int, cells: Sequence[NeedleCell]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [(f"{length:,} tokens", *(f"{cell.prompt.depth}%" for cell in cells), "found")]
    for row in test.rows:
        found = [_found(cell, row.label) for cell in cells]
        n_asked = sum(answer is not None for answer in found)
        rows.append((row.label, *(_FOUND[answer] for answer in found), f"{found.count(True)} of {n_asked}"))
    return rows
