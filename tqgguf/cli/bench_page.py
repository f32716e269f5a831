"""The page of `tqgguf bench --report`: tables, plots and how to repeat them, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tqgguf.cli import bench_plots, bench_table
from tqgguf.cli.page import html_page, paragraph, plot, wide_table
from tqgguf.formats.bench_record import BenchRecord

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
    parts += map(paragraph, bench_table.notes(record))
    parts += chain(_speeds(record), _memories(record))
    if rows := bench_table.matches(record):
        parts += ["<h2>Answers as from f16</h2>", wide_table(rows), paragraph(_MATCH)]
    return html_page(
        f"KV caches of {record.about['model']['file']}: speed and memory", parts, record.about, "bench", words
    )


def _speeds(record: BenchRecord) -> Sequence[str]:
    rows = bench_table.speeds(record)
    if not rows:
        return []
    found = ["<h2>Speed</h2>", wide_table(rows), paragraph(_SPEED)]
    for phase, n in dict.fromkeys((speed.phase, speed.n_tokens) for speed in record.measured()):
        title = f"{'Prefill' if phase == 'prefill' else 'Decode'} of {n:,} tokens over depth"
        svg = bench_plots.speed_over_depth(record, phase, n)
        found.append(plot(title, svg, "Higher is better. Bars: the slowest and the fastest repetition."))
    return found


def _memories(record: BenchRecord) -> Sequence[str]:
    rows = bench_table.memories(record)
    if not rows:
        return []
    found = ["<h2>Memory</h2>", wide_table(rows), paragraph(_MEMORY)]
    for what, title in (("kv", "KV cache"), ("device", "Peak device memory"), ("rss", "Peak resident memory")):
        if any(getattr(memory, what) is not None for memory in record.memories):
            svg = bench_plots.memory_over_context(record, what)
            found.append(plot(f"{title} over context", svg, "Lower is better."))
    return found
