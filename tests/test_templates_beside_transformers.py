"""Templates render as transformers renders them: its own function is the oracle, in the version that mlx-lm brings.

TQGGUF_TEMPLATES names a folder of public templates (*.jinja) to be compared too, with `-m slow`: they belong to others.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tqgguf.formats.templates.messages import DroppedTextError
from tqgguf.formats.templates.process import PROCESS, TemplateFailureError, TemplateMistakeError
from tqgguf.text.chat import ChatTemplate

oracle: Any = pytest.importorskip("transformers.utils.chat_template_utils")

SYSTEM = {"role": "system", "content": "Be  brief."}
USER = {"role": "user", "content": "What is <b>2 + 2</b>? é\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER],
    "all": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source: str, messages: list[dict[str, str]], **variables: Any) -> str:
    (text,), _ = oracle.render_jinja_template([messages], chat_template=source, **variables)
    return str(text)


SOURCES = [
    "  {% if true %}\n  a\n  {% endif %}\n\tb {%- if true %} c {% endif -%}\n d\n",
    "{% for i in range(9) %}{% if i is odd %}{% continue %}{% endif %}{% if i > 6 %}{% break %}{% endif %}"
    "{{ i }}{% endfor %}",
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ add_generation_prompt }}"
    "{{ pad_token is defined }}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(true, 1, (',', ':'), true) }}",
    "{{ {'b': '<é&\">', 'a': [1.5, none, true]} | tojson"
    "(ensure_ascii=False, separators=(', ', ' : '), sort_keys=True) }}",
    "{% generation %}{% set x = 1 %}in{% endgeneration %}{{ x is defined }}",
    "{% set n = namespace(a=1, self=2) %}{% for i in range(3) %}{% set n.a = n.a + i %}{% endfor %}"
    "{{ n.a }}{{ n.self }}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}{{ dict is callable }}",
    "{% macro m(x, y=2) %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ m(1) }}"
    "{% call m(3) %}c{% endcall %}",
    "{{ messages[0].content.split('?')[0].strip() | upper | replace('WHAT', 'x') }}{{ messages[0]['role'].title() }}",
    "{{ messages[0].items() | list | length }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% set m = messages %}"
    "{% if m[0].content is string and m[0] is mapping and m is iterable %}y{% endif %}{{ m[-1].role }}",
    "{{ 'a' ~ 1 ~ none }}{{ [1, 2][::-1] }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ '%03d' | format(7) }}"
    "{{ 'x' in 'xy' }}{{ nothing }}",
    "{{ '<b>' | e }}{{ '<b>' | safe }}{{ {'a': 1} | items | list }}"
    "{{ [3, 1] | sort | join('-') }}{{ 'a b' | wordcount }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].nothing.more }}",
    "{{ messages.append(1) }}{{ ''.__class__ }}",
    "{{ namespace(_a=1) }}",
    "{% include 'x' %}",
    "{{ x | unknown }}",
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_a_template_finds_what_transformers_shows_it(source: str) -> None:
    given = {"messages": CONVERSATIONS["all"], "tools": None, "documents": None, "add_generation_prompt": True, **NAMES}
    try:
        expected = theirs(source, CONVERSATIONS["all"], add_generation_prompt=True, **NAMES)
    except Exception as error:
        with pytest.raises((TemplateFailureError, TemplateMistakeError)) as caught:
            PROCESS.render(source, given)
        if type(error).__name__ in ("TemplateError", "TemplateSyntaxError"):
            assert str(error).split("\n")[0] in str(caught.value)
    else:
        assert PROCESS.render(source, given) == expected


def test_the_clock_is_transformers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ messages[0].content }}{{ strftime_now('%A %d %B %Y %H') }}"
    before = datetime.now()
    assert ChatTemplate(source, now=lambda: before).render([USER]) == theirs(source, [USER]).replace(
        datetime.now().strftime("%A %d %B %Y %H"), before.strftime("%A %d %B %Y %H")
    )


def _public() -> list[Path]:
    return sorted(Path(folder).glob("*.jinja")) if (folder := os.environ.get("TQGGUF_TEMPLATES")) else []


@pytest.mark.slow
@pytest.mark.parametrize("path", _public(), ids=lambda path: path.stem)
def test_a_public_template_renders_as_in_transformers(path: Path) -> None:
    """Where transformers fails or shows not every text, ours does better or says so."""
    source = path.read_text(encoding="utf-8")
    for messages in CONVERSATIONS.values():
        for add in (True, False):
            try:
                expected = theirs(source, messages, add_generation_prompt=add, **NAMES)
            except Exception:
                expected = ""
            try:
                found = ChatTemplate(source, "<s>", "</s>").render(messages, add)
            except (TemplateFailureError, DroppedTextError):
                assert not expected or any(m["content"].strip()[-9:] not in expected for m in messages)
                continue
            if all(m["content"].split("</think>")[-1].strip() in expected for m in messages):
                assert found == expected
