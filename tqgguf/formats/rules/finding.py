"""What a validator finds, and a collector that stays small whatever a file holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tqgguf.formats.rules.rule import ERROR, Rule
from tqgguf.formats.rules.table import DefectError

MAX_PER_RULE: Final = 20
"""Findings of one rule that are kept for one file; the rest is counted."""
MAX_DEFECTS: Final = 5_000
"""Defects of one file after which nothing more is looked for: it holds nothing but them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect of a file.

    message: without the file's name and the offset. offset: of the wrong field, in bytes from the file's beginning;
    tensor, expected, found: where the rule speaks of such.
    """

    rule: Rule
    file: str
    message: str
    offset: int | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None

    @property
    def is_error(self) -> bool:
        return self.rule.severity == ERROR


class EnoughError(Exception):
    """There are MAX_DEFECTS: thrown through whatever still looks for more."""


class Findings:
    """Collects defects; `report` is what rules and parsers are given in a validator."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def report(self, defect: DefectError) -> None:
        """Take one. EnoughError: it was one too many."""
        self._counts[defect.path, defect.code] += 1
        if self._counts[defect.path, defect.code] <= MAX_PER_RULE:
            self._kept.append(
                Finding(
                    defect.rule, defect.path, defect.bare, defect.offset, defect.tensor, defect.expected, defect.found
                )
            )
        if self._counts.total() >= MAX_DEFECTS:
            raise EnoughError

    def extend(self, defects: Iterable[DefectError]) -> None:
        for defect in defects:
            self.report(defect)

    def has_errors(self, path: str) -> bool:
        """Whether a file has a finding that is an error, so far."""
        return any(finding.file == path and finding.is_error for finding in self._kept)

    def has(self, rule: str) -> bool:
        """Whether a rule of that name was broken, in whichever file."""
        return any(code == rule for _, code in self._counts)

    def all(self) -> list[Finding]:
        """What was found, and for each rule with more than are kept how many."""
        closing = []
        for (path, code), count in self._counts.items():
            if count > MAX_PER_RULE:
                rule = next(finding.rule for finding in self._kept if finding.rule.name == code)
                more = "at least " if self._counts.total() >= MAX_DEFECTS else ""
                closing.append(Finding(rule, path, f"and {more}{count - MAX_PER_RULE} more of this kind"))
        return self._kept + closing
