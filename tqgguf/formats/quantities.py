"""Quantities as people write them: sizes of memory such as 16G, counts of tokens such as 8k.

K, M, G and T are powers of 1024 in both, in either case, because sizes of memory and contexts are powers of two.
"""

from __future__ import annotations

import re

from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import shown

_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt]?)(i?b)?", re.IGNORECASE)
_COUNT = re.compile(r"[+-]?[0-9]{1,18}|[0-9]{1,9}(?:\.[0-9]{1,6})?[km]", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST_BYTES = 2**60


def parse_bytes(flag: str, text: str) -> int:
    """Bytes of `16G`, `16GiB` (powers of 1024), `16GB` (of 1000) or a plain number. RequestError: anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        base = 1000 if (match[3] or "").lower() == "b" else 1024
        n_bytes = float(match[1]) * base ** _POWERS[match[2].lower()]
        if 1 <= n_bytes <= MOST_BYTES:
            return int(n_bytes)
    raise RequestError(f"{flag}: expected a size of memory such as 16G, 24GB or 512M, found {shown(text)}")


def parse_count(text: str) -> int | None:
    """The number that `8192`, `8k`, `1.5K` or `1M` stands for (`-1` too); None for anything else, and for a part of a
    token such as 0.3k.
    """
    if not _COUNT.fullmatch(text):
        return None
    if text[-1].lower() not in "km":
        return int(text)
    count = float(text[:-1]) * 1024 ** _POWERS[text[-1].lower()]
    return int(count) if count.is_integer() else None
