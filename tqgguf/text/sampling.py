"""Choosing the next token from logits: llama.cpp's default chain of samplers, in numpy.

The chain, with llama.cpp's meanings and defaults (src/llama-sampler.cpp and common/sampling.cpp, August 2026): logit
bias, then penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, then one draw from what is left.
Each stage works on the softmax of what the stage before it kept. Mirostat, adaptive-p and grammars are not here.

Reproducibility: the distribution is llama.cpp's, the random stream is not (numpy's PCG64 here, mt19937 there). Equal
seeds and equal logits give equal tokens in every run of this program, on every platform (the stream is PCG64's raw
output, which numpy keeps fixed), but not the tokens that llama.cpp draws. Sums are in float64; llama.cpp's in float32.

Knows token ids and logits only: no tokenizer, no model, no MLX.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.text.dry import Breakers, repetitions
from tqgguf.text.sampling_params import (
    DEFAULT_SAMPLERS,
    MAX_SEED,
    SMALLEST_FLOAT32,
    SamplingParams,
    sampler_names,
)

__all__ = ["DEFAULT_SAMPLERS", "Sampler", "SamplingParams", "sampler_names"]

LOG_OF_LARGEST_FLOAT32 = 88.7228391
LEAST_BOUNDED_BASE = 1.000001
"""llama.cpp's bound on DRY's exponent: from this base on, the power is a float32."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass
class _Candidates:
    """Tokens still in the race: ids int64[n] and their logits float64[n].

    `whole`: nothing was dropped or moved yet, ids are 0, 1, 2 ... `descending`: likeliest first, equals by id.
    """

    ids: Ids
    logits: Floats
    whole: bool = True
    descending: bool = False

    def take(self, index: npt.NDArray[np.intp] | slice, *, descending: bool) -> None:
        self.ids, self.logits = self.ids[index], self.logits[index]
        self.whole, self.descending = False, descending

    def sort(self) -> None:
        if not self.descending:
            self.take(_largest(self.logits, self.logits.size, self.ids), descending=True)

    def probabilities(self) -> Floats:
        weights = np.exp(self.logits - self.logits.max())
        return weights / weights.sum()


def _largest(logits: Floats, k: int, ids: Ids) -> npt.NDArray[np.intp]:
    """Positions of the k largest logits, largest first; equals by rising id, at the cut as well."""
    if k < logits.size:
        cut = np.partition(_could_be_among(logits, k), -k)[-k]
        above, equal = np.flatnonzero(logits > cut), np.flatnonzero(logits == cut)
        equal = equal[np.argsort(ids[equal], kind="stable")][: k - above.size]
        index = np.concatenate([above, equal])
    else:
        index = np.arange(logits.size)
    return index[np.lexsort((ids[index], -logits[index]))]


def _could_be_among(logits: Floats, k: int, block: int = 256) -> Floats:
    """A subset of the logits that holds the k largest: those that reach the k-th largest of the blocks' maxima."""
    whole = logits.size // block
    if whole < 2 * k:
        return logits
    maxima = logits[: whole * block].reshape(whole, block).max(axis=1)
    return logits[logits >= np.partition(maxima, -k)[-k]]


class Sampler:
    """Draws tokens. `seed` is the seed in effect: the given one, or the one that was picked for seed -1.

    `accept` every token of the prompt and every token generated: the penalties look at the last `repeat_last_n`, DRY at
    the last `dry_penalty_last_n`. `breakers`: what `dry.breaker_tokens` makes of the sequence breakers.
    """

    def __init__(self, params: SamplingParams, breakers: Breakers | None = None) -> None:
        self.params = params
        self._breakers = breakers or {}
        picks = params.seed in (-1, MAX_SEED)
        self.seed = int.from_bytes(os.urandom(4), "little") % MAX_SEED if picks else params.seed
        self._bits = np.random.PCG64(self.seed)
        longest = params.dry_penalty_last_n if params.looks_for_repetitions else 0
        self._accepted: deque[int] = deque(maxlen=max(params.repeat_last_n, longest))
        self._penalises = params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        # greedy needs no chain, unless a stage moves logits (penalties) or may drop the likeliest token (typical, XTC)
        self._greedy = (
            "temperature" in params.samplers
            and params.temp <= 0
            and params.dynatemp_range == 0
            and not self._penalises
            and not params.looks_for_repetitions
            and params.typical_p >= 1
            and (params.xtc_probability == 0 or params.xtc_threshold > 0.5)
        )

    def accept(self, token_id: int) -> None:
        """Take note that this token is now part of the text."""
        self._accepted.append(token_id)

    def reset(self) -> None:
        """Forget the accepted tokens (llama.cpp does so at each turn of a chat). The random stream goes on."""
        self._accepted.clear()

    def sample(self, logits: npt.ArrayLike) -> int:
        """One token id, drawn from logits, float[vocabulary]; not `accept`ed. TqggufError if a logit is not finite."""
        if self._greedy:
            return int(np.argmax(self._biased(logits)))  # the first of equals
        ids, probabilities = self.distribution(logits)
        running = np.cumsum(probabilities)
        chosen = int(np.searchsorted(running, self._uniform() * running[-1], side="left"))
        return int(ids[min(chosen, ids.size - 1)])

    def distribution(self, logits: npt.ArrayLike) -> tuple[Ids, Floats]:
        """What `sample` draws from: ids int64[n], probabilities float64[n] of sum 1. XTC uses up a random number."""
        biased = self._biased(logits)
        left = _Candidates(np.arange(biased.size), biased)
        for stage in self.params.samplers:
            _STAGES[stage](self, left)
        return left.ids, left.probabilities()

    def _uniform(self) -> float:
        return float(int(self._bits.random_raw()) >> 11) * 2.0**-53  # 53 bits, in [0, 1)

    def _biased(self, logits: npt.ArrayLike) -> Floats:
        """The logits as float64, a copy, checked, with the logit biases added."""
        values = np.array(logits, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise TqggufError(f"logits: expected one row of numbers, found shape {values.shape}")
        finite = np.isfinite(values)
        if not finite.all():
            bad = np.flatnonzero(~finite)
            raise TqggufError(
                f"logits: expected finite numbers, found {bad.size} of {values.size} that are not "
                f"(first: {values[bad[0]]} at token {bad[0]}); the model's weights or its cache are damaged"
            )
        for token, amount in self.params.logit_bias:
            if token >= values.size:
                raise RequestError(f"--logit-bias: expected a token id below {values.size}, found {token}")
            values[token] += amount
        if self.params.logit_bias and values.max() == -math.inf:
            raise RequestError("--logit-bias: every token of the vocabulary is banned; lift at least one")
        return values

    def _recent(self, n: int) -> list[int]:
        """The last n accepted tokens, the oldest first."""
        return list(islice(self._accepted, max(0, len(self._accepted) - n), None))

    def _penalise(self, left: _Candidates) -> None:
        p = self.params
        recent = self._recent(p.repeat_last_n) if self._penalises else []
        if not recent:
            return
        tokens, counts = np.unique(np.array(recent, dtype=np.int64), return_counts=True)
        where = tokens if left.whole else np.flatnonzero(np.isin(left.ids, tokens))
        count = counts[np.searchsorted(tokens, left.ids[where])]
        logit = left.logits[where]
        logit = np.where(logit <= 0, logit * p.repeat_penalty, logit / p.repeat_penalty)
        left.logits[where] = logit - (count * p.frequency_penalty + p.presence_penalty)
        left.descending = False

    def _dry(self, left: _Candidates) -> None:
        p = self.params
        if not p.looks_for_repetitions:
            return
        found = repetitions(self._recent(p.dry_penalty_last_n), self._breakers, p.dry_allowed_length)
        if not found:
            return
        tokens = np.array(sorted(found), dtype=np.int64)
        where = tokens[tokens < left.ids.size] if left.whole else np.flatnonzero(np.isin(left.ids, tokens))
        beyond = np.array([found[int(token)] for token in left.ids[where]], dtype=np.int64) - p.dry_allowed_length
        if p.dry_base > LEAST_BOUNDED_BASE:
            beyond = np.minimum(beyond, int(LOG_OF_LARGEST_FLOAT32 / math.log(p.dry_base)))
        left.logits[where] -= p.dry_multiplier * np.power(float(p.dry_base), beyond)
        left.descending = False

    def _top_n_sigma(self, left: _Candidates) -> None:
        if self.params.top_n_sigma <= 0 or left.ids.size <= 1:
            return
        alive = left.logits[left.logits != -math.inf]
        # masked, not dropped, as in llama.cpp: the number of candidates enters the dynamic temperature
        left.logits = np.where(
            left.logits < alive.max() - self.params.top_n_sigma * alive.std(), -math.inf, left.logits
        )

    def _top_k(self, left: _Candidates) -> None:
        k = self.params.top_k
        if k <= 0:
            return
        if left.descending:
            left.take(slice(k), descending=True)
        else:
            left.take(_largest(left.logits, min(k, left.ids.size), left.ids), descending=True)

    def _typical(self, left: _Candidates) -> None:
        if self.params.typical_p >= 1:
            return
        left.sort()
        p = left.probabilities()
        surprise = np.full(p.size, math.inf)
        surprise[p > 0] = -np.log(p[p > 0])
        entropy = float(np.sum(p[p > 0] * surprise[p > 0]))
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        running = np.cumsum(p[order])
        left.take(order[: int(np.searchsorted(running, self.params.typical_p, side="right")) + 1], descending=False)

    def _top_p(self, left: _Candidates) -> None:
        if self.params.top_p >= 1:
            return
        weights = np.exp(left.logits - left.logits.max())
        target = self.params.top_p * float(weights.sum())
        # a short list usually holds the answer; the whole vocabulary is sorted only for a flat distribution
        for k in (256, 8192, left.ids.size):
            index = np.arange(left.ids.size) if left.descending else _largest(left.logits, k, left.ids)
            reached = int(np.searchsorted(np.cumsum(weights[index]), target, side="left")) + 1
            if reached <= index.size or index.size == left.ids.size:
                left.take(index[:reached], descending=True)
                return

    def _min_p(self, left: _Candidates) -> None:
        if self.params.min_p > 0:
            keep = left.logits >= left.logits.max() + math.log(self.params.min_p)
            left.take(np.flatnonzero(keep), descending=left.descending)

    def _xtc(self, left: _Candidates) -> None:
        p = self.params
        if p.xtc_probability <= 0 or p.xtc_threshold > 0.5 or left.ids.size < 2 or self._uniform() > p.xtc_probability:
            return
        left.sort()
        likely = int(np.count_nonzero(left.probabilities() >= p.xtc_threshold))
        if likely > 1:
            left.take(slice(likely - 1, None), descending=True)

    def _temperature(self, left: _Candidates) -> None:
        temp = self.params.temp
        if self.params.dynatemp_range > 0:
            if left.ids.size <= 1:
                return
            low, high = max(0.0, temp - self.params.dynatemp_range), temp + self.params.dynatemp_range
            p = left.probabilities()
            p = p[p > 0]
            normalised = max(0.0, float(-np.sum(p * np.log(p))) / math.log(left.ids.size))
            temp = low + (high - low) * normalised**self.params.dynatemp_exp
        if temp < SMALLEST_FLOAT32:
            best = np.flatnonzero(left.logits == left.logits.max())
            left.take(best[[int(np.argmin(left.ids[best]))]], descending=True)
        else:
            left.logits = left.logits / temp  # not shifted by the maximum: penalties may follow, and they see the sign


_STAGES: dict[str, Callable[[Sampler, _Candidates], None]] = {
    "penalties": Sampler._penalise,
    "dry": Sampler._dry,
    "top_n_sigma": Sampler._top_n_sigma,
    "top_k": Sampler._top_k,
    "typ_p": Sampler._typical,
    "top_p": Sampler._top_p,
    "min_p": Sampler._min_p,
    "xtc": Sampler._xtc,
    "temperature": Sampler._temperature,
}
