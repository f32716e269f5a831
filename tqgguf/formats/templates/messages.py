"""In which form a template wants its messages: found out by rendering marks in place of their texts.

Templates read a message's content as a string, or as a list of typed parts; some drop a role, or refuse it. A text that
a template drops in silence would be answered as if it had not been asked, so a form that shows all texts is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tqgguf.formats.errors import RequestError
from tqgguf.formats.templates.process import PROCESS, TemplateFailureError

Message = Mapping[str, Any]  # "role", "content" and whatever else a template reads

_MARK = "probe{}of{}text"  # stands for a message's text; letters and digits, which no filter of a template changes
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
        marks = {
            i: _MARK.format(i, len(candidate)) for i, m in enumerate(candidate) if isinstance(m.get("content"), str)
        }
        marked = [{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(candidate)]
        typed: set[int] = set()
        tried: list[set[int]] = []
        while typed not in tried:
            tried.append(typed)
            following = set(marks)
            try:
                text = render(_typed(marked, typed)).lower()
            except TemplateFailureError as error:
                failure = error if not typed else failure
            else:
                lost = {candidate[i].get("role", "") for i, mark in marks.items() if not _shows(text, mark)}
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

    It does not compile, takes too long, or drops what the user writes. One that raises an error of its own may want
    another conversation than the one that is tried here.
    """
    try:
        PROCESS.compile(source)
        shown_messages(
            [{"role": "user", "content": "?"}],
            lambda messages: PROCESS.render(source, {**TOKEN_VARIABLES, **conversation_variables(messages, True)}),
        )
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
            yield [{**messages[1], "content": f"{system}\n{first}"}, *messages[2:]]


def _typed(messages: Sequence[Message], which: Collection[int]) -> list[Message]:
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if i in which else m for i, m in enumerate(messages)
    ]


def _shows(text: str, mark: str) -> bool:
    """Whether a mark is there, and not as Python or JSON write the part that holds it."""
    return mark in text and not any(f"text{quote}: {quote}{mark}" in text for quote in "'\"")
