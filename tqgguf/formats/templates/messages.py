"""In which form a template wants its messages: found out by rendering marks in place of their texts.

Templates read a message's content as a string, or as a list of typed parts; some drop a role, or refuse it, or cut what
is long. A text that a template drops in silence would be answered as if it had not been asked, so a form that shows all
texts is looked for. A mark is as long as its text, and has its words and lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tqgguf.formats.errors import RequestError
from tqgguf.formats.templates.process import PROCESS, Budget, TemplateFailureError

Message = Mapping[str, Any]  # "role", "content" and whatever else a template reads

_MARK = "probe{}of{}text"  # what marks are made of: letters and digits, which no filter of a template changes
_SPACES = re.compile(r"([ \n\r\t]+)")
_SPACES_OR_ESCAPES = re.compile(r"\s+|\\+[nrt]")  # as JSON has them
_LONG_TEXT = ("? " * 7 + "?\n") * 256
_WHOSE = {"system": "the system message", "user": "the user's messages", "assistant": "the assistant's messages"}


class DroppedTextError(RequestError):
    """A template shows the text of some messages in no form. `roles`: whose they are."""

    def __init__(self, roles: Collection[str]) -> None:
        self.roles = frozenset(roles)
        whose = " and ".join(_WHOSE.get(role, f"messages of {role!r:.40}") for role in sorted(roles, reverse=True))
        super().__init__(
            f"chat template: expected one that shows the text of every message, found one that drops {whose}; "
            "give another one with --chat-template or --chat-template-file"
        )


def shown_messages(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> list[Message]:
    """The messages in the first form in which `render` shows all their texts.

    Strings come first, then typed parts for the roles that are dropped, then typed parts for all. Where none of these
    shows a leading system message, its text goes in front of the message after it. Contents that are no strings stay.

    Raises DroppedTextError if every form that can be rendered drops some text, and TemplateFailureError if none can be.
    """
    dropped: list[set[str]] = []
    failure: TemplateFailureError | None = None
    for candidate in _with_and_without_system(messages):
        texts = {i: m["content"] for i, m in enumerate(candidate) if isinstance(m.get("content"), str)}
        marks = {i: _mark(_MARK.format(i, len(candidate)), text) for i, text in texts.items()}
        marked = [{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(candidate)]
        typed: set[int] = set()
        tried: list[set[int]] = []
        while typed not in tried:
            tried.append(typed)
            following = set(marks)
            try:
                text = _without_spaces(render(_typed(marked, typed)))
            except TemplateFailureError as error:
                failure = error if not typed else failure
            else:
                lost = {candidate[i].get("role", "") for i, mark in marks.items() if not _shows(text, mark, i in typed)}
                if not lost:
                    return _typed(candidate, typed)
                dropped.append(lost)
                if not typed:
                    following = {i for i in marks if candidate[i].get("role", "") in lost}
            typed = following
    if dropped:
        raise DroppedTextError(min(dropped, key=len))
    assert failure is not None
    raise failure


def template_problem(source: str) -> str | None:
    """Why no chat can be held by a template, on one line; None: nothing is known to be wrong with it.

    It does not compile, takes too long, or drops or cuts what the user writes. One that raises an error of its own may
    want another conversation than the one that is tried here.
    """
    budget = Budget()

    def rendered(messages: Sequence[Message]) -> str:
        given = {**TOKEN_VARIABLES, **conversation_variables(messages, True)}
        return PROCESS.render(source, given, budget=budget)

    try:
        PROCESS.compile(source)
        shown_messages([{"role": "user", "content": _LONG_TEXT}], rendered)
    except TemplateFailureError:
        return None
    except RequestError as error:
        return str(error)
    return None


TOKEN_VARIABLES: Mapping[str, str] = {"bos_token": "", "eos_token": ""}
"""Of a model without such tokens, as llama.cpp has it; of others that are not there a template knows nothing."""


def conversation_variables(messages: Sequence[Message], add_generation_prompt: bool) -> dict[str, Any]:
    """The variables that transformers always defines."""
    return {
        "messages": list(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }


def _with_and_without_system(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    yield messages
    if len(messages) > 1 and messages[0].get("role") == "system":
        system, first = messages[0].get("content"), messages[1].get("content")
        if isinstance(system, str) and isinstance(first, str):
            both = f"{system}\n{first}" if system else first
            yield [{**messages[1], "content": both}, *messages[2:]]


def _typed(messages: Sequence[Message], which: Collection[int]) -> list[Message]:
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if i in which else m for i, m in enumerate(messages)
    ]


def _mark(name: str, text: str) -> str:
    """What stands for a text: its name over and over, in words of the same lengths between the same spaces.

    Nothing stands for nothing. Where a text has fewer letters than the name, one word as long as the longer of both.
    """
    if not text.strip():
        return text
    letters = name * (len(text) // len(name) + 1)
    pieces, at = _SPACES.split(text), 0
    if sum(map(len, pieces[::2])) < len(name):
        return letters[: max(len(text), len(name))]
    for i in range(0, len(pieces), 2):
        pieces[i], at = letters[at : at + len(pieces[i])], at + len(pieces[i])
    return "".join(pieces)


def _without_spaces(text: str) -> str:
    """A rendering in which a mark is found however a template trims, indents, joins or escapes lines."""
    return _SPACES_OR_ESCAPES.sub("", text.lower())


def _shows(text: str, mark: str, is_typed: bool) -> bool:
    """Whether a whole mark is there, and not as Python or JSON write the part that holds it."""
    word = _without_spaces(mark)
    parts = (f"{quote}text{quote}:{quote}{word}{quote}" for quote in "'\"") if is_typed else ()
    kinds = ("'type':'text'", '"type":"text"')
    written = any(f"{kind},{part}" in text or f"{part},{kind}" in text for part in parts for kind in kinds)
    return word in text and not written
