"""How much memory this machine has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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
