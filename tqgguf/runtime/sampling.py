"""Choosing the next token from logits: llama.cpp's default chain of samplers, in numpy.

The chain, with llama.cpp's meanings and defaults (src/llama-sampler.cpp and common/sampling.cpp, August 2026): logit
bias, then penalties, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, then one draw from what is left. Each
stage works on the softmax of what the stage before it kept. DRY, mirostat, adaptive-p and grammars are not here.

Reproducibility: the distribution is llama.cpp's, the random stream is not (numpy's PCG64 here, mt19937 there). Equal
seeds and equal logits give equal tokens in every run of this program, on every platform (the stream is PCG64's raw
output, which numpy keeps fixed), but not the tokens that llama.cpp draws. Sums are in float64; llama.cpp's in float32.

Knows token ids and logits only: no tokenizer, no model, no MLX.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tqgguf.formats.errors import RequestError, TqggufError

DEFAULT_SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""Order of the stages. `dry` is accepted and does nothing, as in llama.cpp while its multiplier is 0."""

SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature",
}  # fmt: skip
"""The one-letter names that `--sampler-seq` takes."""

_OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_MAX_SEED = 2**32 - 1  # llama.cpp's LLAMA_DEFAULT_SEED, which stands for "pick one"; -1 wraps to it there

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)  # llama.cpp parses these flags as float32; with it as the bound,
_SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)  # no step of the chain can overflow float64

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Range:
    flag: str
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def allows(self, value: float) -> bool:
        low = _SMALLEST_FLOAT32 if self.open_low else max(self.low, -_LARGEST_FLOAT32)
        return low <= value <= min(self.high, _LARGEST_FLOAT32)  # false for NaN

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"a finite number {'above' if self.open_low else 'of at least'} {self.low:g}"
        return f"a number from {self.low:.10g} to {self.high:.10g}"


_RANGES: dict[str, _Range] = {
    "temp": _Range("--temp"),
    "top_p": _Range("--top-p", 0, 1),
    "min_p": _Range("--min-p", 0, 1),
    "typical_p": _Range("--typical", 0, 1),
    "top_n_sigma": _Range("--top-nsigma"),
    "xtc_probability": _Range("--xtc-probability", 0, 1),
    "xtc_threshold": _Range("--xtc-threshold", 0, 1),
    "dynatemp_range": _Range("--dynatemp-range", 0),
    "dynatemp_exp": _Range("--dynatemp-exp", 0),
    "repeat_penalty": _Range("--repeat-penalty", 0, open_low=True),
    "frequency_penalty": _Range("--frequency-penalty"),
    "presence_penalty": _Range("--presence-penalty"),
    "top_k": _Range("--top-k", -(2**31), 2**31 - 1),
    "repeat_last_n": _Range("--repeat-last-n", 0, 2**31 - 1),
    "seed": _Range("--seed", -1, _MAX_SEED),
}
_WHOLE_NUMBERS = ("top_k", "repeat_last_n", "seed")


@dataclass(frozen=True)
class SamplingParams:
    """What llama.cpp's sampling flags say, with its defaults. RequestError names the flag, the value and the range."""

    temp: float = 0.8
    """Divides the logits. 0 or less: the most likely token (lowest id among equals)."""
    top_k: int = 40
    """Keep the k most likely tokens. 0 or less: all."""
    top_p: float = 0.95
    """Keep the smallest set of likeliest tokens whose probability reaches this. 1: all."""
    min_p: float = 0.05
    """Keep tokens at least this times as likely as the likeliest. 0: all."""
    typical_p: float = 1.0
    """Keep the tokens closest to the distribution's entropy until their probability exceeds this. 1: all."""
    top_n_sigma: float = -1.0
    """Keep tokens within this many standard deviations of the largest logit. 0 or less: all."""
    xtc_probability: float = 0.0
    """Chance, per draw, of dropping every token of at least `xtc_threshold` but the least likely of them. 0: never."""
    xtc_threshold: float = 0.1
    """See `xtc_probability`. Above 0.5: never."""
    dynatemp_range: float = 0.0
    """The temperature varies between temp - this and temp + this with the entropy. 0: fixed."""
    dynatemp_exp: float = 1.0
    """Exponent on the normalised entropy, see `dynatemp_range`."""
    repeat_penalty: float = 1.0
    """Divides positive logits of recent tokens, multiplies negative ones. 1: none."""
    repeat_last_n: int = 64
    """How many accepted tokens count as recent, for all three penalties. 0: none."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the recent tokens."""
    presence_penalty: float = 0.0
    """Subtracted from every recent token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, amount added to its logit); -inf bans the token."""
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """The stages, in order: a selection of DEFAULT_SAMPLERS."""
    seed: int = -1
    """0 to 4294967294; -1 (or 4294967295, as in llama.cpp) picks one, which `Sampler.seed` then reports."""

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE_NUMBERS else (int, float)):
                kind = "a whole number" if name in _WHOLE_NUMBERS else "a number"
                raise RequestError(f"{allowed.flag}: expected {kind}, found {value!r}")
            if not allowed.allows(value):
                raise RequestError(f"{allowed.flag}: expected {allowed}, found {value}")
        for token, amount in self.logit_bias:
            if token < 0 or not (abs(amount) <= _LARGEST_FLOAT32 or amount == -math.inf):
                raise RequestError(
                    f"--logit-bias: expected a token id from 0 and a finite amount or -inf, found {token}{amount:+g}"
                )
        for stage in self.samplers:
            if stage not in DEFAULT_SAMPLERS:
                raise RequestError(f"--samplers: expected some of {', '.join(DEFAULT_SAMPLERS)}, found {stage!r}")
            if self.samplers.count(stage) > 1:
                raise RequestError(f"--samplers: expected each stage at most once, found {stage} twice")

    def banning(self, token_ids: Iterable[int]) -> SamplingParams:
        """The same parameters, with these tokens never chosen (what --ignore-eos does to end-of-generation tokens)."""
        return replace(self, logit_bias=self.logit_bias + tuple((int(token), -math.inf) for token in token_ids))


def sampler_names(text: str, *, letters: bool = False) -> tuple[str, ...]:
    """Stages named as `--samplers` takes them ("top_k;temperature") or, with `letters`, as `--sampler-seq` does ("kt").

    Unlike llama.cpp, which skips what it does not know with a warning, an unknown name raises RequestError.
    """
    if letters:
        unknown = sorted(set(text) - SAMPLER_LETTERS.keys())
        if unknown:
            known = ", ".join(f"{letter} {name}" for letter, name in SAMPLER_LETTERS.items())
            raise RequestError(f"--sampler-seq: expected letters of {known}; found {unknown[0]!r}")
        return tuple(SAMPLER_LETTERS[letter] for letter in text)
    spellings = {name.replace("_", mark): name for name in DEFAULT_SAMPLERS for mark in ("_", "-", "")} | _OTHER_NAMES
    names = []
    for word in filter(None, text.split(";")):
        if word not in spellings:
            raise RequestError(
                f"--samplers: expected names out of {';'.join(DEFAULT_SAMPLERS)} (semicolons between), found {word!r}"
            )
        names.append(spellings[word])
    return tuple(names)


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

    `accept` every token of the prompt and every token generated: the penalties look at the last `repeat_last_n`.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        picks = params.seed in (-1, _MAX_SEED)
        self.seed = int.from_bytes(os.urandom(4), "little") % _MAX_SEED if picks else params.seed
        self._bits = np.random.PCG64(self.seed)
        self._recent: deque[int] = deque(maxlen=params.repeat_last_n)
        self._penalises = params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        # greedy needs no chain, unless a stage moves logits (penalties) or may drop the likeliest token (typical, XTC)
        self._greedy = (
            "temperature" in params.samplers
            and params.temp <= 0
            and params.dynatemp_range == 0
            and not self._penalises
            and params.typical_p >= 1
            and (params.xtc_probability == 0 or params.xtc_threshold > 0.5)
        )

    def accept(self, token_id: int) -> None:
        """Take note that this token is now part of the text."""
        self._recent.append(token_id)

    def reset(self) -> None:
        """Forget the accepted tokens (llama.cpp does so at each turn of a chat). The random stream goes on."""
        self._recent.clear()

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
            if stage in _STAGES:
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

    def _penalise(self, left: _Candidates) -> None:
        p = self.params
        if not self._penalises or not self._recent:
            return
        tokens, counts = np.unique(np.fromiter(self._recent, dtype=np.int64), return_counts=True)
        where = tokens if left.whole else np.flatnonzero(np.isin(left.ids, tokens))
        count = counts[np.searchsorted(tokens, left.ids[where])]
        logit = left.logits[where]
        logit = np.where(logit <= 0, logit * p.repeat_penalty, logit / p.repeat_penalty)
        left.logits[where] = logit - (count * p.frequency_penalty + p.presence_penalty)
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
        if temp < _SMALLEST_FLOAT32:
            best = np.flatnonzero(left.logits == left.logits.max())
            left.take(best[[int(np.argmin(left.ids[best]))]], descending=True)
        else:
            left.logits = left.logits / temp  # not shifted by the maximum: penalties may follow, and they see the sign


_STAGES: dict[str, Callable[[Sampler, _Candidates], None]] = {
    "penalties": Sampler._penalise,
    "top_n_sigma": Sampler._top_n_sigma,
    "top_k": Sampler._top_k,
    "typ_p": Sampler._typical,
    "top_p": Sampler._top_p,
    "min_p": Sampler._min_p,
    "xtc": Sampler._xtc,
    "temperature": Sampler._temperature,
}
