"""What `tqgguf bench --compare` does: read two runs, print their ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tqgguf.cli.bench_table import markdown
from tqgguf.cli.figures import aligned, size
from tqgguf.cli.json_text import json_text
from tqgguf.cli.progress import say
from tqgguf.formats.bench_record import Difference, differing_settings, read_record
from tqgguf.formats.bench_record import compare as differences
from tqgguf.formats.errors import RequestError

_SPREAD, _ONE_SAMPLE = "within the spread", "one sample"


def compare(first: str, second: str, form: str) -> int:
    """Print the comparison and return the exit status. RequestError: the runs have no figure in common."""
    a, b = read_record(first), read_record(second)
    found = list(differences(a, b))
    if not found:
        raise RequestError(f"{first} and {second}: expected the same tests of the same caches in both, found none")
    if form == "csv":
        raise RequestError("--compare -o csv: expected table, md or json")
    notes = differing_settings(a, b)
    if form == "json":
        rows = [{**asdict(difference), "ratio": difference.ratio} for difference in found]
        print(json_text({"first": first, "second": second, "differences": rows, "notes": notes}), flush=True)
        return 0
    for note in notes:
        say(note)
    rows_: list[Sequence[str]] = [("figure", "cache K/V", "first", "second", "ratio", "")]
    rows_ += [_row(difference) for difference in found]
    print("\n".join(markdown(rows_) if form == "md" else aligned(rows_, n_left=2)), flush=True)
    return 0


def _row(d: Difference) -> Sequence[str]:
    first, second = (_written(d.what, x) for x in (d.first, d.second))
    note = _ONE_SAMPLE if d.samples == 1 else _SPREAD if d.within_spread else ""
    return d.what, d.mode, first, second, f"{d.ratio:.2f}x", note


def _written(what: str, x: float) -> str:
    if "bytes" in what:
        return size(int(x))
    return f"{x:.1%}" if "match" in what else f"{x:,.1f}"
