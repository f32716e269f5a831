"""Chat templates: what they render, what they refuse, and that they cannot reach out of their sandbox."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
from vocabularies import smollm2_tokenizer, spm_metadata

from tqgguf.formats.errors import RequestError
from tqgguf.formats.templates import process
from tqgguf.formats.templates.messages import DroppedTextError, template_problem
from tqgguf.formats.templates.process import TemplateLimitError
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.gguf_tokenizer import load_tokenizer

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
    assert template.render([SYSTEM, USER]) == "[user:Be brief.\n\nHi]"


def test_the_messages_handed_in_are_not_changed() -> None:
    messages = [dict(SYSTEM), dict(USER)]
    ChatTemplate(REFUSES_SYSTEM).render(messages)
    assert messages == [SYSTEM, USER]


def test_a_bos_that_the_template_writes_is_not_doubled_by_encode() -> None:
    tokenizer = load_tokenizer(
        {
            **spm_metadata({"a": -1}, add_space_prefix=False),
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        }
    )
    assert tokenizer.encode(ChatTemplate.of(tokenizer).render([{"role": "user", "content": "a"}])) == [1, 259]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("  {% if true %}\n  yes\n  {% endif %}\nend", "  yes\nend"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "False"),  # a scope of its own
        (
            "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
            '{"a":"\\u00e9","b":1}',
        ),
        ("{{ {'a': 'é'} | tojson(true, 1) }}", '{\n "a": "\\u00e9"\n}'),
        ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "True True True"),
        ("{{ enable_thinking is defined }} {{ bos_token }}{{ eos_token }}", "False <s></s>"),
        ("{% set n = namespace(self=1, a=2) %}{% set n.a = n.self %}{{ n.a }}", "1"),
        ("{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 0) | tojson }}", '{"a": 1}{"a": 0, "b": 0}'),
    ],
)
def test_templates_find_what_they_are_used_to(source: str, expected: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}|\n" + source, "<s>", "</s>", now=lambda: datetime(2030, 1, 2))
    assert template.render([USER]) == f"Hi|\n{expected}"


def test_a_template_reads_variables_of_the_model_and_of_the_request() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ pad_token }} {{ date_string }}", pad_token="<pad>")
    assert template.render([USER], date_string="today") == "Hi <pad> today"


def test_a_template_finds_the_models_tokens_by_transformers_names() -> None:
    metadata = {**spm_metadata({"a": -1}), "tokenizer.ggml.padding_token_id": 2}
    source = "{{ messages[0].content }} {{ pad_token }} {{ unk_token }} {{ mask_token is defined }}"
    assert ChatTemplate.of(load_tokenizer(metadata), source).render([USER]) == "Hi </s> <unk> False"


BAD_TEMPLATES: list[tuple[str, str]] = [
    ("{% if %}", "found a mistake: Expected an expression, got 'end of statement block'"),
    ("{% for m in messages %}", "found a mistake: Unexpected end of template"),
    ("{{ 'a' | no_such_filter }}", "found a mistake: No filter named 'no_such_filter'."),
    ("{{ raise_exception('Only\nuser turns') }}", "cannot render this conversation: Only user turns"),
    ("{{ messages[0].content + 1 }}", "cannot render this conversation: TypeError can only concatenate str"),
    ("{{ nothing.there }}", "cannot render this conversation: 'nothing' is undefined"),
    ("{{ 1 / 0 }}", "cannot render this conversation: ZeroDivisionError division by zero"),
    ("{{ ''.__class__.__mro__ }}", "cannot render this conversation: access to attribute '__class__'"),
    ("{{ namespace(__x=1) }}", "cannot render this conversation: a namespace takes no name"),
    ("{{ [1] | tojson(default=1) }}", "cannot render this conversation: TypeError"),
    ("{{ raise_exception('a\n' * 8000000) }}", "cannot render this conversation: a a a"),
    ("{{ messages.append(1) }}", "cannot render this conversation: access to attribute 'append'"),
    ("{% include '/etc/passwd' %}", "cannot render this conversation: TypeError no loader for this environment"),
]


@pytest.mark.parametrize(("source", "message"), BAD_TEMPLATES, ids=[source for source, _ in BAD_TEMPLATES])
def test_what_goes_wrong_in_a_template_is_one_line(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([USER])
    assert str(caught.value).startswith("chat template: ") and message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


TYPED = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "shown",
    [
        TYPED,
        "{{ m.content[0].text }}",
        "{{ m['content'][0]['text'] + '' }}",  # fails where the content is a string
        "{{ m.content | map(attribute='text') | join }}",
        "{% if m.content is not string %}{{ m.content[0].text }}{% endif %}",
        "{% if m.role == 'user' %}" + TYPED + "{% else %}{{ m.content }}{% endif %}",
        "{% if m.role != 'user' %}" + TYPED + "{% else %}{{ m.content }}{% endif %}",
    ],
)
def test_a_template_that_reads_typed_content_gets_it(shown: str) -> None:
    template = ChatTemplate("{% for m in messages %}[" + shown + "]{% endfor %}")
    assert template.render([USER]) == "[Hi]"
    assert template.render([SYSTEM, USER, ASSISTANT, USER]) == "[Be brief.][Hi][Hello!][Hi]"


@pytest.mark.parametrize(
    "shown", ["{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% else %}typed{% endif %}",
              "{{ m.content | upper | lower }}", "{{ m.content | tojson }}"]
)  # fmt: skip
def test_a_template_that_shows_strings_gets_strings(shown: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + shown + "{% endfor %}")
    assert template.render([USER]).strip('"').lower() == "hi"


def test_a_system_message_that_only_typed_content_shows_is_not_folded() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}:" + TYPED + "]{% endfor %}")
    assert template.render([SYSTEM, USER]) == "[system:Be brief.][user:Hi]"


@pytest.mark.parametrize(
    ("source", "dropped"),
    [
        ("Question: {{ prompt }}", "the user's messages and the assistant's messages"),
        (
            "{{ messages[-1].content[:5] }}",
            "the user's messages and the assistant's messages",
        ),  # a part is not the text
        ("{% for m in messages %}{{ m.text }}{% endfor %}", "the user's messages and the assistant's messages"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "the assistant's messages"),
        ("{{ messages[-1].content }}", "the user's messages and the assistant's messages"),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", "the user's messages"),
    ],
)
def test_a_text_that_a_template_drops_is_refused_by_name(source: str, dropped: str) -> None:
    with pytest.raises(RequestError, match=f"chat template: expected .*, found one that drops {dropped};"):
        ChatTemplate(source).render([USER, ASSISTANT, USER])


LONG = {"role": "user", "content": "Pasted:\n" + "word " * 400 + "\n\nWhat is the last word?"}


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.content[:20] }}",
        "{{ m.content[-20:] }}",
        "{{ m.content | truncate(30) }}",
        "{{ m.content | truncate(2000, true, '') }}",
        "{{ m.content.split()[:5] | join(' ') }}",
        "{{ m.content.splitlines()[0] }}",
        "{{ (m.content | wordwrap(79)).split('\n')[:3] | join('\n') }}",
        "{% if m.content | length < 50 %}{{ m.content }}{% endif %}",
        "{{ m.content | string | list | batch(100) | first | join }}",
        "{{ m.content[0].text[:100] }}",
        "{% for c in m.content[:100] %}{{ c }}{% endfor %}",
    ],
)
def test_a_template_that_cuts_a_long_text_is_refused(shown: str) -> None:
    source = "{% for m in messages %}" + shown + "{% endfor %}"
    with pytest.raises(DroppedTextError):
        ChatTemplate(source).render([LONG])
    assert "drops the user's messages" in str(template_problem(source))


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.content | trim }}",
        "{{ m.content | indent(4) }}",
        "{{ m.content | wordwrap(79) }}",
        "{{ m.content.split('\n') | join(' ') }}",
        "{{ m.content | tojson }}",
        "{{ {'content': m.content | tojson} | tojson }}",
        '{"role": "{{ m.role }}", "text": "{{ m.content }}"}',
        "{{ {'text': m.content} | tojson }}",
        "{{ {'type': 'text', 'text': m.content} }}",
        '{"type": "text", "text": "{{ m.content }}"}',
        "{{ m.content }} {{ {'text': m.content} | tojson }}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
    ],
)
def test_a_long_text_that_is_shown_whole_is_rendered_whatever_stands_around_it(shown: str) -> None:
    text = ChatTemplate("{% for m in messages %}" + shown + "{% endfor %}").render([LONG])
    assert text.count("word") >= 401 and "What is the last word?" in text


def test_typed_parts_that_python_or_json_write_show_no_text() -> None:
    for written in ("{{ m.content }}", "{{ m.content | tojson }}", "{{ m.content | tojson(sort_keys=true) }}"):
        source = "{% for m in messages %}{% if m.content is not string %}" + written + "{% endif %}{% endfor %}"
        with pytest.raises(DroppedTextError):
            ChatTemplate(source).render([USER])


@pytest.mark.parametrize("source", [REFUSES_SYSTEM, "{{ messages[-1].content }}"])
def test_an_empty_system_message_leaves_nothing_behind(source: str) -> None:
    empty = {"role": "system", "content": ""}
    assert ChatTemplate(source, "<bos>").render([empty, USER]) == ChatTemplate(source, "<bos>").render([USER])


def test_all_renders_of_a_conversation_have_one_budget_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_SECONDS_OF_ALL", 0.5)
    slow = "{% for i in range(700) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateLimitError, match="for one conversation"):
        ChatTemplate(slow + "{{ messages[0].nothing }}").render([SYSTEM, USER])


def test_a_template_for_one_message_serves_for_one() -> None:
    assert ChatTemplate("Q: {{ messages[-1].content }}").render([USER]) == "Q: Hi"


def test_a_refusal_that_folding_does_not_cure_is_reported() -> None:
    messages: list[dict[str, Any]] = [SYSTEM, USER, USER]
    with pytest.raises(RequestError, match="Roles must alternate"):
        ChatTemplate(REFUSES_SYSTEM).render(messages)


def test_limits_leave_what_templates_use_alone() -> None:
    source = (
        "{{ '%s-%5d' | format('a', 7) }} {{ '%02d' % 3 }} {{ '{:>4}'.format('b') }} {{ 'a b' | replace(' ', '') }} "
        "{{ ['x', 'y'] | join(', ') }} {{ ', '.join(['x', 'y']) }} {{ 'a' * 3 + 'b' }} {{ 2 ** 10 * 3 }} {{ 7 % 4 }} "
        "{{ 'a\nb' | indent(2) }} {{ ([1] + [2]) | length }} {{ 'q' | center(3) }}|"
        "{{ range(3) | map('string') | join }}"
    )
    expected = "a-    7 03    b ab x, y x, y aaab 3072 3 a\n  b 2  q |012"
    assert ChatTemplate("{{ messages[0].content }}" + source).render([USER]) == f"Hi{expected}"


def test_a_long_conversation_is_rendered_quickly() -> None:
    messages = [{"role": role, "content": "word " * 200} for _ in range(300) for role in ("user", "assistant")]
    template, started = ChatTemplate(None), time.thread_time()
    assert len(template.render(messages)) > 600_000
    assert time.thread_time() - started < 1
