"""Chat templates: what they render, what they refuse, and that they cannot reach out of their sandbox."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from vocabularies import smollm2_tokenizer, spm_metadata

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.chat import ChatTemplate
from tqgguf.runtime.tokenizer import load_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello!"}

# Gemma 2's habits in a few words: BOS, no system role, strict alternation, its own name for the assistant.
REFUSES_SYSTEM = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<{{ 'model' if message['role'] == 'assistant' else message['role'] }}>{{ message['content'] | trim }}</>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def test_smollm2s_template_renders_as_its_model_was_trained() -> None:
    template = ChatTemplate.of(smollm2_tokenizer())
    assert template.explicit
    assert template.render([SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([USER, ASSISTANT], add_generation_prompt=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    )


def test_rendered_markers_become_control_tokens() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(ChatTemplate.of(tokenizer).render([SYSTEM, USER]))
    assert [tokenizer.token_text(i) for i in ids if tokenizer.is_control(i)] == [
        "<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>",
    ]  # fmt: skip


@pytest.mark.parametrize("source", [None, ""])
def test_a_file_without_a_template_gets_chatml_as_in_llama_cpp(source: str | None) -> None:
    template = ChatTemplate(source)
    assert not template.explicit
    assert template.render([SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_that_a_template_refuses_goes_into_the_first_user_turn() -> None:
    template = ChatTemplate(REFUSES_SYSTEM, "<bos>")
    assert not template.takes_system_message
    assert template.render([SYSTEM, USER, ASSISTANT, USER]) == (
        "<bos><user>Be brief.\nHi</><model>Hello!</><user>Hi</><model>"
    )


def test_a_system_message_that_a_template_drops_goes_into_the_first_user_turn() -> None:
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    assert template.render([SYSTEM, USER]) == "[user:Be brief.\nHi]"


def test_a_template_that_folds_the_system_message_itself_is_left_alone() -> None:
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}[{{ m.role }}:{{ (first or '') if loop.first }}{{ m.content }}]{% endfor %}"
    )
    assert template.takes_system_message
    assert template.render([SYSTEM, USER]) == "[user:Be brief.\n\nHi]"


def test_the_messages_handed_in_are_not_changed() -> None:
    messages = [dict(SYSTEM), dict(USER)]
    ChatTemplate(REFUSES_SYSTEM).render(messages)
    assert messages == [SYSTEM, USER]


def test_a_bos_that_the_template_writes_is_not_doubled_by_encode() -> None:
    tokenizer = load_tokenizer(
        {**spm_metadata({"a": -1}, add_space_prefix=False), "tokenizer.chat_template": "{{ bos_token }}a"}
    )
    assert tokenizer.encode(ChatTemplate.of(tokenizer).render([USER])) == [1, 259]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("  {% if true %}\n  yes\n  {% endif %}\nend", "  yes\nend"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{{ tools is defined }} {{ enable_thinking }} {{ bos_token }}{{ eos_token }}", "False True <s></s>"),
    ],
)
def test_templates_find_what_they_are_used_to(source: str, expected: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2030, 1, 2))
    assert template.render([USER]) == expected


def test_a_template_reads_variables_of_the_request() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ date_string }}")
    assert template.render([USER], enable_thinking=False, date_string="today") == "False today"


BAD_TEMPLATES: list[tuple[str, str]] = [
    ("{% if %}", "found a mistake: Expected an expression, got 'end of statement block'"),
    ("{% for m in messages %}", "found a mistake: Unexpected end of template"),
    ("{{ 'a' | no_such_filter }}", "found a mistake: No filter named 'no_such_filter'."),
    ("{{ raise_exception('Only\nuser turns') }}", "cannot render this conversation: Only user turns"),
    ("{{ messages[0].content + 1 }}", "cannot render this conversation: TypeError can only concatenate str"),
    ("{{ nothing.there }}", "cannot render this conversation: 'nothing' is undefined"),
    ("{{ 1 / 0 }}", "cannot render this conversation: ZeroDivisionError division by zero"),
    ("{{ ''.__class__.__mro__ }}", "cannot render this conversation: access to attribute '__class__'"),
    ("{{ messages.append(1) }}", "cannot render this conversation: access to attribute 'append'"),
    ("{% include '/etc/passwd' %}", "cannot render this conversation: TypeError no loader for this environment"),
]


@pytest.mark.parametrize(("source", "message"), BAD_TEMPLATES, ids=[source for source, _ in BAD_TEMPLATES])
def test_what_goes_wrong_in_a_template_is_one_line(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([USER])
    assert str(caught.value).startswith("chat template: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refusal_that_folding_does_not_cure_is_reported() -> None:
    messages: list[dict[str, Any]] = [SYSTEM, USER, USER]
    with pytest.raises(RequestError, match="Roles must alternate"):
        ChatTemplate(REFUSES_SYSTEM).render(messages)
