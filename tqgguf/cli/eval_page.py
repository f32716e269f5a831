"""The page of `tqgguf eval --report`: verdict, tables, plots, how to repeat them; one file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqgguf.cli import eval_plots, eval_table
from tqgguf.cli.eval_table import bits, number
from tqgguf.cli.page import folded, html_page, paragraph, plot, plots, wide_table
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.measuring.evaluation.compare import Result
from tqgguf.measuring.evaluation.dominance import better_one, is_clearly_less, judged

_THIRD = BLOCK_TYPES["f16"].bits / 3
_HOW_TO_READ = (
    "Every cache is compared with the f16 cache of the same model over the same tokens. Perplexity: how well the next "
    "token is predicted, lower is better; ratio: over that of f16. KLD: mean KL divergence of the next token's "
    "distribution from that of f16, in nats, with its median and 99th percentile; 0 is no difference. Same top: how "
    "often the likeliest token is the same. ± is one standard error, which takes tokens as independent. Bits per "
    "value charge blocks with their scales, page means, the exact prefix and channel scales; not the f16 tail of up "
    "to 127 tokens. “no tail”: every key outside the exact prefix was read from blocks."
)


_JUDGED = "One mark for each cache, named as --cache-types takes it: of its row with no tail, where there is one."


def page(results: Sequence[Result], about: Mapping[str, Any], words: Sequence[str]) -> str:
    """The whole page, HTML. `about`: settings by name, as in the JSON. `words`: the command line."""
    title = f"KV caches of {about['model']['file']}: quality"
    rows = judged(results)
    parts = [
        paragraph(_summary(results, about)),
        wide_table(eval_table.figures(results)),
        folded("What the figures are", [_HOW_TO_READ, *eval_table.notes(results)]),
        plots(
            [
                plot(
                    "KL divergence over bits per value",
                    eval_plots.kld_over_bits(eval_plots.marks_of(rows)),
                    f"{_JUDGED} Lower and further left is better. Bars: one standard error.",
                ),
                plot(
                    "KL divergence over position",
                    eval_plots.kld_over_position(rows),
                    "Means over pages of 128 tokens or several. A line that rises drifts.",
                ),
            ]
        ),
    ]
    if ranges := eval_table.ranges(results):
        parts.append(f"<h2>By position</h2>{wide_table(ranges)}")
    return html_page(title, list(map(paragraph, verdict(results))), parts, about, "eval", words)


def verdict(results: Sequence[Result]) -> list[str]:
    """What was found, in sentences, the most important first."""
    rows = judged(results)
    if not rows:
        return ["Too little was scored to say anything of these caches."]
    worth = [row for row in rows if better_one(row, rows) is None]
    small_ones = [row for row in rows if row.candidate.bits.mean <= _THIRD]
    best = min(small_ones or rows, key=lambda row: row.statistics.kld)
    share = best.candidate.bits.mean / BLOCK_TYPES["f16"].bits
    among = "Of the caches of at most a third of f16's size" if small_ones else "Of these caches"
    found = [
        f"{among}, {eval_plots.name_of(best)} stays closest to f16: it takes {share:.0%} of the bits, and "
        f"the likeliest next token is the same for {best.statistics.same_top:.1%} of the tokens."
    ]
    if len(worth) > 1:
        found.append(f"Each of these is the best for its size: {', '.join(map(_figures, worth))}.")
    for row in rows:
        better = better_one(row, rows)
        if better is None:
            continue
        if is_clearly_less(better.statistics, row.statistics):
            found.append(f"{_figures(row)} is not worth its bits: {_figures(better)} takes no more and loses less.")
        else:
            found.append(
                f"Whether {_figures(row)} is worth its bits is open: {_figures(better)} takes no more, and the two "
                "differ by less than their standard errors."
            )
    return found


def _figures(result: Result) -> str:
    return (
        f"{eval_plots.name_of(result)} ({bits(result.candidate.bits.mean)} bits, KLD {number(result.statistics.kld)})"
    )


def _summary(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    scored, window = results[0].statistics.n_tokens, about["n_ctx"]
    text = f"{scored:,} tokens were scored, in windows of {window:,} tokens of {about['text']}."
    return text + (" The evaluation was interrupted before its end." if about["interrupted"] else "")
