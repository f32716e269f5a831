"""From figures per token to what is told of a cache: perplexity, KL divergence, agreement, whole and by position.

Standard errors take tokens as independent, as llama-perplexity's do; neighbours in a text are not quite that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.measuring.evaluation.scores import TokenScores

FIRST_RANGE = 1024
"""Positions of the first range; each later one ends at twice where it begins."""

MOST_STEPS = 32
"""Of a profile."""


@dataclass(frozen=True)
class Statistics:
    """Figures of `n_tokens` scored tokens, nan where there are too few. KLD in nats. `_error`: one standard error."""

    n_tokens: int
    perplexity: float
    perplexity_error: float
    ratio: float
    """Perplexity over the reference's."""
    ratio_error: float
    kld: float
    kld_error: float
    kld_median: float
    kld_p99: float
    same_top: float
    """Share of tokens whose likeliest successor is the reference's."""
    same_top_error: float


@dataclass(frozen=True)
class PositionRange:
    """Positions start <= p < end, and their statistics."""

    start: int
    end: int
    statistics: Statistics


def statistics(reference: TokenScores, scores: TokenScores) -> Statistics:
    """Of a cache's scores against the reference's of the same tokens."""
    n = len(scores)
    if n == 0:
        return Statistics(0, *(float("nan"),) * 10)
    log_perplexity, log_error = _mean(scores.nll)
    log_ratio, log_ratio_error = _mean(scores.nll - reference.nll)
    kld, kld_error = _mean(scores.kld)
    agreement, agreement_error = _mean(scores.same_top.astype(np.float64))
    median, p99 = np.quantile(scores.kld, (0.5, 0.99))
    perplexity, ratio = float(np.exp(log_perplexity)), float(np.exp(log_ratio))
    return Statistics(
        n_tokens=n,
        perplexity=perplexity,
        perplexity_error=perplexity * log_error,
        ratio=ratio,
        ratio_error=ratio * log_ratio_error,
        kld=kld,
        kld_error=kld_error,
        kld_median=float(median),
        kld_p99=float(p99),
        same_top=agreement,
        same_top_error=agreement_error,
    )


def by_position(reference: TokenScores, scores: TokenScores) -> list[PositionRange]:
    """The statistics of every range of positions that has scored tokens."""
    last = int(scores.position.max()) if len(scores) else -1
    found = []
    for start, end in position_ranges(last + 1):
        inside = (scores.position >= start) & (scores.position < end)
        if inside.any():
            found.append(PositionRange(start, end, statistics(_pick(reference, inside), _pick(scores, inside))))
    return found


def kld_profile(scores: TokenScores) -> list[tuple[float, float]]:
    """(position, mean KLD) along the windows, in at most MOST_STEPS steps of whole pages."""
    if not len(scores):
        return []
    n_pages = int(scores.position.max()) // PAGE_TOKENS + 1
    step = -(-n_pages // MOST_STEPS) * PAGE_TOKENS
    which = scores.position // step
    counts, sums = np.bincount(which), np.bincount(which, scores.kld)
    return [((i + 0.5) * step, float(sums[i] / n)) for i, n in enumerate(counts) if n]


def position_ranges(n_positions: int) -> list[tuple[int, int]]:
    """0 - 1k, 1 - 2k, 2 - 4k, ... until all positions are in one."""
    edges = [0]
    while edges[-1] < n_positions:
        edges.append(max(FIRST_RANGE, 2 * edges[-1]))
    return list(pairwise(edges))


def _pick(scores: TokenScores, which: NDArray[np.bool_]) -> TokenScores:
    return TokenScores(scores.position[which], scores.nll[which], scores.kld[which], scores.same_top[which])


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and its standard error; of one value the error is nan."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return float(values.mean()), float(error)
