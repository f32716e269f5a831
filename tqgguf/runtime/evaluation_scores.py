"""How well a row of logits predicts the next token, and how far it is from a reference's: token by token, in float64.

Knows neither models nor caches; what becomes of the figures of many tokens is `evaluation_statistics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VALUES_AT_ONCE = 1 << 18
"""Logits that are widened to float64 at a time: some arrays of 2 MB, which stay in a core's cache."""

Logits = NDArray[np.float32]
"""[rows, vocabulary]"""


@dataclass(frozen=True)
class TokenScores:
    """Figures per scored token, all [tokens].

    position int64: tokens before it in its window, less one (where the row of logits stands). nll float64: negative
    log-likelihood in nats. kld float64: KL divergence of the next-token distribution from the reference's, in nats
    (rounding may leave it a little below 0). same_top bool: the likeliest token is the reference's.
    """

    position: NDArray[np.int64]
    nll: NDArray[np.float64]
    kld: NDArray[np.float64]
    same_top: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.position)

    @staticmethod
    def joined(parts: list[TokenScores]) -> TokenScores:
        """All of them one after the other."""
        if not parts:
            empty = np.empty(0)
            return TokenScores(empty.astype(np.int64), empty, empty, empty.astype(np.bool_))
        return TokenScores(*(np.concatenate([getattr(p, name) for p in parts]) for name in TokenScores.__annotations__))


class ReferenceRows:
    """The reference's logits of some rows, with what every comparison needs of them worked out once."""

    def __init__(self, logits: Logits, targets: NDArray[np.int64]) -> None:
        """`targets` [rows]: the tokens that did follow."""
        self.logits, self.targets = logits, targets
        self.log_sums = log_sums(logits)
        self.top = logits.argmax(axis=-1)

    def nll(self) -> NDArray[np.float64]:
        return self.log_sums - _at(self.logits, self.targets)

    def compare(self, logits: Logits) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """nll, kld and same_top of another cache's logits of the same rows."""
        sums = log_sums(logits)
        kld = np.empty(len(logits))
        for rows in _groups(logits):
            reference = self.logits[rows].astype(np.float64) - self.log_sums[rows, None]
            other = logits[rows].astype(np.float64) - sums[rows, None]
            kld[rows] = (np.exp(reference) * (reference - other)).sum(axis=-1)
        return sums - _at(logits, self.targets), kld, logits.argmax(axis=-1) == self.top


def log_sums(logits: Logits) -> NDArray[np.float64]:
    """log(sum(exp(logits))) of each row: subtracted from logits it makes log-probabilities."""
    out = np.empty(len(logits))
    for rows in _groups(logits):
        wide = logits[rows].astype(np.float64)
        largest = wide.max(axis=-1)
        out[rows] = largest + np.log(np.exp(wide - largest[:, None]).sum(axis=-1))
    return out


def _at(logits: Logits, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.take_along_axis(logits, ids[:, None], axis=-1)[:, 0].astype(np.float64)


def _groups(logits: Logits) -> Iterator[slice]:
    """Runs of rows of at most VALUES_AT_ONCE values, of one row at least."""
    step = max(1, VALUES_AT_ONCE // logits.shape[-1])
    return (slice(at, at + step) for at in range(0, len(logits), step))
