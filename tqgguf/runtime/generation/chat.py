"""Turns a conversation into the text that a model expects, by the Jinja chat template of its GGUF file.

Templates come from strangers' files: they run sandboxed, and whatever goes wrong in one is one line of RequestError.
Knows nothing of tokens; a BOS that a template writes is recognised by `Tokenizer.encode`, which then adds none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.generation.template_sandbox import MAX_SIZE, BoundedSandbox, bounded
from tqgguf.runtime.tokenizers.text_tokenizer import TextTokenizer

Message = Mapping[str, Any]  # "role", "content" and whatever else a template reads

# What llama.cpp assumes for a model whose file has no template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """A chat template with the BOS and EOS texts it may write.

    `source`: Jinja; None stands for ChatML, as in llama.cpp (`explicit` is then False, and llama.cpp does not
    start a chat of its own accord). `now` is the clock of `strftime_now`.
    Raises RequestError when `source` is no valid template.
    """

    def __init__(
        self,
        source: str | None,
        bos: str | None = None,
        eos: str | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.explicit = bool(source)
        self._variables = {"bos_token": bos or "", "eos_token": eos or ""}
        environment = BoundedSandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            more_filters={"tojson": _to_json},
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source or CHATML)
        except Exception as error:  # nesting without end fails in Jinja's parser, or in Python's, in their own ways
            raise RequestError(f"chat template: expected Jinja, found a mistake: {_one_line(error)}") from error

    @classmethod
    def of(cls, tokenizer: TextTokenizer, source: str | None = None) -> ChatTemplate:
        """The template of a model's file, or `source` in its place, with the model's BOS and EOS texts."""
        bos, eos = (None if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source or tokenizer.chat_template, bos, eos)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation, ready for the assistant's answer if `add_generation_prompt`.

        A system message in front of a template that refuses or drops such (Gemma 2) goes into the message after it.
        `variables` are more names for the template (enable_thinking, date_string, ...).
        Raises RequestError with the template's own words.
        """
        if len(messages) > 1 and messages[0]["role"] == "system" and not self.takes_system_message:
            content = f"{messages[0]['content']}\n{messages[1]['content']}"
            messages = [{**messages[1], "content": content}, *messages[2:]]
        return self._render(messages, add_generation_prompt, variables)

    @cached_property
    def takes_system_message(self) -> bool:
        """Whether a system message's text gets into the prompt."""
        probe = "the system message"
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "the question"}]
        try:
            return probe in self._render(messages, True, {})
        except RequestError:
            return False

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        given = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": True,
            **self._variables,
            **variables,
        }
        try:
            with bounded():
                text = self._template.render(given)
            if len(text) > MAX_SIZE:
                raise TemplateError(f"it makes {len(text):,} characters, expected at most {MAX_SIZE:,}")
            return text
        except Exception as error:  # a template computes, so it can fail in any way that Python can
            raise RequestError(f"chat template: cannot render this conversation: {_one_line(error)}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only stands around them."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model has seen in training.
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__} "
    return name + " ".join(str(error).split())
