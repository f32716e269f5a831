"""The page of `tqgguf eval --report`: tables, plots and how to repeat them, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqgguf.cli import eval_plots, eval_table
from tqgguf.cli.page import html_page, paragraph, plot, wide_table
from tqgguf.runtime.evaluation.compare import Result

_HOW_TO_READ = (
    "Every cache is compared with the f16 cache of the same model over the same tokens. Perplexity: how well the next "
    "token is predicted, lower is better; ratio: over that of f16. KLD: mean KL divergence of the next token's "
    "distribution from that of f16, in nats, with its median and 99th percentile; 0 is no difference. Same top: how "
    "often the likeliest token is the same. ± is one standard error, which takes tokens as independent. Bits per "
    "value charge blocks with their scales, page means, the exact prefix and channel scales; not the f16 tail of up "
    "to 127 tokens. “no tail”: every key outside the exact prefix was read from blocks."
)


def page(results: Sequence[Result], about: Mapping[str, Any], words: Sequence[str]) -> str:
    """The whole page, HTML. `about`: settings by name, as in the JSON. `words`: the command line."""
    title = f"KV caches of {about['model']['file']}"
    parts = [
        paragraph(_summary(results, about)),
        wide_table(eval_table.figures(results)),
        paragraph(_HOW_TO_READ),
        *map(paragraph, eval_table.notes(results)),
        plot(
            "KL divergence over bits per value",
            eval_plots.kld_over_bits(results),
            "Lower and further left is better. Bars: one standard error. Filled: every key from blocks; hollow: with "
            "the f16 tail that run has.",
        ),
        plot(
            "KL divergence over position",
            eval_plots.kld_over_position(results),
            "Means over pages of 128 tokens or several. A line that rises drifts. Filled and solid: every key from "
            "blocks; hollow and dashed: with the f16 tail.",
        ),
    ]
    if ranges := eval_table.ranges(results):
        parts.append(f"<h2>By position</h2>{wide_table(ranges)}")
    return html_page(title, parts, about, "eval", words)


def _summary(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    scored, window = results[0].statistics.n_tokens, about["n_ctx"]
    text = f"{scored:,} tokens were scored, in windows of {window:,} tokens of {about['text']}."
    return text + (" The evaluation was interrupted before its end." if about["interrupted"] else "")
