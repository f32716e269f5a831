"""Which of several caches are worth their bits: by what was measured of them on the same tokens, and without limits of
anybody's taste.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tqgguf.measuring.evaluation.compare import Result
from tqgguf.measuring.evaluation.statistics import Statistics


def judged(results: Sequence[Result]) -> list[Result]:
    """Of every cache but the reference the row that it is judged by: every key from blocks where there is such a row.
    Those without a figure of bits or loss are left out. The largest first.
    """
    rows: dict[tuple[str, str, str, int, bool], Result] = {}
    for result in results[1:]:
        c = result.candidate
        key = (c.type_k, c.type_v, c.balance, c.n_prefix, c.simulated)
        if key not in rows or not c.tail:
            rows[key] = result
    known = (r for r in rows.values() if math.isfinite(r.candidate.bits.mean) and math.isfinite(r.statistics.kld))
    return sorted(known, key=lambda r: -r.candidate.bits.mean)


def better_one(result: Result, results: Sequence[Result]) -> Result | None:
    """Of `results` the one of least KLD that takes no more bits and has a lower KLD; None where there is none. Whether
    that is more than chance is what `is_clearly_less` says.
    """

    def is_better(other: Result) -> bool:
        fewer = other.candidate.bits.mean <= result.candidate.bits.mean
        return fewer and other.statistics.kld < result.statistics.kld

    return min(filter(is_better, results), key=lambda other: other.statistics.kld, default=None)


def is_clearly_less(one: Statistics, other: Statistics) -> bool:
    """Whether the KLD of `one` is below that of `other` by more than both standard errors, where these are known."""
    errors = [error for error in (one.kld_error, other.kld_error) if math.isfinite(error)]
    return one.kld + sum(errors) < other.kld
