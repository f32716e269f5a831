"""What numbers flags take that several verbs have, and the one line that refuses others."""

from __future__ import annotations

from collections.abc import Mapping

from tqgguf.formats.errors import Problems, RequestError
from tqgguf.formats.quantities import parse_count
from tqgguf.formats.wording import shown

INT32 = 2**31 - 1

Ranges = Mapping[str, tuple[str, int, int]]
"""By a request's field: its flag, the lowest and the highest number."""

ALL_CHUNKS = -1
"""--chunks: as many windows as a text gives."""


def check_ranges(request: object, ranges: Ranges) -> None:
    """RequestError with a message for each field whose number is out of its range; None is in every range."""
    problems = Problems()
    for name, (flag, low, high) in ranges.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            problems.note(f"{flag}: expected a number from {low} to {high}, found {value}")
    problems.check()


def check_chunks(n_chunks: int) -> None:
    """RequestError for a number of windows that cannot be."""
    if n_chunks != ALL_CHUNKS and n_chunks < 1:
        raise RequestError(f"--chunks: expected 1 or more, or -1 for the whole text, found {n_chunks}")


def whole_numbers(flag: str, text: str, low: int, high: int) -> list[int]:
    """The numbers of a comma list, each once; 8k is 8,192."""
    numbers = [parse_count(word.strip(" ")) for word in text.split(",")]
    if not all(number is not None and low <= number <= high for number in numbers):
        raise RequestError(
            f"{flag}: expected numbers from {low:,} to {high:,} with commas between, found {shown(text)}"
        )
    return [number for number in dict.fromkeys(numbers) if number is not None]
