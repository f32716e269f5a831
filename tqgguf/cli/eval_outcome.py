"""What becomes of an evaluation: text for stdout, a page in a folder, and what the figures belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqgguf.cli import eval_table
from tqgguf.cli.json_text import json_text
from tqgguf.cli.page import write_texts
from tqgguf.measuring.evaluation.compare import Result
from tqgguf.measuring.evaluation.dominance import judged

PAGE_FILE, JSON_FILE, PLOT_FILE = "eval.html", "eval.json", "kld_over_bits.svg"
REPORT_FILES = (PAGE_FILE, JSON_FILE, PLOT_FILE)


def as_text(results: Sequence[Result], about: Mapping[str, Any], as_json: bool) -> str:
    """Tables for people, or one JSON object for programs."""
    if not as_json:
        return "\n".join(eval_table.lines(results))
    return json_text(_found(results, about))


def write_report(folder: Path, results: Sequence[Result], about: Mapping[str, Any], words: Sequence[str]) -> Path:
    """Write the page, and its first plot and the figures as JSON beside it; the page's path. `words`: the command line.

    TqggufError: a file could not be written; those of an earlier report are then as they were, or new.
    """
    from tqgguf.cli.eval_page import page  # lazily: it takes matplotlib in
    from tqgguf.cli.eval_plots import kld_over_bits, marks_of

    figures = json_text(_found(results, about), indent=1)
    texts = {
        PAGE_FILE: page(results, about, words),
        JSON_FILE: figures + "\n",
        PLOT_FILE: kld_over_bits(marks_of(judged(results))) + "\n",
    }
    write_texts(folder, texts)
    return folder / PAGE_FILE


def _found(results: Sequence[Result], about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about, "rows": eval_table.as_json(results)}
