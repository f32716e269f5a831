"""The plots of an evaluation, as SVG: KLD over bits per value, and KLD along the windows.

How plots look in general is `plots`' matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tqgguf.cli.plots import as_svg, label_points, log_scale, look_of, new_axes
from tqgguf.measuring.evaluation.caches import NO_TAIL
from tqgguf.measuring.evaluation.compare import Result

_BITS, _KLD = "stored bits per value (mean of K and V)", "mean KL divergence from f16 (nats)"


@dataclass(frozen=True)
class Mark:
    """One cache in the plot of KLD over bits. error: one standard error, nan where there is none."""

    label: str
    bits: float
    kld: float
    error: float = math.nan

    @property
    def bar(self) -> tuple[float, float]:
        """How far the error's bar goes down and up. Down it ends above 0, which has no logarithm."""
        error = self.error if math.isfinite(self.error) else 0.0
        return min(error, self.kld * 0.9), error


def marks_of(results: Sequence[Result]) -> list[Mark]:
    """A mark for each."""
    return [Mark(short_name(r), r.candidate.bits.mean, r.statistics.kld, r.statistics.kld_error) for r in results]


def kld_over_bits(marks: Sequence[Mark], scale: float = 1.0) -> str:
    """One mark for each cache, its name beside it where there is room for all of them, else in a legend; lower and
    further left is better. scale: of letters and marks.
    """
    figure, axes = new_axes(_BITS, _KLD, scale)
    shown = [(i, mark) for i, mark in enumerate(marks) if math.isfinite(mark.bits) and mark.kld > 0]
    if shown:
        ends = [(mark.kld - mark.bar[0], mark.kld + mark.bar[1]) for _, mark in shown]
        log_scale(axes.yaxis, min(low for low, _ in ends), max(high for _, high in ends))
    for i, mark in shown:
        bar = [[length] for length in mark.bar] if any(mark.bar) else None
        look = {**look_of(i), "markersize": 6 * scale}
        axes.errorbar(mark.bits, mark.kld, yerr=bar, capsize=2, linestyle="", label=mark.label, **look)
    axes.margins(x=0.25)
    points = [(mark.bits, mark.kld) for _, mark in shown]
    has_names = label_points(figure, axes, points, [mark.label for _, mark in shown])
    return as_svg(figure, axes, "KL divergence over bits per value", legend=not has_names)


def kld_over_position(results: Sequence[Result]) -> str:
    """One line for each cache."""
    figure, axes = new_axes("position in the window (tokens)", _KLD)
    lines = [[(x, y) for x, y in result.profile if y > 0] for result in results]
    values = [y for line in lines for _, y in line]
    if values:
        log_scale(axes.yaxis, min(values), max(values))
    for i, (result, line) in enumerate(zip(results, lines, strict=True)):
        axes.plot([x for x, _ in line], [y for _, y in line], linewidth=1, label=short_name(result), **look_of(i))
    axes.set_xlim(left=0)
    return as_svg(figure, axes, "KL divergence over position")


def short_name(result: Result) -> str:
    """As `--cache-types` takes it: turbo4 for turbo4/turbo4."""
    types, at, form = name_of(result).partition("@")
    type_k, _, type_v = types.partition("/")
    return (type_k if type_k == type_v else types) + at + form


def name_of(result: Result) -> str:
    """A cache's name, the same with and without a tail."""
    return result.candidate.label.removesuffix(NO_TAIL)
