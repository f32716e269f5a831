"""Fills tests/corpus from a folder that the coverage-guided run has merged: `python tests/fuzz/keep.py MERGED`.

The smallest files that are interesting come first, as far as they fit; the hostile ones that are made on purpose, named
after what they state, are always among them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from amplifiers import amplifiers
from seeds import DAMAGED_DATA

CORPUS = Path(__file__).parent.parent / "corpus"
MAX_FILE = 8_000
MAX_BYTES = 270_000
MAX_FILES = 400
LARGE = ("arrays 5,000 deep",)  # of the amplifiers


def on_purpose() -> dict[str, bytes]:
    """By what they state: 2^63 of anything, nested arrays, offsets and products that wrap, and so on."""
    small = {name: data for name, data in DAMAGED_DATA.items() if len(data) <= MAX_FILE}
    return small | {name: amplifiers()[name] for name in LARGE}


def keep(merged: Path) -> None:
    """Replace the corpus."""
    for old in CORPUS.glob("*.bin"):
        old.unlink()
    files = {re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"): data for name, data in on_purpose().items()}
    known = {hashlib.sha256(data).hexdigest() for data in files.values()}
    left = MAX_BYTES - sum(map(len, files.values()))
    for path in sorted(merged.iterdir(), key=lambda path: path.stat().st_size):
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in known and len(data) <= min(left, MAX_FILE) and len(files) < MAX_FILES:
            files[f"found-{digest[:12]}"] = data
            left -= len(data)
    for name, data in files.items():
        (CORPUS / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
