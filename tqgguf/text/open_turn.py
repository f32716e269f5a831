"""A user's turn that is left open: the text up to which a document is kept, and how a question ends the turn later.

Without a chat template a document is continued as it is. Knows templates and token ids; nothing of caches or files.
"""

from __future__ import annotations

from collections.abc import Sequence

from tqgguf.formats.errors import RequestError
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.text_tokenizer import TextTokenizer

_MARK = "\u2060the document\u2060"  # stands for the document while a template is cut in two; no text has it
_SYSTEM = "\u2060the system prompt\u2060"  # likewise
_BETWEEN = "\n\n"  # document and question


class OpenTurn:
    """head and foot: what the template writes before and after a user's message (of a conversation without any other).

    Both are empty where there is no template, or where it does not show the message as it is.
    """

    def __init__(
        self, template: ChatTemplate | None, tokenizer: TextTokenizer, system_prompt: str | None = None
    ) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.head, self.foot = self._around(system_prompt)

    def _around(self, system_prompt: str | None) -> tuple[str, str]:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": _MARK})
        text = "" if self.template is None else self.template.render(messages)
        head, mark, foot = text.partition(_MARK)
        return (head, foot) if mark else ("", "")

    def document(self, text: str) -> list[int]:
        """Token ids of a document that a question will follow."""
        return self.tokenizer.encode(self.head + text)

    def holds(self, held: Sequence[int]) -> bool:
        """Whether tokens begin as a user's turn of this template does, with whatever system prompt before it."""
        if self._begins(held, self.head):
            return True
        before, mark, after = self._around(_SYSTEM)[0].partition(_SYSTEM)
        return bool(mark) and self._begins(held, before) and self._has(held, after)

    def question(self, held: Sequence[int], text: str) -> list[int]:
        """Token ids of what is held already and of a question after it, up to the assistant's turn.

        Documents that were kept without this template (as `held` shows) get the question without it too.
        """
        foot = self.foot if self.holds(held) else ""
        return [*held, *self.tokenizer.encode(_BETWEEN + text + foot, add_special=False)]

    def _begins(self, held: Sequence[int], text: str) -> bool:
        ids = self.tokenizer.encode(text)[:-1]  # its last token may have grown together with what follows
        return list(held[: len(ids)]) == ids

    def _has(self, held: Sequence[int], text: str) -> bool:
        ids = self.tokenizer.encode(text, add_special=False)[1:-1]  # likewise the first
        return bool(ids) and any(list(held[i : i + len(ids)]) == ids for i, token in enumerate(held) if token == ids[0])


def closing_notice(given: OpenTurn, held: Sequence[int]) -> str | None:
    """What is to be said of a question's template, if it is not that in which `held` were kept."""
    if not given.holds(held):
        return (
            "the document was kept without this chat template, so that the question follows it as plain text; "
            "give --chat-template as when it was kept"
        )
    own = _own_turn(given.tokenizer)
    if own is not None and own.head and (given.head, given.foot) != (own.head, own.foot) and own.holds(held):
        return (
            "the document seems to have been kept in the model's own chat template, which is not what ends its turn "
            "now; give --chat-template or leave it out as when it was kept"
        )
    return None


def _own_turn(tokenizer: TextTokenizer) -> OpenTurn | None:
    """A turn of the model's own template, if it has one that can be rendered."""
    try:
        template = ChatTemplate.of(tokenizer)
        return OpenTurn(template, tokenizer) if template.explicit else None
    except RequestError:
        return None
