"""Draws docs/kld-*.svg, the README's pictures, from the tables of LOG.md: `python benchmarks/draw_kld.py`.

Letters are larger than on the pages of --report, so that they are read at half the picture's size.
"""

from __future__ import annotations

import re
from pathlib import Path

from tqgguf.cli.eval_plots import Mark, kld_over_bits
from tqgguf.formats.atomic import replacing

HERE = Path(__file__).parent
LETTERS = 1.6
TABLES = {"gemma3-270m": "Gemma, one window of 8,192 tokens", "smollm2": "SmolLM2 likewise"}
"""Pictures, and how the line above the table of each begins in LOG.md."""

NAMES = {
    "q4_0": "q4_0",
    "turbo4": "turbo4",
    "turbo4/turbo3": "turbo4/turbo3",
    "turbo3": "turbo3",
    "turbo4@plain": "turbo4 unbalanced",
    "turbo3@plain": "turbo3 unbalanced",
}
"""Rows that are drawn, and what they are called in the picture."""

ROW = re.compile(r"\| (?P<cache>[^|]+) \| (?P<bits>[\d.]+) \| \**(?P<kld>[\d.]+)\** \|")


def marks(model: str) -> list[Mark]:
    """The caches of NAMES, as LOG.md has them."""
    log = (HERE / "LOG.md").read_text(encoding="utf-8")
    table = log[log.index(TABLES[model]) :].split("\n\n")[1]
    rows = {row["cache"]: row for row in ROW.finditer(table)}
    return [Mark(name, float(rows[cache]["bits"]), float(rows[cache]["kld"])) for cache, name in NAMES.items()]


def main() -> None:
    for model in TABLES:
        with replacing(HERE.parent / "docs" / f"kld-{model}.svg") as file:
            file.write_text(kld_over_bits(marks(model), LETTERS) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
