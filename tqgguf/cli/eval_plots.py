"""The plots of an evaluation, as SVG: KLD over bits per value, and KLD along the windows.

How plots look in general is `plots`' matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tqgguf.cli.plots import as_svg, look_of, new_axes
from tqgguf.runtime.evaluation.caches import NO_TAIL
from tqgguf.runtime.evaluation.compare import Result


def kld_over_bits(results: Sequence[Result]) -> str:
    """One point with its standard error for each cache; lower and further left is better."""
    figure, axes = _axes("stored bits per value (mean of K and V)", "mean KL divergence from f16 (nats)")
    for result, look in _looks(results):
        x, y = result.candidate.bits.mean, result.statistics.kld
        if not (math.isfinite(x) and y > 0):
            continue
        error = result.statistics.kld_error
        bar = [[min(error, y * 0.9)], [error]] if math.isfinite(error) else None  # down to 0 there is no logarithm
        axes.errorbar(x, y, yerr=bar, capsize=2, linestyle="", label=result.candidate.label, **look)
    return as_svg(figure, axes, "KL divergence over bits per value")


def kld_over_position(results: Sequence[Result]) -> str:
    """One line for each cache; dashed where it has an f16 tail."""
    figure, axes = _axes("position in the window (tokens)", "mean KL divergence from f16 (nats)")
    for result, look in _looks(results):
        points = [(x, y) for x, y in result.profile if y > 0]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        line = "--" if result.candidate.tail else "-"
        axes.plot(xs, ys, linestyle=line, linewidth=1, label=result.candidate.label, **look)
    axes.set_xlim(left=0)
    return as_svg(figure, axes, "KL divergence over position")


def _axes(x: str, y: str) -> tuple[Any, Any]:
    figure, axes = new_axes(x, y)
    axes.set_yscale("log")
    return figure, axes


def _looks(results: Sequence[Result]) -> list[tuple[Result, dict[str, Any]]]:
    """Every cache but the reference, with the colour and marker of its types: filled where every key is from blocks."""
    pairs = list(dict.fromkeys(result.candidate.label.removesuffix(NO_TAIL) for result in results[1:]))
    looks = []
    for result in results[1:]:
        index = pairs.index(result.candidate.label.removesuffix(NO_TAIL))
        looks.append((result, look_of(index, is_filled=not result.candidate.tail)))
    return looks
