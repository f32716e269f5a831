"""What a rule about files is: the type of the rows of `rules.RULES`."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Severity = Literal["error", "warning"]

ERROR: Final = "error"
WARNING: Final = "warning"


class Rule(NamedTuple):
    """One thing that can be wrong with a file.

    `id` is "TQ" and three digits and never changes its meaning, `name` is what code calls it. An error says that the
    file breaks its format or cannot be used; a warning, that it is legal but that something will go wrong elsewhere.
    `meaning` and `remedy` are for people; the message of a single finding says where and by how much.
    """

    id: str
    name: str
    severity: Severity
    meaning: str
    remedy: str
