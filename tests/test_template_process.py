"""The process that renders chat templates: no template of a stranger's takes more than its time and memory.

Limits are lowered here so that attacks end soon; a template that reaches one is told from a template that fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tqgguf.formats.errors import RequestError
from tqgguf.formats.templates import process
from tqgguf.formats.templates.messages import template_problem
from tqgguf.formats.templates.process import (
    TemplateFailureError,
    TemplateLimitError,
    TemplateMistakeError,
    TemplateProcess,
)


@pytest.fixture(scope="module")
def one_process() -> Iterator[TemplateProcess]:
    found = TemplateProcess()
    yield found
    found.close()


@pytest.fixture
def renderer(one_process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> TemplateProcess:
    monkeypatch.setattr(process, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(process, "MAX_BYTES", 2**27)
    return one_process


GROWING = "{% set n = namespace(v=%s) %}{% for i in range(60) %}{% set n.v = %s %}{% endfor %}{{ n.v%s }}"


def growing(first: str, step: str, use: str = "") -> str:
    return GROWING.replace("%s", first, 1).replace("%s", step, 1).replace("%s", use, 1)


ATTACKS = [
    growing("[1]", "[n.v, n.v]", "|tojson"),
    growing("[1]", "[n.v, n.v]", "|string"),
    growing("[1]", "[n.v, n.v]", "|pprint"),
    growing("{}", "{'a': n.v, 'b': n.v}", "|tojson"),
    growing("'a'", "n.v ~ n.v"),
    growing("'a'", "n.v + n.v"),
    growing("'a'", "n.v | replace('a', 'aa')"),
    growing("'aa'", "[n.v, n.v] | join"),
    growing("[0]", "n.v + n.v"),
    growing("3", "n.v * n.v"),
    growing("[3]", "(n.v * 2) | sort"),
    "{{ (['a' * 16000000] * 500) | join }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ (2 ** (10 ** 8) // 3 ** (10 ** 7)) % 7 ** (10 ** 6) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a'.zfill(10 ** 10) }}",
    "{{ ('\t' * 10 ** 5).expandtabs(10 ** 5) }}",
    "{{ ('\n' * 10 ** 5) | indent(10 ** 5, blank=true) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' | format(10 ** 9, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a'.encode().center(10 ** 10) }}",
    "{{ ('a' * 10 ** 6).encode().replace('a'.encode(), ('b' * 10 ** 6).encode()) }}",
    "{{ ('a' * 10 ** 5).translate({97: 'b' * 10 ** 5}) }}",
    "{{ ('a' * 10 ** 6).join('b' * 999) }}",
    "{{ range(99999) | list | batch(10 ** 9, 0) | list }}",
    "{{ range(99999) | slice(10 ** 8, 0) | list }}",
    "{{ ('a ' * 10 ** 7) | wordwrap(1) | length }}",
    "{{ ('www.a.de ' * 10 ** 6) | urlize }}",
    "{{ {'a': 'b' * 10 ** 8} | xmlattr }}",
    "{{ (range(99999) | list * 999) | sum }}",
    "{{ ([[[1]]] * 10 ** 7) | sum(start=[]) | length }}",
    "{{ lipsum(n=10 ** 7) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(99) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ strftime_now('%Y' * 10 ** 8) }}",
    "{{ ('a' * 10 ** 8) | striptags }}",
    "{{ 'a' | truncate(5) * 10 ** 9 }}",
    "{{ " + "(3 ** (10 ** 7)) % 5 + " * 20 + "1 }}",  # computed while it is compiled
]  # fmt: skip


@pytest.mark.parametrize("source", ATTACKS)
def test_a_template_without_end_is_stopped_and_the_next_one_is_served(source: str, renderer: TemplateProcess) -> None:
    with pytest.raises(TemplateLimitError, match=r"chat template: it takes more than (0\.2 s of CPU time|128 MiB)"):
        renderer.render(source, {"messages": [{"role": "user", "content": "Hi"}]})
    assert renderer.render("{{ x }}", {"x": "next"}) == "next"


def test_attacks_leave_this_process_as_it_was(renderer: TemplateProcess) -> None:
    before = process.resident_bytes(os.getpid())
    for source in ATTACKS[7:9]:
        with pytest.raises(TemplateLimitError):
            renderer.render(source, {})
    assert process.resident_bytes(os.getpid()) - before < 2**25


def test_memory_is_watched_where_the_system_does_not_limit_it(
    renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: the interpreter takes the limit that it is told, and this process looks at another one."""
    renderer.render("", {})
    monkeypatch.setattr(process, "MAX_SECONDS", 60.0)
    exchange = process._exchange

    def unlimited(child: Any, request: bytes) -> Any:
        return exchange(child, request.replace(f'"bytes": {2**27}'.encode(), f'"bytes": {2**34}'.encode()))

    monkeypatch.setattr(process, "_exchange", unlimited)
    with pytest.raises(TemplateLimitError, match="it takes more than 128 MiB of memory"):
        renderer.render(growing("[0]", "n.v + n.v"), {})


def test_a_process_that_does_not_answer_is_given_up(renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer.render("", {})
    monkeypatch.setattr(process, "MAX_WAIT", 0.1)
    assert renderer._child is not None
    os.kill(renderer._child.pid, signal.SIGSTOP)
    with pytest.raises(TemplateLimitError, match="it takes more than 0 s"):
        renderer.render("", {})
    assert renderer._child is None


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_is_started_again(renderer: TemplateProcess, by: signal.Signals) -> None:
    renderer.render("", {})
    assert renderer._child is not None
    os.kill(renderer._child.pid, by)
    renderer._child.wait()
    with pytest.raises(TemplateLimitError, match=f"ended with the signal {by.name}"):
        renderer.render("", {})
    assert renderer.render("{{ 1 }}", {}) == "1"


@pytest.mark.parametrize(
    "source", ["{" * 3000, "{{" + "(" * 50000, "{% if x %}" * 3000, "{{ x" + "[0]" * 5000 + " }}", "{{ " + "-" * 99999]
)
def test_a_template_nested_without_end_is_one_line(source: str) -> None:
    with pytest.raises((TemplateMistakeError, TemplateLimitError)) as caught:
        process.PROCESS.compile(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set n = namespace(v=[]) %}{% for i in range(9999) %}{% set n.v = [n.v] %}{% endfor %}{{ n.v | tojson }}",
        "{% set n = namespace(v=[]) %}{% for i in range(9999) %}{% set n.v = [n.v] %}{% endfor %}"
        "{{ raise_exception(n.v) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a' * 2 ** 24 + 'b' }}",  # a rendered text longer than any prompt
    ],
)
def test_what_python_itself_refuses_is_a_failure(source: str) -> None:
    with pytest.raises(TemplateFailureError) as caught:
        process.PROCESS.render(source, {})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_texts_of_all_kinds_arrive_as_they_are() -> None:
    for text in ("", "é \u2028 \x00 \x1b[0m 🙂", "\ud800 alone", "a" * 2**20):
        assert process.PROCESS.render("{{ x }}", {"x": text}) == text


def test_of_values_that_are_no_json_a_template_sees_the_type() -> None:
    assert process.PROCESS.render("{{ x }}", {"x": Path("/secret")}) == "<PosixPath>"


def test_threads_get_their_own_answers() -> None:
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = process.PROCESS.render("{{ x }}", {"x": i})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}


def test_the_process_holds_jinja_and_nothing_of_ours() -> None:
    process.PROCESS.render("", {})
    assert process.PROCESS._child is not None
    if sys.platform == "linux":
        mapped = Path(f"/proc/{process.PROCESS._child.pid}/maps").read_text()
        assert "python" in mapped and "mlx" not in mapped and "numpy" not in mapped


def test_a_program_that_ends_takes_the_process_with_it() -> None:
    code = "from tqgguf.formats.templates.process import PROCESS\nPROCESS.render('', {}); print(PROCESS._child.pid)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(int(found.stdout), 0)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}", "found a mistake: Unexpected end of template"),
        ("{{ prompt }}", "drops the user's messages"),
        ("{{ 'a' | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ messages[0].content }}", None),
        ("{{ messages[0].content[0].text }}", None),
        ("{{ raise_exception('only with tools') }}", None),  # another conversation may please it
    ],
)
def test_what_is_wrong_with_a_template_is_known_without_a_model(source: str, problem: str | None) -> None:
    found = template_problem(source)
    assert (problem is None and found is None) or (found is not None and str(problem) in found)


def test_limits_are_errors_of_the_request() -> None:
    assert issubclass(TemplateLimitError, RequestError)
