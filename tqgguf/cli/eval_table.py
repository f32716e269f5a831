"""What an evaluation found, as tables for a terminal and as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tqgguf.cli.figures import aligned
from tqgguf.measuring.evaluation.compare import Result
from tqgguf.measuring.evaluation.statistics import Statistics

_MISSING = "-"
_FEW, _MANY = 4, 6
"""Decimals of a figure, and those of one that is below _SMALL."""
_SMALL = 1e-3
_COLUMNS = ("cache K/V", "bits", "perplexity", "ratio", "KLD", "median", "99%", "same top")


def lines(results: Sequence[Result]) -> list[str]:
    """The table of all figures, then KLD by position where there is more than one range, then notes."""
    found = aligned(figures(results))
    for more in (aligned(ranges(results)), notes(results)):
        found += ["", *more] if more else []
    return found


def figures(results: Sequence[Result]) -> list[Sequence[str]]:
    """The table of all figures, its header first."""
    return [_COLUMNS, *(_row(result) for result in results)]


def ranges(results: Sequence[Result]) -> list[Sequence[str]]:
    """Mean KLD by position, the header first; nothing where all positions are in one range."""
    edges = [(r.start, r.end) for r in results[0].by_position]
    if len(edges) < 2:
        return []
    heads = ["KLD by position", *(f"{_thousands(start)}-{_thousands(end)}" for start, end in edges)]
    return [heads, *([r.candidate.label, *(number(p.statistics.kld) for p in r.by_position)] for r in results[1:])]


def notes(results: Sequence[Result]) -> list[str]:
    """What is to be known of single caches, and where K's channel scale is from."""
    origins = sorted({r.candidate.scale_from for r in results} - {""})
    scale = [f"channel scale of K, where it is balanced in full: from {' and '.join(origins)}"] if origins else []
    return [f"{r.candidate.label}: {note}" for r in results for note in _notes(r)] + scale


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The same figures by name, unrounded; null where there is none."""
    return [
        {
            "label": result.candidate.label,
            "type_k": result.candidate.type_k,
            "type_v": result.candidate.type_v,
            "tail": result.candidate.tail,
            "balance": result.candidate.balance,
            "exact_first": result.candidate.n_prefix,
            "scale_from": result.candidate.scale_from or None,
            "simulated": result.candidate.simulated,
            "note": result.candidate.note,
            "bits_per_value": finite(asdict(result.candidate.bits)),
            **finite(asdict(result.statistics)),
            "by_position": [
                {"start": r.start, "end": r.end, **finite(asdict(r.statistics))} for r in result.by_position
            ],
            "reads": asdict(result.reads),
            "by_fallback": result.by_fallback,
        }
        for result in results
    ]


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures with None in the place of nan, which JSON does not have."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in figures.items()}


def number(x: float) -> str:
    """Four decimals, or six where four say little, or that it is less than six decimals show."""
    if math.isnan(x):
        return _MISSING
    decimals = _decimals(x)
    if x and not float(text := f"{x:.{decimals}f}"):
        return f"<{10**-decimals:.{decimals}f}" if x > 0 else f">-{10**-decimals:.{decimals}f}"
    return text if x else f"{x:.{decimals}f}"


def kld(statistics: Statistics) -> str:
    """Mean KLD and its standard error, with as many decimals."""
    x, error = statistics.kld, statistics.kld_error
    return number(x) if math.isnan(error) else f"{number(x)} ± {error:.{_decimals(x)}f}"


def _decimals(x: float) -> int:
    return _FEW if x == 0 or abs(x) >= _SMALL else _MANY


def bits(x: float) -> str:
    """Bits per value with three decimals, or a mark where there is no number."""
    return _MISSING if math.isnan(x) else f"{x:.3f}"


def _row(result: Result) -> tuple[str, ...]:
    s, candidate = result.statistics, result.candidate
    return (
        candidate.label + (" *" if candidate.simulated else ""),
        bits(candidate.bits.mean),
        _with_error(s.perplexity, s.perplexity_error, 3),
        _with_error(s.ratio, s.ratio_error, 4),
        kld(s),
        number(s.kld_median),
        number(s.kld_p99),
        _MISSING if math.isnan(s.same_top) else f"{s.same_top:.2%}",
    )


def _with_error(x: float, error: float, digits: int) -> str:
    return _MISSING if math.isnan(x) else f"{x:.{digits}f} ± {error:.{digits}f}"


def _notes(result: Result) -> list[str]:
    notes = [result.candidate.note] if result.candidate.note else []
    if result.by_fallback:
        notes.append(f"{result.by_fallback:,} keys were read by fallback, decoded for a model that attends by itself")
    return notes


def _thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 and n else str(n)
