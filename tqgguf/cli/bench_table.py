"""What a benchmark found: tables for a terminal and for markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from statistics import median

from tqgguf.cli.figures import aligned, size
from tqgguf.cli.json_text import json_text
from tqgguf.formats.bench_record import REFERENCE, BenchRecord

_MISSING = "-"
ABOVE_F16 = (
    "peak device at {} tokens: a cache in blocks takes more than f16 on contexts as short as a step, because the f16 "
    "rows of a prompt's step (up to -ub tokens) are there beside the blocks that are made of them, and each layer has "
    "room for up to two pages of 128 tokens in f16; before the first page is full, balanced keys also keep the squares "
    "of their queries in 32 bits"
)
Rows = list[Sequence[str]]

_CSV = (
    "kind", "cache", "phase", "n_tokens", "depth", "tokens_per_second", "slowest", "fastest", "of_f16", "kv_bytes",
    "device_bytes", "rss_bytes", "token_match", "character_match", "in_blocks", "seeds",
)  # fmt: skip


def as_text(record: BenchRecord, form: str) -> str:
    """In one of `model_flags.OUTPUT_FORMS`."""
    if form == "json":
        return json_text(record.as_json())
    if form == "csv":
        return as_csv(record).rstrip("\n")
    write = markdown if form == "md" else aligned
    blocks = [write(rows) for rows in tables(record)]
    blocks += [said] if (said := notes(record)) else []
    return "\n\n".join("\n".join(block) for block in blocks)


def notes(record: BenchRecord) -> list[str]:
    """What is to be known of the figures: what was noted while they were measured, and what may surprise in them."""
    above = list(dict.fromkeys(f"{memory.n_tokens:,}" for memory in record.above_f16()))
    return [*record.notes, *([ABOVE_F16.format(", ".join(above))] if above else [])]


def tables(record: BenchRecord) -> list[Rows]:
    """Speed, memory, match: those that were measured, each with its header first."""
    return [rows for rows in (speeds(record), memories(record), matches(record)) if rows]


def speeds(record: BenchRecord) -> Rows:
    """Tokens a second of each test by cache: the median, the extremes, and the share of f16's. Empty without any."""
    measured = record.measured()
    if not measured:
        return []
    rows: Rows = [("cache K/V", "test", "tokens/s", "slowest", "fastest", "of f16")]
    for speed in measured:
        low, high = speed.spread
        ratio = record.ratio(speed)
        share = _MISSING if math.isnan(ratio) else f"{ratio:.2f}x"
        rows.append((speed.mode, speed.name, f"{speed.rate:,.1f}", f"{low:,.1f}", f"{high:,.1f}", share))
    return rows


def memories(record: BenchRecord) -> Rows:
    """Bytes of each cache and the peaks that were measured with it. Empty without any."""
    if not record.memories:
        return []
    f16 = {memory.n_tokens: memory.kv for memory in record.memories if memory.mode == REFERENCE}
    rows: Rows = [("cache K/V", "tokens", "KV cache", "of f16", "peak device", "peak RSS")]
    for m in record.memories:
        share = f"{m.kv / f16[m.n_tokens]:.1%}" if m.n_tokens in f16 else _MISSING
        rss = _MISSING if m.rss is None else size(m.rss)
        rows.append((m.mode, f"{m.n_tokens:,}", size(m.kv), share, size(m.device), rss))
    return rows


def matches(record: BenchRecord) -> Rows:
    """How much of each cache's greedy answers is f16's. Empty where none were compared."""
    if not record.matches:
        return []
    rows: Rows = [("cache K/V", "tokens as f16", "characters as f16", "same from the start", "in blocks")]
    for m in record.matches:
        blocks = _MISSING if m.in_blocks is None else f"{m.in_blocks:.1%}"
        first = f"{median(m.first):g} of {m.n_tokens // m.n_prompts}"
        rows.append((m.mode, f"{m.token_share:.1%}", f"{m.character_share:.1%}", first, blocks))
    return rows


def as_csv(record: BenchRecord) -> str:
    """One line for each figure's row, the columns of all kinds side by side."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV, lineterminator="\n")
    writer.writeheader()
    for speed in record.measured():
        low, high = speed.spread
        ratio = record.ratio(speed)
        writer.writerow(
            {
                "kind": "speed", "cache": speed.mode, "phase": speed.phase, "n_tokens": speed.n_tokens,
                "depth": speed.depth, "tokens_per_second": speed.rate, "slowest": low, "fastest": high,
                "of_f16": "" if math.isnan(ratio) else ratio, "seeds": " ".join(map(str, speed.seeds)),
            }
        )  # fmt: skip
    for memory in record.memories:
        writer.writerow(
            {
                "kind": "memory", "cache": memory.mode, "n_tokens": memory.n_tokens, "kv_bytes": memory.kv,
                "device_bytes": memory.device, "rss_bytes": memory.rss, "seeds": memory.seed,
            }
        )  # fmt: skip
    for match in record.matches:
        writer.writerow(
            {
                "kind": "match", "cache": match.mode, "n_tokens": match.n_tokens, "token_match": match.token_share,
                "character_match": match.character_share, "in_blocks": match.in_blocks,
            }
        )  # fmt: skip
    return out.getvalue()


def markdown(rows: Rows) -> list[str]:
    """A table in markdown, the header first."""
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return [lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]]
