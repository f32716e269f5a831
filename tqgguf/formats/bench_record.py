"""What `tqgguf bench` measured, as records, as the JSON that it writes, and read back from there; two of them compared.

Every sample stands beside its seed. Medians and spreads are computed from samples, never stored without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tqgguf.formats.errors import FormatError
from tqgguf.formats.json_file import read_json
from tqgguf.formats.wording import shown

FORMAT, VERSION = "tqgguf bench", 1
REFERENCE = "f16/f16"
"""The mode that ratios and matches refer to."""

SHORT_STEPS = 2
"""Steps of a prompt within which the f16 rows of the last one may weigh more than what blocks save."""

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Speed:
    """One mode, one test: n_tokens evaluated behind `depth` tokens. seconds, seeds: one of each repetition."""

    mode: str
    phase: Phase
    n_tokens: int
    depth: int
    seconds: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As llama-bench names it."""
        test = f"{'pp' if self.phase == 'prefill' else 'tg'}{self.n_tokens}"
        return test + (f" @ d{self.depth}" if self.depth else "")

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.n_tokens / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        """Their median."""
        return median(self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest of them."""
        return min(self.rates), max(self.rates)


@dataclass(frozen=True)
class Memory:
    """One mode at one context, in bytes, by a process of its own. device: the most that MLX held, weights included
    where they are in its memory; rss: the most of the process that was resident, None where the system does not say.
    """

    mode: str
    n_tokens: int
    kv: int
    device: int
    rss: int | None
    seed: int


@dataclass(frozen=True)
class Match:
    """One mode's answers against f16's, greedy. tokens, characters: how many were the same at the same place, of
    n_tokens and n_characters. first: tokens before the first difference, of each prompt. in_blocks: share of the keys
    that the answer read from blocks, None for caches that are not ours.
    """

    mode: str
    n_prompts: int
    n_prompt_tokens: int
    tokens: int
    n_tokens: int
    characters: int
    n_characters: int
    first: list[int]
    in_blocks: float | None

    @property
    def token_share(self) -> float:
        return self.tokens / max(self.n_tokens, 1)

    @property
    def character_share(self) -> float:
        return self.characters / max(self.n_characters, 1)


@dataclass
class BenchRecord:
    """Everything of one call. modes: labels in the order of the request. about: settings, model, machine, versions."""

    modes: list[str]
    about: dict[str, Any]
    speeds: list[Speed] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measured(self) -> list[Speed]:
        """The speeds that have a sample."""
        return [speed for speed in self.speeds if speed.seconds]

    def above_f16(self) -> list[Memory]:
        """Memory of caches in blocks whose peak on the device is above that of the f16 cache at the same context, of
        contexts up to SHORT_STEPS steps of a prompt.
        """
        f16 = {memory.n_tokens: memory for memory in self.memories if memory.mode == REFERENCE}
        most = SHORT_STEPS * self.about.get("chunk", 0)
        pairs = ((memory, f16[memory.n_tokens]) for memory in self.memories if memory.n_tokens in f16)
        return [own for own, of in pairs if own.n_tokens <= most and own.kv < of.kv and own.device > of.device]

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured."""
        return bool(self.measured() or self.memories or self.matches)

    def ratio(self, speed: Speed) -> float:
        """Median of the repetitions' own ratios to the f16 cache in the same test; nan without one."""
        reference = next((other for other in self.speeds if _test(other) == (REFERENCE, *_test(speed)[1:])), None)
        if reference is None:
            return math.nan
        ratios = [f16 / own for own, f16 in zip(speed.seconds, reference.seconds, strict=False)]
        return median(ratios) if ratios else math.nan

    def as_json(self) -> dict[str, Any]:
        rows = [
            {**asdict(speed), "test": speed.name, "tokens_per_second": speed.rate, "spread": list(speed.spread),
             "of_f16": None if math.isnan(ratio := self.ratio(speed)) else ratio}
            for speed in self.measured()
        ]  # fmt: skip
        return {
            "format": FORMAT,
            "version": VERSION,
            **self.about,
            "modes": self.modes,
            "speed": rows,
            "memory": [asdict(memory) for memory in self.memories],
            "match": [
                {**asdict(match), "token_match": match.token_share, "character_match": match.character_share}
                for match in self.matches
            ],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Difference:
    """One figure in two records. ratio: the second over the first. samples: those of the record with fewer, None for a
    figure that comes out the same every time. within_spread: the samples of both overlap, so that the difference says
    nothing; None where there is no spread to tell that by: one sample has none.
    """

    what: str
    mode: str
    first: float
    second: float
    samples: int | None
    within_spread: bool | None

    @property
    def ratio(self) -> float:
        return self.second / self.first if self.first else math.nan


_MEMORY_FIGURES = (("kv", "KV cache", None), ("device", "peak device", 1), ("rss", "peak RSS", 1))
"""Field of Memory, its name, and how often it was measured; the first is computed."""


def compare(first: BenchRecord, second: BenchRecord) -> Iterator[Difference]:
    """Every figure that both records have, the first one's order."""
    others = {_test(speed): speed for speed in second.measured()}
    for speed in first.measured():
        other = others.get(_test(speed))
        if other is not None:
            (low, high), (other_low, other_high) = speed.spread, other.spread
            samples = min(len(speed.seconds), len(other.seconds))
            overlap = low <= other_high and other_low <= high if samples > 1 else None
            yield Difference(f"{speed.name} tokens/s", speed.mode, speed.rate, other.rate, samples, overlap)
    memories = {(memory.mode, memory.n_tokens): memory for memory in second.memories}
    for memory in first.memories:
        twin = memories.get((memory.mode, memory.n_tokens))
        for name, what, measured in _MEMORY_FIGURES if twin is not None else ():
            values = getattr(memory, name), getattr(twin, name)
            if None not in values:
                yield Difference(f"{what} bytes, {memory.n_tokens:,} tokens", memory.mode, *values, measured, None)
    matches = {match.mode: match for match in second.matches}
    for match in first.matches:
        if match.mode in matches:
            shares = match.token_share, matches[match.mode].token_share
            yield Difference("token match", match.mode, *shares, None, None)


def differing_settings(first: BenchRecord, second: BenchRecord) -> list[str]:
    """What makes two records less comparable, a line each."""
    lines = []
    for name in ("model", "device", "machine", "chunk", "threads", "seed", "versions"):
        for what, ours, theirs in _differing(name, first.about.get(name), second.about.get(name)):
            lines.append(f"{what} differs: {ours} and {theirs}")
    for what, ours, theirs in zip(_TESTS, *map(_tests, (first, second)), strict=True):
        for which, only in (("first", ours - theirs), ("second", theirs - ours)):
            if only:
                lines.append(f"only in the {which}: {what} {', '.join(sorted(only))}")
    return lines


_TESTS = ("caches", "speed of", "memory at", "answers of")


def _tests(record: BenchRecord) -> tuple[set[str], ...]:
    """What a record measured, by name."""
    return (
        set(record.modes),
        {speed.name for speed in record.measured()},
        {f"{memory.n_tokens:,} tokens" for memory in record.memories},
        {f"{match.n_tokens:,} tokens" for match in record.matches},
    )


def _differing(name: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys((*ours, *theirs)):
            yield from _differing(f"{name}, {key}", ours.get(key), theirs.get(key))
    elif ours != theirs:
        yield name, ours, theirs


def read_record(path: str) -> BenchRecord:
    """FormatError: not what `BenchRecord.as_json` gives."""
    if not Path(path).is_file():
        raise FormatError(f"{path}: expected a file of `tqgguf bench -o json`, found none")
    found = read_json(Path(path))
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise FormatError(
            f"{path}: expected what `tqgguf bench -o json` writes (version {VERSION}), found "
            f"{shown(found['format']) if 'format' in found else 'none'} of version "
            f"{shown(found['version']) if 'version' in found else 'none'}"
        )
    try:
        return BenchRecord(
            [str(mode) for mode in found["modes"]],
            {name: value for name, value in found.items() if name not in _OWN},
            [_speed(row) for row in found["speed"]],
            [Memory(**_fields(Memory, row)) for row in found["memory"]],
            [Match(**_fields(Match, row)) for row in found["match"]],
            [str(note) for note in found["notes"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path}: expected the records of `tqgguf bench`, found a mistake: {_mistake(error)}"
        ) from error


def _mistake(error: Exception) -> str:
    return f"no {error.args[0]}" if isinstance(error, KeyError) else " ".join(str(error).split())


_OWN = ("format", "version", "modes", "speed", "memory", "match", "notes")


def _speed(row: Mapping[str, Any]) -> Speed:
    speed = Speed(**_fields(Speed, row))
    if not speed.seconds or not all(isinstance(s, (int, float)) and 0 < s < math.inf for s in speed.seconds):
        raise ValueError(f"seconds: expected numbers above 0, found {speed.seconds}")
    return speed


def _fields(kind: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in kind.__dataclass_fields__}


def _test(speed: Speed) -> tuple[str, Phase, int, int]:
    return speed.mode, speed.phase, speed.n_tokens, speed.depth
