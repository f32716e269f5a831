"""What all plots share: colours, markers, axes, and SVG that can be put into a page.

Drawn for black and white as well as for colour: lines differ by marker, not by colour alone. Needs matplotlib, the
extra `plots`, which nothing else does.
"""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from tqgguf.formats.errors import RequestError

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


def new_axes(x: str, y: str) -> tuple[Any, Any]:
    """A figure and its axes, labelled with what they count and its unit."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return figure, axes


def look_of(index: int, is_filled: bool = True) -> dict[str, Any]:
    """Colour and marker of the index-th line."""
    colour = _COLOURS[index % len(_COLOURS)]
    marker = _MARKERS[index % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": colour if is_filled else "white"}


def as_svg(figure: Any, axes: Any, title: str) -> str:
    """The figure with a legend, as an svg element that says what it shows, to be put into a page."""
    from matplotlib import rc_context

    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    out = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Title": title})
    text = out.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
