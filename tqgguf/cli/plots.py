"""What all plots share: colours, markers, axes, labels, and SVG that can be put into a page or stand alone.

Drawn for black and white as well as for colour: lines differ by marker, not by colour alone. The SVG follows the
reader's light or dark mode by itself. Plots are as wide as a phone, so that their letters are read there without
zooming; a wide screen shows them larger. Needs matplotlib, the extra `plots`, which nothing else does.
"""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tqgguf.formats.errors import RequestError

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows; and what
# stands for each on a dark ground. Black is not quite black, as matplotlib leaves the default of SVG unsaid.
_COLOURS = {
    "#111111": "#ededed",
    "#0072b2": "#4da6e8",
    "#d55e00": "#ff8b45",
    "#009e73": "#35c99b",
    "#cc79a7": "#e79fc6",
    "#56b4e9": "#a5dcfa",
    "#e69f00": "#f4bd45",
}
_LIGHT = tuple(_COLOURS)
_GROUND = {"#ffffff": "#16191d"}
"""Of a figure, as `page` has it."""
_GRID = {"#dddddd": "#3a3f45"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tqgguf",  # the same figures give the same file
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": next(iter(_GRID)),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _LIGHT[0]),
}
_WIDTH, _HEIGHT = 4.4, 3.1
"""Inches of 72 points, without a legend: 422 pixels wide."""
_FONT = 9.0
_ROOM = 1.8
"""Factor by which a logarithmic axis goes beyond its values at either end."""
_LABEL_CHARACTERS, _ROW_CHARACTERS, _HANDLE_CHARACTERS = 44, 60, 8
"""Of a legend: of a label's line (longer labels take several), of a row of labels, and what a mark takes of it."""


def check_plots() -> None:
    """RequestError, with what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(
            "--report needs matplotlib, which is not installed; get it with: pip install matplotlib "
            "(the extra plots of tqgguf brings it)"
        )


def new_axes(x: str, y: str, scale: float = 1.0) -> tuple[Any, Any]:
    """A figure and its axes, labelled with what they count and its unit. scale: of all letters, for pictures that are
    shown smaller than they are.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**_STYLE, "font.size": _FONT * scale}):
        figure = Figure(figsize=(_WIDTH * max(1.0, scale * 0.9), _HEIGHT * max(1.0, scale * 0.9)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        for axis in (axes.xaxis, axes.yaxis):
            _write_evenly(axis)
    return figure, axes


def _write_evenly(axis: Any) -> None:
    """Numbers with as many decimals as the one that needs most of them: 3.8, 4.0, 4.2."""

    def text(value: float, _: int) -> str:
        written = (tick(other).partition(".")[2] for other in axis.get_majorticklocs())
        return f"{value:,.{max(map(len, written), default=0)}f}"

    axis.set_major_formatter(text)


def log_scale(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis from `low` to `high`, both above 0, with as many labels as are told apart."""
    from matplotlib.ticker import LogLocator, NullFormatter

    name = "x" if axis.axis_name == "x" else "y"
    getattr(axis.axes, f"set_{name}scale")("log")
    getattr(axis.axes, f"set_{name}lim")(low / _ROOM, high * _ROOM)
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: tick(value))
    axis.set_minor_formatter(NullFormatter())


def from_zero(axes: Any) -> None:
    """A vertical axis from 0 to somewhat above what was drawn, so that no mark is cut."""
    axes.set_ylim(0, axes.dataLim.y1 * 1.08 or 1)


def few_ticks(axes: Any) -> None:
    """Whole numbers on the horizontal axis, so few that labels of six digits stand apart on a phone."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def tick(value: float) -> str:
    """A number on an axis, as tables write it: 0.002, 1,024."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def look_of(index: int) -> dict[str, Any]:
    """Colour and marker of the index-th line."""
    colour = _LIGHT[index % len(_LIGHT)]
    marker = _MARKERS[index % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5}


Point = tuple[float, float]


def label_points(figure: Any, axes: Any, points: Sequence[Point], labels: Sequence[str]) -> bool:
    """Write each label beside its point where it meets neither another label nor a point, within the axes; those with
    the fewest such places first. False, and nothing is written, where there is no place for one of them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # after which places are known
    renderer = canvas.get_renderer()
    room = axes.get_window_extent(renderer).padded(2)
    letters = axes.xaxis.label.get_size()
    mark = letters * figure.dpi / 72 / 1.5
    taken = [Bbox.from_bounds(x - mark / 2, y - mark / 2, mark, mark) for x, y in map(axes.transData.transform, points)]

    def is_free(text: Any) -> bool:
        box = text.get_window_extent(renderer)
        inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
        return inside and not any(box.overlaps(other) for other in taken)

    def texts_of(point: Point, label: str) -> Iterator[Any]:
        for dx, dy, across, up in _BESIDE:
            yield axes.annotate(
                label, point, (dx * letters * 0.75, dy * letters * 0.75), textcoords="offset points",
                ha=across, va=up, size=letters, color=_LIGHT[0],
            )  # fmt: skip

    tried = [list(texts_of(point, label)) for point, label in zip(points, labels, strict=True)]
    chosen: list[Any] = []
    for texts in sorted(tried, key=lambda texts: sum(map(is_free, texts))):
        place = next(filter(is_free, texts), None)
        if place is None:
            break
        chosen.append(place)
        taken.append(place.get_window_extent(renderer))
    has_all = len(chosen) == len(tried)
    for text in (text for texts in tried for text in texts):
        if not (has_all and text in chosen):
            text.remove()
    return has_all


_BESIDE = (
    (1, 0, "left", "center"),
    (-1, 0, "right", "center"),
    (0, 1, "center", "bottom"),
    (0, -1, "center", "top"),
    (0.7, 0.7, "left", "bottom"),
    (0.7, -0.7, "left", "top"),
    (-0.7, 0.7, "right", "bottom"),
    (-0.7, -0.7, "right", "top"),
    (-0.7, 1, "left", "bottom"),
    (-0.7, -1, "left", "top"),
    (0.7, 1, "right", "bottom"),
    (0.7, -1, "right", "top"),
)
"""Where a label may stand, the best place first: steps from the point, and which of its edges is there."""


def as_svg(figure: Any, axes: Any, title: str, legend: bool = True) -> str:
    """The figure as an svg element that says what it shows, to be put into a page or a file. legend: below it, of the
    labels that lines were given, each once.
    """
    from matplotlib import rc_context

    if legend:
        _add_legend(figure, axes)
    out = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    head, end, rest = text.partition(">")
    return f"{head}{end}\n<style>{_dark_style()}</style>{rest}"


def _add_legend(figure: Any, axes: Any) -> None:
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = ["\n".join(textwrap.wrap(label, _LABEL_CHARACTERS)) for label in handles]
    if not labels:
        return
    longest = max(len(line) for label in labels for line in label.splitlines())
    n_columns = max(1, min(3, _ROW_CHARACTERS // (longest + _HANDLE_CHARACTERS)))
    rows = -(-sum(label.count("\n") + 1 for label in labels) // n_columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * rows)
    figure.legend(
        handles.values(), labels, loc="outside lower left", ncols=n_columns, frameon=False, fontsize=_FONT - 0.5,
        handletextpad=0.4, columnspacing=1.0, borderpad=0.1, labelcolor=_LIGHT[0],
    )  # fmt: skip


def _dark_style() -> str:
    """Rules that give every colour its counterpart where the reader has a dark screen: styles of single elements are
    matplotlib's, so that these must outweigh them.
    """
    rules = []
    for light, dark in {**_COLOURS, **_GROUND, **_GRID}.items():
        for part in ("fill", "stroke"):
            rules.append(f'[style*="{part}: {light}"]{{{part}:{dark}!important}}')
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}"
