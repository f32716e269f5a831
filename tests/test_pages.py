"""Pages of --report say first what was found, are read on a phone and in the dark, and hold no words of a program."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tiny_models import TinyModel, write_tiny

from tqgguf.cli import bench_page, doctor_page, eval_page, eval_table, page, plots
from tqgguf.cli.eval_plots import Mark, kld_over_bits
from tqgguf.cli.main import main
from tqgguf.formats.bench_record import BenchRecord, Match, Memory, Speed
from tqgguf.formats.blocks.bits_per_value import StoredBits
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.measuring.evaluation.caches import Candidate
from tqgguf.measuring.evaluation.compare import Result
from tqgguf.measuring.evaluation.dominance import better_one, is_clearly_less, judged
from tqgguf.measuring.evaluation.examination import Examination, Proposal
from tqgguf.measuring.evaluation.recommendation import Budget, Recommendation
from tqgguf.measuring.evaluation.sensitivity import LayerSensitivity
from tqgguf.measuring.evaluation.statistics import Statistics
from tqgguf.runtime.attention.reads import Reads

LOGGED = {
    "smollm2": {
        "q4_0": (4.50, 0.0376), "turbo4": (4.32, 0.0143), "turbo4/turbo3": (3.82, 0.0314), "turbo3": (3.32, 0.0640),
        "turbo4 unbalanced": (4.25, 0.0447), "turbo3 unbalanced": (3.25, 0.2147),
    },
    "gemma3-270m": {
        "q4_0": (4.50, 0.1123), "turbo4": (4.20, 0.0164), "turbo4/turbo3": (3.70, 0.0332), "turbo3": (3.20, 0.0590),
        "turbo4 unbalanced": (4.13, 0.1296), "turbo3 unbalanced": (3.13, 0.5455),
    },
}  # fmt: skip
"""Bits and KLD of the tables in benchmarks/LOG.md, "Balance of K"."""
DOCS = Path(__file__).parent.parent / "docs"
PHONE = 420  # pixels
PYTHON = re.compile(r"\b(None|True|False|nan|inf|dict|Path\(|array\()\b|\w\(.*=|kv calibration|[{\[]\'")
SVG = "{http://www.w3.org/2000/svg}"


def result(label: str, bits: float, kld: float, error: float = 0.001, *, tail: bool = False) -> Result:
    types, _, form = label.partition("@")
    type_k, _, type_v = types.partition("/")
    shown = label if tail or label == "f16/f16" else f"{label} no tail"
    stored = StoredBits(bits, bits, bits)
    candidate = Candidate(shown, type_k, type_v, stored, lambda *_: [], tail=tail, balance=form or "full")
    figures = Statistics(100, 9.0, 0.1, 1.0, 0.01, kld, error, kld, kld, 1 - kld, 0.01)
    return Result(candidate, figures, [], [(64.0, kld)], Reads(), 0)


class Body(HTMLParser):
    """What a page shows outside of plots: its text, and every element's attributes."""

    def __init__(self, whole: str) -> None:
        super().__init__()
        self.text, self.attributes, self.in_plot = "", list[tuple[str, str]](), False
        self.feed(whole.partition("<body>")[2])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_plot |= tag == "svg"
        self.attributes += [(name, value or "") for name, value in attrs if not self.in_plot]

    def handle_endtag(self, tag: str) -> None:
        self.in_plot &= tag != "svg"

    def handle_data(self, data: str) -> None:
        self.text += "" if self.in_plot else data + "\n"


ABOUT = {"model": {"file": "m"}, "n_ctx": 100, "text": "t", "interrupted": False, "kv_calibration": None}
F16 = result("f16/f16", 16.0, 0.0, tail=True)
RESULTS = [
    F16,
    result("q8_0/q8_0", 8.5, 0.0002, 0.0001),
    result("q4_0/q4_0", 4.5, 0.04),
    result("turbo4/turbo4", 4.32, 0.014),
    result("turbo4/turbo4", 4.32, 0.003, tail=True),
    result("turbo3/turbo3", 3.32, 0.064),
]


def test_a_cache_is_judged_with_every_key_from_blocks_and_the_largest_comes_first() -> None:
    rows = judged(RESULTS)
    assert [(r.candidate.label, r.statistics.kld) for r in rows] == [
        ("q8_0/q8_0 no tail", 0.0002),
        ("q4_0/q4_0 no tail", 0.04),
        ("turbo4/turbo4 no tail", 0.014),
        ("turbo3/turbo3 no tail", 0.064),
    ]


def test_a_cache_is_worth_its_bits_unless_one_of_no_more_bits_loses_less() -> None:
    rows = judged(RESULTS)
    better = {row.candidate.type_k: better_one(row, rows) for row in rows}
    assert {name: other and other.candidate.type_k for name, other in better.items()} == {
        "q8_0": None, "q4_0": "turbo4", "turbo4": None, "turbo3": None
    }  # fmt: skip
    near = [result("a/a", 4.5, 0.04, 0.01), result("b/b", 4.3, 0.03, 0.01)]
    assert better_one(near[0], near) is near[1] and not is_clearly_less(near[1].statistics, near[0].statistics)
    assert eval_page.verdict([F16, *near])[1:] == [
        "Whether a/a (4.500 bits, KLD 0.0400) is worth its bits is open: b/b (4.300 bits, KLD 0.0300) takes no more, "
        "and the two differ by less than their standard errors."
    ]
    assert better_one(result("c/c", 4.0, math.nan, math.nan), near) is None


def test_the_verdict_of_an_evaluation_names_the_best_and_what_is_not_worth_its_bits() -> None:
    best, worth, not_worth = eval_page.verdict(RESULTS)
    assert best == (
        "Of the caches of at most a third of f16's size, turbo4/turbo4 stays closest to f16: it takes 27% of the bits, "
        "and the likeliest next token is the same for 98.6% of the tokens."
    )
    assert worth == (
        "Each of these is the best for its size: q8_0/q8_0 (8.500 bits, KLD 0.000200), turbo4/turbo4 (4.320 bits, "
        "KLD 0.0140), turbo3/turbo3 (3.320 bits, KLD 0.0640)."
    )
    assert not_worth == (
        "q4_0/q4_0 (4.500 bits, KLD 0.0400) is not worth its bits: turbo4/turbo4 (4.320 bits, KLD 0.0140) takes no "
        "more and loses less."
    )
    assert eval_page.verdict([F16]) == ["Too little was scored to say anything of these caches."]


def record(seconds: list[float]) -> BenchRecord:
    seeds = [1] * len(seconds)
    modes = ["f16/f16", "turbo4/turbo4"]
    speeds = [
        Speed(mode, "decode", 64, depth, [s * factor for s in seconds], seeds)
        for depth in (0, 4096)
        for mode, factor in zip(modes, (1.0, 0.8), strict=True)
    ]
    memories = [
        Memory(mode, n, kv * n, 10**9, None, 1) for n in (64, 4160) for mode, kv in zip(modes, (1000, 280), strict=True)
    ]
    matches = [Match("turbo4/turbo4", 1, 1400, 62, 64, 200, 210, [30], 0.95)]
    return BenchRecord(modes, {"model": {"file": "m.gguf"}, "kv_calibration": None}, speeds, memories, matches)


def test_the_verdict_of_a_benchmark_is_beside_f16_at_the_most_tokens() -> None:
    assert bench_page.verdict(record([1.0, 1.1])) == [
        "turbo4/turbo4 takes 28% of f16's memory at 4,160 tokens, decodes at 1.25 times f16's speed behind 4,096 "
        "tokens and gives 97% of the tokens of f16's greedy answers."
    ]
    assert "one sample" in bench_page.verdict(record([1.0]))[-1]
    assert bench_page.verdict(BenchRecord(["f16/f16"], {})) == ["No other cache was measured beside f16."]


def test_several_caches_are_one_sentence_and_a_table() -> None:
    several = record([1.0, 1.1])
    several.modes.append("turbo3/turbo3")
    several.memories.append(Memory("turbo3/turbo3", 4160, 220 * 4160, 10**9, None, 1))
    (sentence,) = bench_page.verdict(several)
    assert sentence.startswith("The 2 other caches take 22% to 28% of f16's memory at 4,160 tokens, decode at")
    cells = Body(bench_page.page(several, [])).text.split()
    not_measured = cells[cells.index("turbo3/turbo3") + 2 :][:2]
    assert not_measured == ["-", "-"]


def test_settings_are_in_words() -> None:
    about: dict[str, Any] = {
        "kv_calibration": None, "interrupted": False, "n_depth": [0, 4096], "model": {"bytes": 98_000_000},
        "chunk": 256, "command": ["-m", "x"], "rope": True, "text": "own",
    }  # fmt: skip
    assert page.settings(about) == [
        ("calibration of K", "none"),
        ("tokens in the cache before", "0, 4,096"),
        ("model: size", "98.00 MB"),
        ("tokens evaluated at a time (-ub)", "256"),
        ("rope", "yes"),
        ("text", "own"),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: eval_page.page(RESULTS, ABOUT, ["-m", "m"]),
        lambda: eval_page.page([F16], ABOUT, ["-m", "m"]),
        lambda: bench_page.page(record([1.0, 1.1]), ["-m", "m"]),
    ],
)
def test_a_page_begins_with_its_verdict_and_follows_the_readers_mode(make: Callable[[], str]) -> None:
    whole = make()
    body = whole.partition("<body>")[2]
    assert re.match(r"\s*<h1>[^<]+</h1>\s*<div class=\"verdict\"><p>[A-Za-z][^<]+\.</p>", body)
    assert not PYTHON.search(Body(whole).text)
    assert whole.count("prefers-color-scheme: dark") == 1  # the page's own
    assert whole.count("prefers-color-scheme:dark") == whole.count("<svg") > 0
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\((?!#)", whole)
    assert all(target.startswith("#") for target in re.findall(r"(?:src|href)=\"([^\"]*)\"", whole))


def test_nothing_but_what_scrolls_is_wider_than_a_phone() -> None:
    whole = eval_page.page(RESULTS, ABOUT, [])
    style = whole.partition("<style>")[2].partition("</style>")[0]
    for rule in re.findall(r"[^{}]+\{[^{}]*\}", style):
        for width in re.findall(r"(?<!max-)(?<!border-)\bwidth: *([\d.]+)(px|rem|em)", rule):
            assert float(width[0]) * (1 if width[1] == "px" else 16) <= PHONE, rule
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", style) and "pre-wrap" in style
    assert re.search(r"figure svg \{[^}]*width: 100%[^}]*height: auto", style)
    assert not any(name in ("width", "style") for name, _ in Body(whole).attributes)
    for table in re.findall(r'(<div class="wide">)?<table class="(\w+)', whole):
        assert table[0] or table[1] == "settings"


def colours(svg: str) -> set[str]:
    """Colours that elements have, apart from the rules for the dark."""
    return set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", re.sub(r"<style>.*?</style>", "", svg, flags=re.S)))


def test_every_colour_of_a_plot_has_a_counterpart_in_the_dark() -> None:
    marks = [Mark(f"cache {i}", 3 + i / 10, 0.01 * 1.3**i, 0.001) for i in range(12)]
    for svg in (kld_over_bits(marks), kld_over_bits(marks[:3], 1.6)):
        rules = re.search(r"<style>(.*?)</style>", svg)
        assert rules is not None and len(colours(svg)) > 4
        for colour in colours(svg):
            assert f': {colour}"]' in rules[1], colour
        texts = re.findall(r"<text style=\"([^\"]*)\"", svg)
        assert texts and all("fill: #" in style for style in texts)


def texts_of(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_cache_has_one_mark_with_its_name_beside_it() -> None:
    marks = [Mark("q4_0", 4.5, 0.0376), Mark("turbo4", 4.32, 0.0143), Mark("turbo4@plain", 4.25, 0.0447)]
    texts = texts_of(kld_over_bits(marks))
    assert [texts.count(mark.label) for mark in marks] == [1, 1, 1]


def test_labels_never_lie_upon_one_another_or_upon_a_mark() -> None:
    figure, axes = plots.new_axes("x", "y")
    points = [(1.0, 1.0), (1.02, 1.0), (1.0, 1.05), (2.0, 2.0), (1.9, 1.9)]
    axes.plot(*zip(*points, strict=True), linestyle="")
    axes.margins(0.3)
    assert plots.label_points(figure, axes, points, ["first", "second", "third", "fourth", "fifth"])
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 5
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        assert not any(box.contains(*axes.transData.transform(point)) for point in points)


def test_where_labels_have_no_room_there_is_a_legend_of_all_of_them() -> None:
    marks = [Mark(f"turbo3,0-{i}:q8_0/turbo3,{i}:turbo4,2{i}:turbo4", 4 + i / 1000, 0.01 + i / 1e5) for i in range(9)]
    svg = kld_over_bits(marks)
    text = " ".join(texts_of(svg))
    assert all(mark.label in text for mark in marks)


@pytest.mark.parametrize("label", ["q8_0", "turbo4/turbo3@plain", "turbo3,0:turbo2,3-10:turbo4,13:turbo4/turbo3" * 3])
@pytest.mark.parametrize("n", [2, 9])
def test_a_legend_is_no_wider_than_its_plot(label: str, n: int) -> None:
    figure, axes = plots.new_axes("x", "y")
    for i in range(n):
        axes.plot([0, 1], [i, i], label=f"{label} {i}", **plots.look_of(i))
    plots.as_svg(figure, axes, "t")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
    assert box.y1 < axes.get_window_extent().y0
    assert axes.get_window_extent().height > 120


@pytest.mark.parametrize(("low", "high"), [(2e-5, 0.4), (0.01, 0.2), (0.011, 0.013), (1e-4, 1e-4), (3e-7, 5.0)])
def test_numbers_on_a_logarithmic_axis_stand_apart_and_are_written_as_in_tables(low: float, high: float) -> None:
    figure, axes = plots.new_axes("x", "y")
    plots.log_scale(axes.yaxis, low, high)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    labels = [label for label in axes.get_yticklabels(which="both") if label.get_text()]
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
    bottom, top = axes.get_ylim()
    shown = [box for label, box in zip(labels, boxes, strict=True) if bottom <= label.get_position()[1] <= top]
    assert shown and not any(a.overlaps(b) for i, a in enumerate(shown) for b in shown[i + 1 :])
    assert all(re.fullmatch(r"[\d.,]+", label.get_text()) for label in labels)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.002, "0.002"), (0.5, "0.5"), (4.2, "4.2"), (1024, "1,024"), (131072, "131,072")]
)
def test_numbers_on_an_axis(value: float, text: str) -> None:
    assert plots.tick(value) == text


@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_the_pictures_of_the_readme_have_one_mark_for_each_figure_where_the_log_has_it(model: str) -> None:
    svg = (DOCS / f"kld-{model}.svg").read_text()
    figures = LOGGED[model]
    assert [texts_of(svg).count(name) for name in figures] == [1] * len(figures)
    root = ElementTree.fromstring(svg)
    places = [
        (float(use.get("x", "")), float(use.get("y", "")))
        for group in root.iter(f"{SVG}g")
        if group.get("clip-path")
        for use in group.findall(f"{SVG}use")
    ]
    assert len(places) == len(figures)
    xs, ys = np.array(places).T
    wanted = np.array(list(figures.values()))
    for seen, value in ((xs, wanted[:, 0]), (ys, np.log(wanted[:, 1]))):
        line = np.polyfit(value, seen, 1)
        assert np.abs(np.polyval(line, value) - seen).max() < 0.01
    assert not re.search(r"<script|<image|url\((?!#)", svg) and "prefers-color-scheme:dark" in svg


def test_doctor_writes_a_page_with_what_to_use_at_its_top(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyModel("qwen2", rope_base=1e6, seed=6))
    folder = tmp_path / "report"
    argv = ["doctor", "-m", str(path), "--measure", "256", "-c", "1k", "--bpv", "5", "--report", str(folder)]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert f"report: {folder / 'doctor.html'}" in err
    whole = (folder / "doctor.html").read_text()
    found = json.loads((folder / "doctor.json").read_text())
    best = found["proposals"][0]["flags"]
    verdict = whole.partition('class="verdict"')[2].partition("</div>")[0]
    assert best in out and best in re.sub("<[^>]*>", "", verdict)
    assert re.search(r"cache takes \d+% of f16's memory at 1,024 tokens", Body(whole).text)
    assert "<th>bits at 256</th><th>bits at 1,024</th>" in whole
    assert whole.count("<svg") == 2 and whole.count("<tr>") > 5
    assert not PYTHON.search(Body(whole).text)
    assert found["model"]["file"] == "m.gguf" and found["n_measured"] == 256


def examination(*klds: tuple[str, float]) -> Examination:
    """Proposals of these types for K and V alike, with these losses; one layer."""
    proposals = [
        Proposal(Recommendation(CacheSpec(name, name), (4.5, 4.0), 0.1), result(f"{name}/{name}", 4.5, kld, 0.002))
        for name, kld in klds
    ]
    errors: dict[Side, dict[str, float]] = {side: {"turbo4": 0.01, "q8_0": 0.0} for side in ("k", "v")}
    layers = [LayerSensitivity(0, errors, {}, 0.5, 1.0)]
    return Examination(Budget(4.6, (256, 1024)), [LayerShape(1, 64, 64)], layers, (), proposals)


def test_a_proposal_that_the_measurement_does_not_tell_from_the_best_is_named_beside_it() -> None:
    first, command, *others = doctor_page.verdict(examination(("turbo4", 0.020), ("turbo3", 0.023), ("q4_0", 0.025)))
    assert first == (
        "<p>With the types below the cache takes 25% of f16&#x27;s memory at 1,024 tokens, and the likeliest next "
        "token stays the same for 98.0% of the tokens (4.000 bits per value, KLD 0.0200).</p>"
    )
    assert Body("<body>" + command).text.split() == ["-ctk", "turbo4", "-ctv", "turbo4"]
    (alike,) = others
    assert " ".join(Body("<body>" + alike).text.split()) == (
        "-ctk turbo3 -ctv turbo3 does as well within the standard errors: 4.000 bits per value, KLD 0.0230."
    )


def test_where_nothing_fits_the_page_of_doctor_says_so_first() -> None:
    whole = doctor_page.page(examination(), {"model": {"file": "m"}, "budget": 4.6}, [])
    assert re.search(r'class="verdict"><p>Nothing fits into 4.6 bits per value [^<]+: raise --bpv.</p>', whole)


@pytest.mark.parametrize(
    ("mean", "error", "shown"),
    [
        (0.0188, 0.00171, "0.0188 ± 0.0017"),
        (0.0039, 0.0007, "0.0039 ± 0.0007"),
        (0.000205, 0.0000361, "0.000205 ± 0.000036"),
        (0.0, 0.0, "0.0000 ± 0.0000"),
        (0.5, math.nan, "0.5000"),
    ],
)
def test_an_error_has_as_many_decimals_as_its_mean(mean: float, error: float, shown: str) -> None:
    assert eval_table.kld(result("a/a", 4.0, mean, error).statistics) == shown


def test_every_flag_of_a_command_and_nothing_of_html_is_in_it() -> None:
    made = page.command(["tqgguf", "eval", "-m", "a <b>.gguf", "--cache-types", "turbo4,q4_0"])
    assert "<b>" not in made
    assert "".join(Body("<body>" + made).text.splitlines()) == "tqgguf eval -m 'a <b>.gguf' --cache-types turbo4,q4_0"


def test_no_mark_of_a_benchmark_lies_at_the_edge_of_its_plot() -> None:
    _, axes = plots.new_axes("x", "y")
    axes.plot([128, 384], [240.0, 276.0])
    plots.from_zero(axes)
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 276 * 1.05


def test_the_bar_of_an_error_stays_above_zero_and_within_the_plot() -> None:
    assert Mark("a", 4.0, 0.01, 0.02).bar == pytest.approx((0.009, 0.02))
    assert Mark("a", 4.0, 0.01).bar == (0.0, 0.0)
