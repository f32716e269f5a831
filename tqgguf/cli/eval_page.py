"""The page of `tqgguf eval --report`: tables, plots and how to repeat them, in one file that needs no network."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tqgguf.cli import eval_plots, eval_table
from tqgguf.formats.gguf_errors import readable
from tqgguf.runtime.evaluation import Result

_STYLE = """
body { font: 16px/1.5 sans-serif; color: #000; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #999; padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
code { overflow-wrap: anywhere; }
@media print { body { margin: 0; max-width: none; } }
"""

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
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_summary(results, about))}</p>",
        f'<div class="wide">{_table(eval_table.figures(results))}</div>',
        f"<p>{escape(_HOW_TO_READ)}</p>",
        *(f"<p>{escape(note)}</p>" for note in eval_table.notes(results)),
        f"<h2>KL divergence over bits per value</h2><figure>{eval_plots.kld_over_bits(results)}"
        "<figcaption>Lower and further left is better. Bars: one standard error. Filled: every key from blocks; "
        "hollow: with the f16 tail that run has.</figcaption></figure>",
        f"<h2>KL divergence over position</h2><figure>{eval_plots.kld_over_position(results)}"
        "<figcaption>Means over pages of 128 tokens or several. A line that rises drifts. Filled and solid: every key "
        "from blocks; hollow and dashed: with the f16 tail.</figcaption></figure>",
    ]
    if ranges := eval_table.ranges(results):
        parts.append(f'<h2>By position</h2><div class="wide">{_table(ranges)}</div>')
    settings = [(name, text) for name, text in _flat(about)]
    parts += [
        "<h2>Settings</h2>",
        _table(settings, header=False, kind="settings"),
        "<h2>To repeat it</h2>",
        f"<pre><code>{escape(readable(shlex.join(['tqgguf', 'eval', *words])))}</code></pre>",
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n'
        "</body>\n</html>\n"
    )


def _summary(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    scored, window = results[0].statistics.n_tokens, about["n_ctx"]
    text = f"{scored:,} tokens were scored, in windows of {window:,} tokens of {about['text']}."
    return text + (" The evaluation was interrupted before its end." if about["interrupted"] else "")


def _table(rows: Sequence[Sequence[str]], header: bool = True, kind: str = "figures") -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(cells, "th" if header and i == 0 else "td") for i, cells in enumerate(rows)]
    return f'<table class="{kind}">' + "\n".join(lines) + "</table>"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{name}: ")
        else:
            found.append((prefix + name.replace("_", " "), f"{value:,}" if type(value) is int else str(value)))
    return found
