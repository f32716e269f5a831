"""Backend an argument vector as llama-completion does, by the tables in `flag_table` and `llama_flags`.

What comes out is an argument vector for typer that holds implemented flags only, each under its first long spelling,
with the environment folded in. Accepted flags have become notices; refused, unknown and misspelled ones are errors.
The kinds of all values (integer, number, words) are checked here, their ranges by whoever uses them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tqgguf.cli.flags import SWITCH, SWITCH_OR_AUTO, Fate, Flag
from tqgguf.cli.llama_flags import flags_of
from tqgguf.cli.other_flags import ELSEWHERE
from tqgguf.formats.errors import Problems, RequestError
from tqgguf.formats.quantities import parse_count
from tqgguf.formats.wording import shown

_ON = ("on", "enabled", "true", "1")
_OFF = ("off", "disabled", "false", "0")
_AUTO = ("auto", "-1")
_ENDS_PARSING = ("--help", "--version")
_STDIN = "-"
_ALL = frozenset(spelling for flag in flags_of("run") for spelling in flag.spellings)
"""Every spelling that `run` knows."""


@dataclass(frozen=True)
class SortedArguments:
    """`argv`: implemented flags and their values, for typer. `notices`: one line each, for stderr."""

    argv: list[str]
    notices: tuple[str, ...]
    given: frozenset[str]
    """First long spellings of the implemented flags that the command line or the environment sets."""
    words: tuple[str, ...] = field(default=(), compare=False)
    """The argument vector as it was."""


@dataclass(frozen=True)
class _Given:
    """One occurrence. `spelled`: as the user wrote it, or the environment variable's name."""

    flag: Flag
    spelled: str
    values: tuple[str, ...]
    positive: bool = True


def sort_arguments(
    argv: Iterable[str], env: Mapping[str, str], flags: Sequence[Flag] | None = None, verb: str = "run"
) -> SortedArguments:
    """Sort `argv` (without the program's and the verb's name) by what becomes of each flag of the verb, or of `flags`.

    As in llama.cpp: a flag takes the next arguments whatever they look like, underscores in long names count as dashes,
    the last of several occurrences counts, the command line overrides `LLAMA_ARG_*` variables. Beyond it:
    `name=value`, and a lone `-` for `--file -`. RequestError with a message for each refused or unknown flag, missing
    value and value of another kind.
    """
    words, problems, flags = tuple(argv), Problems(), flags_of(verb) if flags is None else flags
    on_line = list(_occurrences(list(words), flags, verb, problems))
    if on_line and on_line[-1].flag.name in _ENDS_PARSING:
        return SortedArguments([on_line[-1].flag.name], (), frozenset())
    subjects = {given.flag.subject for given in on_line}
    from_env = [given for given in _from_environment(env, flags, problems) if given.flag.subject not in subjects]
    notices: list[str] = []
    kept: dict[str, list[_Given]] = {}
    for given in [*from_env, *on_line]:
        if given.flag.fate is Fate.REFUSED:
            if given.flag.harmless is not None and float(given.values[0]) == given.flag.harmless:
                continue
            problems.note(f"{given.spelled} is refused: {given.flag.note}")
            continue
        before = kept.setdefault(given.flag.subject, [])
        if before and not given.flag.repeatable:
            notices.append(f"{given.spelled} replaces the earlier {before.pop().spelled}")
        before.append(given)
    problems.check()
    argv_out: list[str] = []
    names: set[str] = set()
    for given in (given for group in kept.values() for given in group):
        if given.flag.fate is Fate.ACCEPTED:
            notices.append(f"{' '.join((given.spelled, *given.values))}: no effect here, {given.flag.note}")
        else:
            argv_out += [given.flag.name if given.positive else given.flag.negative, *_plain(given)]
            names.add(given.flag.name)
    return SortedArguments(argv_out, tuple(dict.fromkeys(notices)), frozenset(names), words)


def _occurrences(rest: list[str], flags: Sequence[Flag], verb: str, problems: Problems) -> Iterable[_Given]:
    """Every flag on the line in order that can be read, ending early at --help or --version."""
    by_spelling = {spelling: flag for flag in flags for spelling in flag.spellings}
    while rest:
        word = rest.pop(0)
        if word == _STDIN:
            word = "--file=-"
        name, equals, value = word.partition("=")
        spelled = name.replace("_", "-") if name.startswith("--") else name
        flag = by_spelling.get(spelled)
        if flag is None:
            problems.note(_unknown(word, spelled, by_spelling, verb))
            while word.startswith("-") and not equals and rest and not _looks_like_a_flag(rest[0]):
                rest.pop(0)  # values of a flag whose number of values is not known
            continue
        values = [value] if equals else []
        if len(values) > len(flag.takes):
            problems.note(f"{spelled} takes no value, found {shown(word)}")
            continue
        values += rest[: len(flag.takes) - len(values)]
        del rest[: len(values) - bool(equals)]
        if len(values) < len(flag.takes):
            problems.note(f"{spelled}: expected a value after it ({' '.join(flag.takes)}), found the end")
            continue
        given = _Given(flag, spelled, tuple(values), spelled in flag.names)
        with problems.noting():
            _check_values(given)
            yield given
        if flag.name in _ENDS_PARSING:
            return


def _looks_like_a_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def _from_environment(env: Mapping[str, str], flags: Sequence[Flag], problems: Problems) -> Iterable[_Given]:
    """What LLAMA_ARG_* variables set. A flag that can be switched off also has the variable LLAMA_ARG_NO_*."""
    for flag in flags:
        if flag.env is None:
            continue
        opposite = flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
        if flag.negatives and opposite in env:
            yield _Given(flag, opposite, (), positive=False)
        elif flag.env in env:
            value = env[flag.env]
            if not value and "file" in flag.takes:
                continue  # an empty variable names nothing
            with problems.noting():
                if flag.takes:
                    given = _Given(flag, flag.env, (value,))
                    _check_values(given)
                    yield given
                elif flag.negatives:
                    yield _Given(flag, flag.env, (), positive=_word(flag.env, value, SWITCH) == "on")
                elif value in _ON:
                    yield _Given(flag, flag.env, ())


def _unknown(word: str, spelled: str, by_spelling: Mapping[str, Flag], verb: str) -> str:
    if not word.startswith("-"):
        prompt = (
            "a prompt goes after -p, a file with one after -f" if "-p" in by_spelling else "a text file goes after -f"
        )
        return f"unexpected argument {shown(word)}; {prompt}"
    if spelled in ELSEWHERE:
        return f"{word} is refused: {ELSEWHERE[spelled]}"
    if spelled in _ALL:
        return f"`tqgguf {verb}` does not take {word}; `tqgguf {verb} --help` lists what it takes"
    alike = [name for name in by_spelling if name.startswith("--") == spelled.startswith("--")]
    works = [name for name in alike if by_spelling[name].fate is Fate.IMPLEMENTED]
    near = [name for name in works if name.startswith(spelled)]
    near = near or difflib.get_close_matches(spelled, works, n=1, cutoff=_ALIKE)
    hint = f", did you mean {near[0]}?" if near else ";"
    return f"unknown flag {word}{hint} `tqgguf {verb} --help` lists all"


_ALIKE = 0.75  # of difflib's ratio: a slip of the finger, not another word


def _word(spelled: str, value: str, kind: str) -> str:
    """The word of `kind` that the value stands for; on, off and auto have llama.cpp's other spellings."""
    if kind in (SWITCH, SWITCH_OR_AUTO):
        for word, spellings in (("on", _ON), ("off", _OFF), ("auto", _AUTO)):
            if value in spellings and word in kind.split("|"):
                return word
    elif value in kind.split("|"):
        return value
    raise RequestError(f"{spelled}: expected {kind.replace('|', ', ')}, found {value!r}")


def _check_values(given: _Given) -> None:
    for kind, value in zip(given.flag.takes, given.values, strict=True):
        if kind == "integer":
            if not re.fullmatch(r"[+-]?[0-9]{1,18}", value):
                raise RequestError(f"{given.spelled}: expected a whole number, found {value!r}")
        elif kind == "tokens":
            if parse_count(value) is None:
                raise RequestError(
                    f"{given.spelled}: expected a whole number, found {value!r} (8k stands for 8,192 tokens)"
                )
        elif kind == "number":
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if math.isnan(number):
                raise RequestError(f"{given.spelled}: expected a number, found {value!r}")
        elif kind == "file":
            if not value:
                raise RequestError(f"{given.spelled}: expected a name, found an empty one")
        elif kind != "text":
            _word(given.spelled, value, kind)


def _plain(given: _Given) -> list[str]:
    """The values as typer is to see them: words in their one spelling, counts of tokens as plain numbers."""
    return [
        str(parse_count(value)) if kind == "tokens"
        else value if kind in ("integer", "number", "text", "file")
        else _word(given.spelled, value, kind)
        for kind, value in zip(given.flag.takes, given.values, strict=True)
    ]  # fmt: skip
