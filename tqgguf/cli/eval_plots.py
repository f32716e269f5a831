"""The plots of an evaluation, as SVG: KLD over bits per value, and KLD along the windows.

Drawn for black and white as well as for colour: types differ by marker, not by colour alone. Needs
matplotlib, the extra `plots`, which nothing else does.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import Any

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.evaluation import Result
from tqgguf.runtime.evaluation_caches import NO_TAIL

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tqgguf",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def check_plots() -> None:
    """RequestError, with what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(
            "--report needs matplotlib, which is not installed; get it with: pip install matplotlib "
            "(the extra plots of tqgguf brings it)"
        )


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
    return _svg(figure, axes, "KL divergence over bits per value")


def kld_over_position(results: Sequence[Result]) -> str:
    """One line for each cache; dashed where it has an f16 tail."""
    figure, axes = _axes("position in the window (tokens)", "mean KL divergence from f16 (nats)")
    for result, look in _looks(results):
        points = [(x, y) for x, y in result.profile if y > 0]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        line = "--" if result.candidate.tail else "-"
        axes.plot(xs, ys, linestyle=line, linewidth=1, label=result.candidate.label, **look)
    axes.set_xlim(left=0)
    return _svg(figure, axes, "KL divergence over position")


def _axes(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_yscale("log")
    return figure, axes


def _looks(results: Sequence[Result]) -> list[tuple[Result, dict[str, Any]]]:
    """Every cache but the reference, with the colour and marker of its types: filled where every key is from blocks."""
    pairs = list(dict.fromkeys(result.candidate.label.removesuffix(NO_TAIL) for result in results[1:]))
    looks = []
    for result in results[1:]:
        index = pairs.index(result.candidate.label.removesuffix(NO_TAIL))
        colour = _COLOURS[index % len(_COLOURS)]
        filling = "white" if result.candidate.tail else colour
        marker = _MARKERS[index % len(_MARKERS)]
        looks.append((result, {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": filling}))
    return looks


def _svg(figure: Any, axes: Any, title: str) -> str:
    """The figure with a legend, as an svg element that says what it shows, to be put into a page."""
    from matplotlib import rc_context

    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    out = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Title": title})
    text = out.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
