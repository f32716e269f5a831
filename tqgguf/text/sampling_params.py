"""What llama.cpp's sampling flags say: their defaults, ranges and names. `sampling` acts on them.

Needs neither numpy nor MLX, so that a command line can show and check them at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tqgguf.formats.errors import Problems, RequestError
from tqgguf.formats.wording import shown

DEFAULT_SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""Order of the stages."""

SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature",
}  # fmt: skip
"""The one-letter names that `--sampler-seq` takes."""

_OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}

MAX_SEED = 2**32 - 1
"""llama.cpp's LLAMA_DEFAULT_SEED, which stands for "pick one"; -1 wraps to it there."""

LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
SMALLEST_FLOAT32 = 2.0**-126
"""llama.cpp parses these flags as float32. With its range as the bound, no step of the chain can overflow float64."""


@dataclass(frozen=True)
class _Range:
    flag: str
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def allows(self, value: float) -> bool:
        low = SMALLEST_FLOAT32 if self.open_low else max(self.low, -LARGEST_FLOAT32)
        return low <= value <= min(self.high, LARGEST_FLOAT32)  # false for NaN

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
    "dry_multiplier": _Range("--dry-multiplier"),
    "dry_base": _Range("--dry-base", 1),
    "dry_allowed_length": _Range("--dry-allowed-length", -(2**31), 2**31 - 1),
    "dry_penalty_last_n": _Range("--dry-penalty-last-n", 0, 2**31 - 1),
    "top_k": _Range("--top-k", -(2**31), 2**31 - 1),
    "repeat_last_n": _Range("--repeat-last-n", 0, 2**31 - 1),
    "seed": _Range("--seed", -1, MAX_SEED),
}
_WHOLE_NUMBERS = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "seed")


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
    dry_multiplier: float = 0.0
    """DRY: a token that makes a repetition of n tokens longer loses this times dry_base ** (n - dry_allowed_length).
    0: none."""
    dry_base: float = 1.75
    """See `dry_multiplier`."""
    dry_allowed_length: int = 2
    """Repetitions of fewer tokens cost nothing."""
    dry_penalty_last_n: int = 64
    """Among how many accepted tokens repetitions are looked for. 0: none."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Texts that no repetition reaches across."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, amount added to its logit); -inf bans the token."""
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """The stages, in order: a selection of DEFAULT_SAMPLERS."""
    seed: int = -1
    """0 to 4294967294; -1 (or 4294967295, as in llama.cpp) picks one, which `Sampler.seed` then reports."""

    def __post_init__(self) -> None:
        problems = Problems()
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE_NUMBERS else (int, float)):
                kind = "a whole number" if name in _WHOLE_NUMBERS else "a number"
                problems.note(f"{allowed.flag}: expected {kind}, found {value!r}")
            elif not allowed.allows(value):
                problems.note(f"{allowed.flag}: expected {allowed}, found {value}")
        for token, amount in self.logit_bias:
            if token < 0 or not (abs(amount) <= LARGEST_FLOAT32 or amount == -math.inf):
                problems.note(
                    f"--logit-bias: expected a token id from 0 and a finite amount or -inf, found {token}{amount:+g}"
                )
        for stage in self.samplers:
            if stage not in DEFAULT_SAMPLERS:
                problems.note(f"--samplers: expected some of {', '.join(DEFAULT_SAMPLERS)}, found {stage!r}")
            if self.samplers.count(stage) > 1:
                problems.note(f"--samplers: expected each stage at most once, found {stage} twice")
        if "" in self.dry_sequence_breakers:
            problems.note("--dry-sequence-breaker: expected a text, or none for no breakers at all; found an empty one")
        problems.check()

    @property
    def looks_for_repetitions(self) -> bool:
        """Whether DRY may change a logit."""
        return self.dry_multiplier != 0 and self.dry_penalty_last_n > 0 and "dry" in self.samplers

    def check_vocabulary(self, n_tokens: int) -> None:
        """RequestError where the biases name a token beyond a vocabulary, or leave none of its tokens."""
        beyond = [token for token, _ in self.logit_bias if token >= n_tokens]
        if beyond:
            raise RequestError(f"--logit-bias: expected a token id below {n_tokens}, found {beyond[0]}")
        if len({token for token, amount in self.logit_bias if amount == -math.inf}) >= n_tokens:
            raise RequestError("--logit-bias: every token of the vocabulary is banned; lift at least one")

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
            raise RequestError(f"--sampler-seq: expected letters of {known}; found {', '.join(map(repr, unknown))}")
        return tuple(SAMPLER_LETTERS[letter] for letter in text)
    spellings = {name.replace("_", mark): name for name in DEFAULT_SAMPLERS for mark in ("_", "-", "")} | _OTHER_NAMES
    words = list(filter(None, text.split(";")))
    unknown = [word for word in words if word not in spellings]
    if unknown:
        raise RequestError(
            f"--samplers: expected names out of {';'.join(DEFAULT_SAMPLERS)} (semicolons between), "
            f"found {', '.join(map(shown, unknown))}"
        )
    return tuple(spellings[word] for word in words)
