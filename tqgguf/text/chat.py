"""Turns a conversation into the text that a model expects, by the Jinja chat template of its GGUF file.

Templates come from strangers' files: they are rendered in a process of their own, and whatever goes wrong in one is one
line of RequestError. Knows nothing of tokens; a BOS that a template writes is recognised by `Tokenizer.encode`, which
then adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from tqgguf.formats.templates.messages import TOKEN_VARIABLES, Message, conversation_variables, shown_messages
from tqgguf.formats.templates.process import PROCESS, Budget
from tqgguf.text.text_tokenizer import TextTokenizer

# What llama.cpp assumes for a model whose file has no template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """A chat template with the variables that a model and a request define.

    `source`: Jinja; None stands for ChatML, as in llama.cpp (`explicit` is then False, and llama.cpp does not
    start a chat of its own accord). `now` is the clock of `strftime_now`. `variables` are more names for the template
    (pad_token, enable_thinking, date_string, ...). A template is compiled when it is first rendered.
    """

    def __init__(
        self,
        source: str | None,
        bos: str | None = None,
        eos: str | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
        **variables: Any,
    ) -> None:
        self.explicit = bool(source)
        self._source, self._now = source or CHATML, now
        named = {"bos_token": bos, "eos_token": eos}
        self._variables = {**TOKEN_VARIABLES, **{name: text for name, text in named.items() if text}, **variables}

    @classmethod
    def of(cls, tokenizer: TextTokenizer, source: str | None = None, **variables: Any) -> ChatTemplate:
        """The template of a model's file, or `source` in its place, with the texts of the model's named tokens."""
        return cls(source or tokenizer.chat_template, **{**tokenizer.named_tokens(), **variables})

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation, ready for the assistant's answer if `add_generation_prompt`.

        Contents that are strings are handed over as the template reads them; see `shown_messages`, for instance on a
        system message in front of a template that refuses or drops such (Gemma 2). `variables` count for this time.

        Raises RequestError: TemplateMistakeError, TemplateFailureError, TemplateLimitError or DroppedTextError.
        """
        more, now, budget = {**self._variables, **variables}, self._now(), Budget()

        def rendered(messages: Sequence[Message]) -> str:
            given = conversation_variables(messages, add_generation_prompt)
            return PROCESS.render(self._source, {**given, **more}, now, budget)

        return rendered(shown_messages(messages, rendered))
