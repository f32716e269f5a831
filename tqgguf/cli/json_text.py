"""JSON as every verb writes it: what a terminal would obey in a text stands there as JSON's own escape."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON. Printable characters stand for themselves; others (C1 controls, marks of direction) are \\uXXXX,
    which a reader of JSON takes for the same text.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
