"""What `tqgguf validate` does: find the files, have them looked through, print what was found."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from tqgguf.cli.error_object import error_object
from tqgguf.cli.json_text import json_text
from tqgguf.cli.printable import printable
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.cli.unexpected import unexpected
from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.file_search import find_files, group_sets
from tqgguf.formats.models.belonging import ModelIdentity
from tqgguf.formats.rules.finding import Finding
from tqgguf.formats.validation.files import Outcome, validate_files
from tqgguf.formats.wording import readable

SOUND, UNSOUND, UNREADABLE = 0, 1, 2


def validate(
    files: Sequence[str], model: str | None, strict: bool, threads: int, json_output: bool, debug: bool = False
) -> int:
    """Look through files and folders, print, and return the exit status. debug: at last, raise the unexpected."""
    identity = None if model is None else _identity(model)
    outcomes: list[Outcome] = []
    paths: list[str] = []
    for file in files:
        errors: list[TqggufError] = []
        found = list(find_files(file, errors.append))
        if not found and not errors:
            errors.append(TqggufError(f"{file}: no file of a kind known here is in this folder"))
        outcomes += [_tell(Outcome((file,), (), error), json_output) for error in errors]
        paths += found
    line = ProgressLine("validating", "bytes", quiet=len(paths) == 0)
    looking = validate_files(group_sets(paths), identity, line.update, threads if threads > 0 else None)
    try:
        with contextlib.closing(looking):
            for outcome in looking:
                line.end()
                outcomes.append(_tell(outcome, json_output))
    finally:
        line.end()
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    if json_output:
        unread = [
            {"file": readable(outcome.paths[0]), **error_object(outcome.error, *_told(outcome.error))}
            for outcome in outcomes
            if outcome.error is not None
        ]
        sys.stdout.write(json_text([_as_json(finding) for finding in findings] + unread, indent=2) + "\n")
    else:
        print(_summary(outcomes))
    failures = [outcome.error for outcome in outcomes if outcome.error is not None]
    ours = [error for error in failures if not isinstance(error, TqggufError)]
    if ours and debug:
        raise ours[0]
    if len(failures) > len(ours):
        return UNREADABLE
    return UNSOUND if ours or any(finding.is_error or strict for finding in findings) else SOUND


def _identity(model: str) -> ModelIdentity:
    try:
        return ModelIdentity.of(model)
    except TqggufError as error:
        raise RequestError(f"--model {error}") from error


def _tell(outcome: Outcome, json_output: bool) -> Outcome:
    """Print what is not kept for the JSON array."""
    if isinstance(outcome.error, TqggufError):
        say(f"error: {outcome.error}")
    elif outcome.error is not None:
        say(f"error: {outcome.paths[0]}: {unexpected(outcome.error)}")
    if not json_output:
        for finding in outcome.findings:
            print(_as_line(finding))
        sys.stdout.flush()
    return outcome


def _told(error: Exception) -> tuple[str, int]:
    return (str(error), UNREADABLE) if isinstance(error, TqggufError) else (unexpected(error), UNSOUND)


def _as_line(finding: Finding) -> str:
    rule = finding.rule
    severity = "" if finding.is_error else f" ({rule.severity})"
    place = "" if finding.offset is None else f" (at byte {finding.offset})"
    return f"{printable(readable(finding.file))}: {rule.id} {rule.name}{severity}: {finding.message}{place}"


def _as_json(finding: Finding) -> dict[str, Any]:
    rule = finding.rule
    return {
        "file": readable(finding.file),
        "offset": finding.offset,
        "tensor": finding.tensor,
        "rule": rule.id,
        "name": rule.name,
        "severity": rule.severity,
        "message": finding.message,
        "expected": finding.expected,
        "found": finding.found,
    }


def _summary(outcomes: Sequence[Outcome]) -> str:
    """How many files are sound, and how many are not."""
    unsound = {finding.file for outcome in outcomes for finding in outcome.findings if finding.is_error}
    unread = sum(outcome.error is not None for outcome in outcomes)
    read = {path for outcome in outcomes if outcome.error is None for path in outcome.paths}
    n_errors = sum(finding.is_error for outcome in outcomes for finding in outcome.findings)
    n_warnings = sum(len(outcome.findings) for outcome in outcomes) - n_errors
    parts = [f"{_count(len(read), 'file')}: {len(read - unsound)} sound"]
    parts += [f"{len(unsound)} not ({_count(n_errors, 'error')})"] if unsound else []
    parts += [f"{unread} could not be read"] if unread else []
    parts += [_count(n_warnings, "warning")] if n_warnings else []
    return ", ".join(parts)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
