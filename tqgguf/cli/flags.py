"""A row of the table of flags: the record, and how rows are written.

What stands in a row stands nowhere else: typer's parameters, the sorting of an argument vector, the ranges that
requests are held to and the texts of --help come from it. A row's field is where its value goes: the field of that name
in the request of each verb that has the flag, which has the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Literal

OUTPUT: Final = "Output"
"""The heading of --help for flags that say what is printed."""
SWITCH: Final = "on|off"
SWITCH_OR_AUTO: Final = "on|off|auto"

_METAVARS: Final = {"text": "TEXT", "file": "FILE"}
_TYPES: Final[dict[str, type]] = {"integer": int, "tokens": int, "number": float}


class Fate(Enum):
    """What becomes of a flag: it works, it has no effect that anybody would miss, or it is refused."""

    IMPLEMENTED = "implemented"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class _OfRequest:
    """Stands for the default that the request has."""


OF_REQUEST: Final = _OfRequest()


@dataclass(frozen=True)
class Flag:
    """One flag. `takes` holds a kind for each of its values: text, file (a name), integer, number,
    tokens (an integer, or one such as 8k), or words separated by |."""

    names: tuple[str, ...]
    negatives: tuple[str, ...]
    takes: tuple[str, ...]
    fate: Fate
    note: str = ""
    """Accepted: why it has no effect. Refused: why, and what to do instead. Implemented: what --help says of it."""
    env: str | None = None
    """The environment variable that stands for it where the command line does not name it."""
    sets: str = ""
    """Flags that set the same thing share this word; the last one given counts."""
    repeatable: bool = False
    """Every occurrence counts."""
    harmless: float | None = None
    """The value with which a refused flag asks for nothing."""
    ours: bool = False
    """Not a flag of llama.cpp."""
    verbs: tuple[str, ...] = ()
    """Those that have it; of accepted flags and refused ones, none named: all that take llama.cpp's command lines."""
    field: str = ""
    """Implemented: the name of the parameter that it becomes, and of what it fills in a request."""
    heading: str = ""
    """Implemented: under which --help shows it."""
    metavar: str = ""
    """What --help shows for a value; by default what `takes` says."""
    default: Any = OF_REQUEST
    """What the verb gets where nobody gives the flag."""
    shows_default: bool = True
    lowest: int | None = None
    highest: int | None = None
    """The range that a request's whole number is held to."""

    @property
    def name(self) -> str:
        """The first long spelling."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def negative(self) -> str:
        """The first long spelling that switches it off."""
        return next(name for name in self.negatives if name.startswith("--"))

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.names + self.negatives

    @property
    def subject(self) -> str:
        return self.sets or self.name

    @property
    def declarations(self) -> list[str]:
        """Names as typer takes them: those that a negative switches off are the last."""
        n_alone = len(self.names) - len(self.negatives)
        pairs = zip(self.names[n_alone:], self.negatives, strict=True)
        return [*self.names[:n_alone], *("/".join(pair) for pair in pairs)]

    @property
    def shown_value(self) -> str:
        """The metavar."""
        kinds = [_METAVARS.get(kind, f"[{kind}]" if "|" in kind else "N") for kind in self.takes]
        return self.metavar or " ".join(kinds) or "N"

    def type_with(self, default: Any) -> Any:
        """The Python type of its parameter, whose default this is."""
        kinds = tuple(Literal[tuple(kind.split("|"))] if "|" in kind else _TYPES.get(kind, str) for kind in self.takes)
        kind: Any = bool if not kinds else kinds[0] if len(kinds) == 1 else tuple[kinds]  # type: ignore[valid-type]
        if self.repeatable:
            kind = list[kind]
        return kind | None if default is None else kind


def row(fate: Fate, note: str, spelled: str, takes: str = "", *, env: str = "", verbs: str = "", **more: Any) -> Flag:
    """One flag. `spelled`: the names, then after a slash those that switch it off. `env`: without its LLAMA_ARG_.
    `verbs`: with spaces between. The rest: fields of `Flag`."""
    names, _, negatives = spelled.partition(" / ")
    return Flag(
        names=tuple(names.split()),
        negatives=tuple(negatives.split()),
        takes=tuple(takes.split()),
        fate=fate,
        note=note,
        env=f"LLAMA_ARG_{env}" if env else None,
        verbs=tuple(verbs.split()),
        **more,
    )


def flag(verbs: str, field: str, spelled: str, takes: str, help: str, **more: Any) -> Flag:
    """One that does something: the verbs that have it, the field that it fills, its spellings, the kinds of its values,
    and what --help says."""
    return row(Fate.IMPLEMENTED, help, spelled, takes, verbs=verbs, field=field, **more)


def under(heading: str, *rows: Flag) -> Sequence[Flag]:
    """Implemented flags that --help shows together."""
    return [replace(flag, heading=heading) for flag in rows]
