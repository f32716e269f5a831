"""A user's turn that is left open: the text up to which a document is kept, and how a question ends the turn later.

Without a chat template a document is continued as it is. Knows templates and token ids; nothing of caches or files.
"""

from __future__ import annotations

from collections.abc import Sequence

from tqgguf.runtime.generation.chat import ChatTemplate
from tqgguf.runtime.tokenizers.text_tokenizer import TextTokenizer

_MARK = "\u2060the document\u2060"  # stands for the document while a template is cut in two; no text has it
_BETWEEN = "\n\n"  # document and question


class OpenTurn:
    """head and foot: what the template writes before and after a user's message (of a conversation without any other).

    Both are empty where there is no template, or where it does not show the message as it is.
    """

    def __init__(
        self, template: ChatTemplate | None, tokenizer: TextTokenizer, system_prompt: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": _MARK})
        text = "" if template is None else template.render(messages)
        self.head, mark, self.foot = text.partition(_MARK)
        if not mark:
            self.head = self.foot = ""

    def document(self, text: str) -> list[int]:
        """Token ids of a document that a question will follow."""
        return self.tokenizer.encode(self.head + text)

    def question(self, held: Sequence[int], text: str) -> list[int]:
        """Token ids of what is held already and of a question after it, up to the assistant's turn.

        Documents that were kept without this template (as `held` shows) get the question without it too.
        """
        head = self.tokenizer.encode(self.head)[:-1]  # its last token may have grown together with the document
        foot = self.foot if list(held[: len(head)]) == head else ""
        return [*held, *self.tokenizer.encode(_BETWEEN + text + foot, add_special=False)]
