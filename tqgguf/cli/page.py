"""Pages of --report: one HTML file that needs no network, and the folder that it is written into."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tqgguf.cli.plots import check_plots
from tqgguf.formats.atomic import check_target, replacing
from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.errors import readable

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


def html_page(title: str, parts: Sequence[str], about: Mapping[str, Any], verb: str, words: Sequence[str]) -> str:
    """The whole page: parts as they are, then the settings by name, and the command line `words` of the verb."""
    whole = [
        f"<h1>{escape(title)}</h1>",
        *parts,
        "<h2>Settings</h2>",
        html_table(_flat(about), header=False, kind="settings"),
        "<h2>To repeat it</h2>",
        f"<pre><code>{escape(readable(shlex.join(['tqgguf', verb, *words])))}</code></pre>",
    ]
    body = "\n".join(whole)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n'
        "</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def plot(title: str, svg: str, caption: str) -> str:
    return f"<h2>{escape(title)}</h2><figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def wide_table(rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where it must."""
    return f'<div class="wide">{html_table(rows)}</div>'


def html_table(rows: Sequence[Sequence[str]], header: bool = True, kind: str = "figures") -> str:
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


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{name}: ")
        else:
            found.append((prefix + name.replace("_", " "), f"{value:,}" if type(value) is int else str(value)))
    return found
