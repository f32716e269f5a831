"""A chat as a growing list of messages. Every turn renders the whole conversation, and `Session.prefill` keeps what
that has in common with what it holds. Knows templates and token ids; nothing of models or terminals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqgguf.formats.errors import RequestError
from tqgguf.formats.templates.messages import DroppedTextError
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.prompt_size import check_text
from tqgguf.text.text_tokenizer import TextTokenizer

_BEFORE = ({"role": "user", "content": "\u2060question\u2060"}, {"role": "assistant", "content": "\u2060answer\u2060"})
"""Stand for the messages in tokens that are held, while a template writes what follows them; no text has them."""


class Conversation:
    """Messages so far, in a model's template. n_ctx: of its tokens. held: tokens of an earlier conversation, up to an
    answer of the assistant, which this one goes on from. `variables` are handed to the template.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: TextTokenizer,
        system_prompt: str | None = None,
        *,
        n_ctx: int | None = None,
        held: Sequence[int] = (),
        **variables: Any,
    ) -> None:
        self.template, self.tokenizer, self.n_ctx, self.variables = template, tokenizer, n_ctx, variables
        self.held = list(held)
        self.messages: list[Mapping[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def add(self, message: str) -> list[int]:
        """The token ids of the conversation with one more message of the user, up to the assistant's turn.

        RequestError: it is too long for the context, whatever its tokens are; the template cannot render it, or go on
        from `held`.
        """
        self.messages.append({"role": "user", "content": message})
        check_text(message, self.tokenizer, self.n_ctx)  # before it is rendered: one of megabytes takes seconds
        text = self._text()
        check_text(text, self.tokenizer, self.n_ctx)
        if not self.held:
            return self.tokenizer.encode(text)
        ids = self.tokenizer.encode(text, add_special=False)
        ends = self.held[-1] in self.tokenizer.end_of_generation and self.held[-1:] == ids[:1]
        return self.held + ids[ends:]

    def _text(self) -> str:
        """The conversation in the template; after `held`, what follows that."""
        return self._after_held() if self.held else self.template.render(self.messages, **self.variables)

    def _after_held(self) -> str:
        n_system = sum(message["role"] == "system" for message in self.messages[:1])
        messages = [*self.messages[:n_system], *_BEFORE, *self.messages[n_system:]]
        hides = RequestError(
            "the chat template does not show earlier answers, so that no chat can go on from a prompt cache; "
            "leave --prompt-cache out, or give another --chat-template"
        )
        try:
            _, mark, text = self.template.render(messages, **self.variables).partition(_BEFORE[1]["content"])
        except DroppedTextError as error:
            raise hides from error
        if not mark:
            raise hides
        return text

    def check(self) -> None:
        """RequestError, as `add` raises it, if the template cannot hold a chat, or cannot go on from `held`."""
        self.messages.append({"role": "user", "content": "?"})
        try:
            self._text()
        finally:
            self.take_back()

    def answered(self, text: str) -> None:
        """Note the assistant's answer."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the last message of the user, whose answer never came."""
        self.messages.pop()
