"""In which pieces the tokens of a sequence were evaluated as prompt, and what of it a later run can take up.

A run without a prompt cache evaluates whole grid chunks from position 0 on. Where a cache holds exactly such chunks,
taking them up changes nothing; tokens that were generated, or evaluated in other pieces, hold the same text but rounded
otherwise. Knows positions only.
"""

from __future__ import annotations

from collections.abc import Iterable


class PromptPieces:
    """ranges: [start, end) of tokens that were evaluated as prompt; each was cut at absolute multiples of `chunk` and
    nowhere else.
    """

    def __init__(self, chunk: int, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.chunk = chunk
        self._ranges = list(ranges)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._ranges)

    def add(self, start: int, end: int) -> None:
        """Tokens up to `end` were evaluated at once; none of them is beyond the chunk of `start`."""
        if self._ranges and self._ranges[-1][1] == start and start % self.chunk == 0:
            self._ranges[-1] = (self._ranges[-1][0], end)
        else:
            self._ranges.append((start, end))

    def cut(self, length: int) -> None:
        """The tokens from `length` on are gone."""
        self._ranges = [(start, min(end, length)) for start, end in self._ranges if start < length]

    def n_whole(self) -> int:
        """Tokens from position 0 on that were evaluated in whole chunks."""
        n = 0
        for start, end in self._ranges:
            if start > n:
                break
            n = max(n, end // self.chunk * self.chunk)
        return n

    def n_generated(self, length: int) -> int:
        """How many of the first `length` tokens were not evaluated as prompt."""
        return length - sum(max(0, min(end, length) - start) for start, end in self._ranges)

    def reusable(self, common: int) -> int:
        """Of `common` tokens that a new prompt shares, how many need no evaluation.

        Whole chunks, as a run without a cache would make them; if some of the shared tokens after them were generated,
        all of `common`: they were kept on purpose.
        """
        exact = min(self.n_whole(), common // self.chunk * self.chunk)
        generated = self.n_generated(common) - self.n_generated(exact)
        return common if generated else exact
