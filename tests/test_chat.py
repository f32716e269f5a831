"""Chat templates: what they render, what they refuse, and that they cannot reach out of their sandbox."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest
from vocabularies import smollm2_tokenizer, spm_metadata

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.generation import template_sandbox
from tqgguf.runtime.generation.chat import ChatTemplate
from tqgguf.runtime.tokenizers.gguf_tokenizer import load_tokenizer

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


BOMBS = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set x = 'a' * 10**7 %}{{ x + x }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ ('\t' * 10**5).expandtabs(10**5) }}",
    "{{ ('\n' * 10**5) | indent(10**5) }}",
    "{{ '%09999999999d' | format(1) }}",
    "{{ '%09999999999d' % 1 }}",
    "{{ '%*d' | format(10**10, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 9999999999) }}",
    "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
    "{{ ('a' * 10**6).join('b' * 99) }}",
    "{{ range(99) | list | join('a' * 10**6) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% for i in range(999) %}{{ 'a' * 10**5 }}{% endfor %}",
]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_that_would_make_gigabytes_is_refused_at_once(source: str) -> None:
    before, started = peak_bytes(), time.thread_time()
    with pytest.raises(RequestError, match=r"chat template: cannot render.*expected (at most|less than)"):
        ChatTemplate(source).render([USER])
    assert time.thread_time() - started < 2
    assert peak_bytes() - before < 300e6


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than"),
        ("{{ [1] | slice(10**7) | list | length }}", "it takes more than"),
        ("{{ lipsum(n=10**6) }}", "it takes more than"),
    ],
)
def test_a_template_that_would_run_without_end_is_stopped(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source).render([USER])
    assert sys.gettrace() is None


def test_a_template_that_would_grow_without_end_is_stopped() -> None:
    """In a process of its own: growth counts from the most that the process ever held."""
    bomb = "{% set n = namespace(a='a') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
    code = (
        "from tqgguf.runtime.generation import chat, template_sandbox\ntemplate_sandbox.MAX_GROWTH = 2**28\n"
        f"chat.ChatTemplate({bomb!r}).render([{USER!r}])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "RequestError: chat template: cannot render this conversation: it takes more than 256 MiB" in found.stderr


@pytest.mark.parametrize("source", ["{" * 3000, "{{" + "(" * 5000, "{% if x %}" * 3000, "{{ x" + "[0]" * 5000 + " }}"])
def test_a_template_nested_without_end_is_one_line(source: str) -> None:
    with pytest.raises(RequestError, match="chat template: expected Jinja, found a mistake"):
        ChatTemplate(source).render([USER])


def test_bounds_leave_what_templates_use_alone() -> None:
    source = (
        "{{ '%s-%5d' | format('a', 7) }} {{ '%02d' % 3 }} {{ '{:>4}'.format('b') }} {{ 'a b' | replace(' ', '') }} "
        "{{ ['x', 'y'] | join(', ') }} {{ ', '.join(['x', 'y']) }} {{ 'a' * 3 + 'b' }} {{ 2 ** 10 * 3 }} {{ 7 % 4 }} "
        "{{ 'a\nb' | indent(2) }} {{ ([1] + [2]) | length }} {{ 'q' | center(3) }}|"
        "{{ range(3) | map('string') | join }}"
    )
    expected = "a-    7 03    b ab x, y x, y aaab 3072 3 a\n  b 2  q |012"
    assert ChatTemplate(source).render([USER]) == expected


def test_a_long_conversation_is_rendered_quickly() -> None:
    messages = [{"role": role, "content": "word " * 200} for _ in range(300) for role in ("user", "assistant")]
    template, started = ChatTemplate(None), time.thread_time()
    assert len(template.render(messages)) > 600_000
    assert time.thread_time() - started < 1
