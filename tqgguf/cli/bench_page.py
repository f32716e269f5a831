"""The page of `tqgguf bench --report`: verdict, tables, plots, how to repeat them; one file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from tqgguf.cli import bench_plots, bench_table
from tqgguf.cli.page import html_page, paragraph, plot, plots, small, wide_table
from tqgguf.formats.bench_record import REFERENCE, BenchRecord, Phase

_SPEED = (
    "pp: prefill, tg: decode, of so many tokens, behind as many as stand after d. Medians of the repetitions, with the "
    "slowest and the fastest; of f16: the median of the repetitions' own ratios to the f16 cache. In each repetition "
    "every cache has its turn."
)
_MEMORY = (
    "KV cache: what it holds, by the formula of run's report (mlx-lm's own: as allocated). Peaks of a process for each "
    "cache that does nothing else: device is what MLX held, RSS what was resident, the program and weights included."
)
_MATCH = (
    "Greedy answers to prompts of which nine tenths or more lie in blocks: how many tokens and characters are f16's at "
    "the same place, and how many tokens before the first difference (median). Once two answers part they hardly meet "
    "again, so a single early difference costs much; `tqgguf eval` weighs every token."
)


def page(record: BenchRecord, words: Sequence[str]) -> str:
    """The whole page, HTML. `words`: the command line."""
    parts = [paragraph("The benchmark was interrupted before its end.")] if record.about.get("interrupted") else []
    parts += chain(_beside_f16(record), map(small, bench_table.notes(record)), _speeds(record), _memories(record))
    if rows := bench_table.matches(record):
        parts += ["<h2>Answers as from f16</h2>", wide_table(rows), small(_MATCH)]
    title = f"KV caches of {record.about['model']['file']}: speed and memory"
    return html_page(title, list(map(paragraph, verdict(record))), parts, record.about, "bench", words)


def verdict(record: BenchRecord) -> list[str]:
    """What was found of the other caches beside f16, in a sentence, and what must be known before it is believed."""
    figures = beside_f16(record)
    if not figures:
        return ["No other cache was measured beside f16."]
    modes = list(dict.fromkeys(mode for figure in figures for mode in figure.of_mode))
    subject = f"{modes[0]} " if len(modes) == 1 else f"The {len(modes)} other caches "
    clauses = [figure.clause(len(modes) == 1) for figure in figures]
    said = [subject + " and ".join([", ".join(clauses[:-1])] * (len(clauses) > 1) + clauses[-1:]) + "."]
    if min((len(speed.seconds) for speed in record.measured()), default=0) == 1:
        said.append("Every speed is one sample: how far it scatters is not known (-r sets how many are taken).")
    return said


@dataclass(frozen=True)
class BesideF16:
    """One figure of each other cache, as a share of f16's. says: which figure it is. verb: of one cache, of several.
    behind: what follows the share in a sentence. form: of a share.
    """

    name: str
    says: str
    verb: tuple[str, str]
    behind: str
    form: str
    of_mode: Mapping[str, float]

    def written(self, mode: str) -> str:
        return self.form.format(self.of_mode[mode]) if mode in self.of_mode else "-"

    def clause(self, is_one: bool) -> str:
        low, high = (self.form.format(end(self.of_mode.values())) for end in (min, max))
        return f"{self.verb[not is_one]} {low if low == high else f'{low} to {high}'} {self.behind}"


def beside_f16(record: BenchRecord) -> list[BesideF16]:
    """What other caches take and do beside f16, at the longest context and behind the most tokens measured."""
    context = max((memory.n_tokens for memory in record.memories), default=0)
    sizes = {memory.mode: memory.kv for memory in record.memories if memory.n_tokens == context}
    f16 = sizes.pop(REFERENCE, 0)
    shares = {mode: size / f16 for mode, size in sizes.items()} if f16 else {}
    figures = [
        BesideF16(
            "memory",
            f"of the KV cache at {context:,} tokens",
            ("takes", "take"),
            f"of f16's memory at {context:,} tokens",
            "{:.0%}",
            shares,
        )
    ]
    for phase, (one, several) in _PHASES.items():
        rows = [speed for speed in record.measured() if speed.phase == phase and speed.mode != REFERENCE]
        depth, n = max(((speed.depth, speed.n_tokens) for speed in rows), default=(0, 0))
        ratios = {s.mode: record.ratio(s) for s in rows if (s.depth, s.n_tokens) == (depth, n)}
        known = {mode: ratio for mode, ratio in ratios.items() if not math.isnan(ratio)}
        behind = f"times f16's speed behind {depth:,} tokens" if depth else "times f16's speed"
        says = f"speed over {n:,} tokens" + (f" behind {depth:,}" if depth else "") + ", above 1 is faster"
        figures.append(BesideF16(phase, says, (one, several), behind, "{:.2f}", known))
    same = {match.mode: match.token_share for match in record.matches if match.mode != REFERENCE}
    figures.append(
        BesideF16(
            "answers",
            "tokens that are the same in greedy answers",
            ("gives", "give"),
            "of the tokens of f16's greedy answers",
            "{:.0%}",
            same,
        )
    )
    return [figure for figure in figures if figure.of_mode]


_PHASES: Mapping[Phase, tuple[str, str]] = {
    "prefill": ("evaluates prompts at", "evaluate prompts at"),
    "decode": ("decodes at", "decode at"),
}


def _beside_f16(record: BenchRecord) -> Sequence[str]:
    figures = beside_f16(record)
    modes = [mode for mode in record.modes if any(mode in figure.of_mode for figure in figures)]
    if len(modes) < 2:
        return []
    says = [f"{figure.name.capitalize()}: {figure.says}." for figure in figures]
    rows = [("cache K/V", *(figure.name for figure in figures))]
    rows += [(mode, *(figure.written(mode) for figure in figures)) for mode in modes]
    return ["<h2>Beside f16</h2>", wide_table(rows), small(f"Shares of f16's figure. {' '.join(says)}")]


def _speeds(record: BenchRecord) -> Sequence[str]:
    rows = bench_table.speeds(record)
    if not rows:
        return []
    drawn = []
    for phase, n in dict.fromkeys((speed.phase, speed.n_tokens) for speed in record.measured()):
        title = f"{'Prefill' if phase == 'prefill' else 'Decode'} of {n:,} tokens over depth"
        svg = bench_plots.speed_over_depth(record, phase, n)
        drawn.append(plot(title, svg, "Higher is better. Bars: the slowest and the fastest repetition."))
    return ["<h2>Speed</h2>", wide_table(rows), small(_SPEED), plots(drawn)]


def _memories(record: BenchRecord) -> Sequence[str]:
    rows = bench_table.memories(record)
    if not rows:
        return []
    drawn = [
        plot(f"{title} over context", bench_plots.memory_over_context(record, what), "Lower is better.")
        for what, title in (("kv", "KV cache"), ("device", "Peak device memory"), ("rss", "Peak resident memory"))
        if any(getattr(memory, what) is not None for memory in record.memories)
    ]
    return ["<h2>Memory</h2>", wide_table(rows), small(_MEMORY), plots(drawn)]
