"""Pages of --report: one HTML file that needs no network, and the folder that it is written into."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tqgguf.cli.figures import size
from tqgguf.cli.plots import check_plots
from tqgguf.formats.atomic import check_target, replacing
from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import readable

_STYLE = """
:root { color-scheme: light dark; --ink: #16191d; --soft: #565d66; --line: #d3d8de; --ground: #ffffff;
  --card: #f1f5f9; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #ededed; --soft: #a6adb6; --line: #3a3f45; --ground: #16191d; --card: #20252b; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 72rem;
  margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { max-width: 44rem; }
summary { cursor: pointer; font-size: .9rem; }
p.small { color: var(--soft); font-size: .9rem; }
.verdict { background: var(--card); border-left: .3rem solid #0072b2; border-radius: .3rem; padding: .8rem 1rem; }
.verdict p { margin: .5rem 0; max-width: none; overflow-wrap: anywhere; }
code.command span { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.verdict p:first-child { margin-top: 0; font-size: 1.1rem; }
.verdict p:last-child { margin-bottom: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; margin: .7rem 0; }
.wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: var(--ground); }
table.long td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
table.settings { width: 100%; }
table.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
table.settings td:first-child { color: var(--soft); width: 40%; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 0 1.5rem; }
figure { margin: 0; }
figure svg { display: block; width: 100%; max-width: 34rem; height: auto; }
figcaption { color: var(--soft); font-size: .9rem; max-width: 34rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border-radius: .3rem;
  padding: .6rem .8rem; }
@media print { body { padding: 0; max-width: none; } .wide { overflow: visible; } }
"""


def html_page(
    title: str, verdict: Sequence[str], parts: Sequence[str], about: Mapping[str, Any], verb: str, words: Sequence[str]
) -> str:
    """The whole page: the verdict, a sentence that says what was found, and others behind it; parts; the settings by
    name; and the command line `words` of the verb. Verdict and parts are HTML.
    """
    whole = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="verdict">{"".join(verdict)}</div>',
        *parts,
        "<h2>Settings</h2>",
        html_table(settings(about), header=False, kind="settings"),
        "<h2>To repeat it</h2>",
        f"<pre>{command(['tqgguf', verb, *words])}</pre>",
    ]
    body = "\n".join(whole)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n'
        "</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def small(text: str) -> str:
    """A paragraph that explains what stands above it."""
    return f'<p class="small">{escape(text)}</p>'


def folded(summary: str, texts: Sequence[str]) -> str:
    """Explanations that are shown when they are asked for."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(map(small, texts))}</details>"


def command(words: Sequence[str]) -> str:
    """A command line, or a part of one, whose lines break between its words, else behind commas, where they can."""
    spans = (f"<span>{escape(readable(shlex.quote(word))).replace(',', ',<wbr>')}</span>" for word in words)
    return f'<code class="command">{" ".join(spans)}</code>'


def plot(title: str, svg: str, caption: str) -> str:
    """A plot under its title, with a caption below."""
    return f"<div><h2>{escape(title)}</h2><figure>{svg}<figcaption>{escape(caption)}</figcaption></figure></div>"


def plots(drawn: Sequence[str]) -> str:
    """Plots side by side where there is room."""
    return f'<div class="plots">{"".join(drawn)}</div>'


def wide_table(rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    """A table that scrolls sideways where it must."""
    return f'<div class="wide">{html_table(rows, kind=kind)}</div>'


def html_table(rows: Sequence[Sequence[str]], header: bool = True, kind: str = "figures") -> str:
    """kind: `figures`; `long`, where the first column holds so much that it breaks into lines; `settings`."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(cells, "th" if header and i == 0 else "td") for i, cells in enumerate(rows)]
    return f'<table class="{kind}">' + "\n".join(lines) + "</table>"


def report_folder(name: str, files: Sequence[str]) -> Path:
    """The folder of --report, made if need be. RequestError if it cannot be written, or matplotlib is missing."""
    check_plots()
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(f"--report {folder}: expected a folder to write into: {error.strerror or error}") from None
    for file in files:
        check_target(folder / file)
    return folder


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files, each old or new. TqggufError: one could not be written."""
    for name, text in texts.items():
        with replacing(folder / name) as file:
            file.write_text(text, encoding="utf-8")


SETTING_NAMES: Mapping[str, str] = {
    "n_ctx": "tokens of context",
    "n_measured": "tokens measured",
    "n_windows": "windows",
    "n_scored": "tokens scored",
    "first_scored": "first position scored",
    "chunk": "tokens evaluated at a time (-ub)",
    "kv_calibration": "calibration of K",
    "n_prompt": "tokens of prompts",
    "n_answer": "tokens of answers",
    "n_depth": "tokens in the cache before",
    "match": "answers compared",
    "prompt_tokens": "tokens of each prompt",
    "answer_tokens": "tokens of each answer",
    "bytes": "size",
    "budget": "bits per value at most",
}
"""What settings are called where their name in JSON says too little."""

_REDUNDANT = frozenset({"command", "interrupted"})
"""Settings that other parts of a page tell."""


def settings(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Settings by name, as people read them; of mappings each entry behind the mapping's name."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        called = prefix + SETTING_NAMES.get(name, name.replace("_", " "))
        if isinstance(value, Mapping):
            found += settings(value, f"{called}: ")
        elif name not in _REDUNDANT:
            is_size = name in ("bytes", "memory") and type(value) is int
            found.append((called, size(value) if is_size else written(value)))
    return found


def written(value: Any) -> str:
    """A value of JSON in words: none, yes, 1,024, or a list with commas between."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(written, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}" if isinstance(value, float) else str(value)
