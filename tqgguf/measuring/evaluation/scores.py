"""How well a row of logits predicts the next token, and how far it is from a reference's: token by token, in float64.

Knows neither models nor caches; what becomes of the figures of many tokens is `evaluation.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.cores import cores

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
        self.targets = targets
        self._likelihoods = _at(logits, targets)
        self._probabilities = np.empty(logits.shape)
        self._log_sums, self._energies = np.empty(len(logits)), np.empty(len(logits))
        self._top = np.empty(len(logits), np.int64)
        _over_groups(partial(self._prepare, logits), logits)

    def _prepare(self, logits: Logits, rows: slice) -> None:
        wide, probabilities = logits[rows].astype(np.float64), self._probabilities[rows]
        sums = _log_sums(wide)
        np.exp(np.subtract(wide, sums[:, None], out=probabilities), out=probabilities)
        self._log_sums[rows], self._energies[rows] = sums, _row_products(probabilities, wide)
        self._top[rows] = wide.argmax(axis=-1)

    def nll(self) -> NDArray[np.float64]:
        return self._log_sums - self._likelihoods

    def compare(self, logits: Logits) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """nll, kld and same_top of another cache's logits of the same rows."""
        sums, kld, same_top = np.empty(len(logits)), np.empty(len(logits)), np.empty(len(logits), np.bool_)

        def score(rows: slice) -> None:
            wide = logits[rows].astype(np.float64)
            sums[rows] = _log_sums(wide)
            # sum of p * (log p - log q), with log p = reference - its log sum, and likewise q
            difference = self._energies[rows] - _row_products(self._probabilities[rows], wide)
            kld[rows] = difference - self._log_sums[rows] + sums[rows]
            same_top[rows] = wide.argmax(axis=-1) == self._top[rows]

        _over_groups(score, logits)
        return sums - _at(logits, self.targets), kld, same_top


def _log_sums(wide: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(sum(exp(logits))) of each row: subtracted from logits it makes log-probabilities."""
    largest = wide.max(axis=-1)
    return largest + np.log(np.exp(wide - largest[:, None]).sum(axis=-1))


def _row_products(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.einsum("rv,rv->r", a, b)


def _at(logits: Logits, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.take_along_axis(logits, ids[:, None], axis=-1)[:, 0].astype(np.float64)


def _over_groups(work: Callable[[slice], None], logits: Logits) -> None:
    """Do `work` for runs of rows of at most VALUES_AT_ONCE values, of one row at least, on all cores."""
    step = max(1, VALUES_AT_ONCE // logits.shape[-1])
    groups = [slice(at, at + step) for at in range(0, len(logits), step)]
    with ThreadPoolExecutor(cores()) as threads:  # numpy works without the interpreter's lock
        list(threads.map(work, groups))
