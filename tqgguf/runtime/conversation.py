"""A chat as a growing list of messages. Every turn renders the whole conversation, and `Session.prefill` keeps what
that has in common with what it holds. Knows templates and token ids; nothing of models or terminals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqgguf.runtime.chat import ChatTemplate
from tqgguf.runtime.prompt_size import check_text
from tqgguf.runtime.text_tokenizer import TextTokenizer


class Conversation:
    """Messages so far, in a model's template. n_ctx: of its tokens. `variables` are handed to the template."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: TextTokenizer,
        system_prompt: str | None = None,
        *,
        n_ctx: int | None = None,
        **variables: Any,
    ) -> None:
        self.template, self.tokenizer, self.n_ctx, self.variables = template, tokenizer, n_ctx, variables
        self.messages: list[Mapping[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def add(self, message: str) -> list[int]:
        """The token ids of the conversation with one more message of the user, up to the assistant's turn.

        RequestError: it is too long for the context, whatever its tokens are.
        """
        self.messages.append({"role": "user", "content": message})
        text = self.template.render(self.messages, **self.variables)
        check_text(text, self.tokenizer, self.n_ctx)
        return self.tokenizer.encode(text)

    def answered(self, text: str) -> None:
        """Note the assistant's answer."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the last message of the user, whose answer never came."""
        self.messages.pop()
