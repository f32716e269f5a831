"""How much memory this machine has, and sizes of memory as people write them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.errors import shown

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt]?)(i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST_BYTES = 2**60


def machine_bytes() -> int | None:
    """Bytes that this process may hold: the machine's memory, or a control group's limit if lower; None: unknown."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdigit():
            found.append(int(text))
    sizes = [size for size in found if size > 0]
    return min(sizes) if sizes else None


def parse_bytes(flag: str, text: str) -> int:
    """Bytes of `16G`, `16GiB` (powers of 1024), `16GB` (of 1000) or a plain number. RequestError: anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        base = 1000 if (match[3] or "").lower() == "b" else 1024
        n_bytes = float(match[1]) * base ** _POWERS[match[2].lower()]
        if 1 <= n_bytes <= MOST_BYTES:
            return int(n_bytes)
    raise RequestError(f"{flag}: expected a size of memory such as 16G, 24GB or 512M, found {shown(text)}")
