"""A run without a prompt goes on with what its prompt cache holds, as llama-completion does: a text, or a chat."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.errors import RequestError
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.text.chat import CHATML, ChatTemplate
from tqgguf.text.conversation import Conversation

# As Llama 3's and Gemma's: what a role is called, how a turn begins and ends.
LLAMA3 = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{{- m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' }}
{{- ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


class Stdin(io.TextIOWrapper):
    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode()))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    model = write_tiny(tmp_path / "m.gguf", TinyModel())

    def call(*flags: str, stdin: str = "", status: int = 0, err: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        argv = ["run", "-m", str(model), "--temp", "0", "--prompt-cache", str(tmp_path / "f.gguf"), *flags]
        assert main(argv) == status
        out, told = capsys.readouterr()
        assert err in told
        return out if not status else told

    return call


def tokens_of(tmp_path: Path) -> list[int]:
    return open_snapshot(tmp_path / "f.gguf").tokens.tolist()


def test_a_text_goes_on_as_if_it_had_never_ended(run: Any, tmp_path: Path) -> None:
    run("-p", "The stone", "-n", "40", "--prompt-cache-all", "-no-cnv", "--ignore-eos")
    whole = tokens_of(tmp_path)
    (tmp_path / "f.gguf").unlink()
    run("-p", "The stone", "-n", "10", "--prompt-cache-all", "-no-cnv", "--ignore-eos")
    first = tokens_of(tmp_path)
    run("-n", "20", "--prompt-cache-all", "--ignore-eos")
    longer = tokens_of(tmp_path)
    assert [len(whole) - len(tokens) for tokens in (first, longer)] == [30, 10]  # none is lost, none is there twice
    assert longer == whole[: len(longer)]


def test_only_what_is_generated_is_printed(run: Any) -> None:
    run("-p", "The stone", "-n", "4", "--prompt-cache-all", "-no-cnv", "--ignore-eos")
    assert "The stone" not in run("-n", "4", "--ignore-eos")


def test_without_anything_to_go_on_with_a_prompt_is_asked_for(run: Any) -> None:
    assert "expected a prompt, found none" in run("-n", "4", status=2)
    assert "expected a text to continue, found none" in run("-n", "4", "-no-cnv", status=2)


def test_a_chat_goes_on_from_its_file(run: Any, tmp_path: Path) -> None:
    chat = ("-cnv", "--prompt-cache-all", "-n", "8", "--chat-template", CHATML)
    run(*chat, stdin="first\n")
    first = tokens_of(tmp_path)
    run(*chat, stdin="second\n")
    second = tokens_of(tmp_path)
    assert second[: len(first)] == first and len(second) > len(first) + 8


def begun(tokenizer: Any, template: ChatTemplate) -> tuple[Conversation, list[int]]:
    """A conversation with one answer, and the tokens that a session then holds."""
    whole = Conversation(template, tokenizer)
    held = whole.add("What is a heron?") + tokenizer.encode("A grey bird.", add_special=False)
    whole.answered("A grey bird.")
    return whole, held


@pytest.mark.parametrize("ended", [True, False])
def test_going_on_makes_the_tokens_of_the_whole_conversation(smollm2: Any, ended: bool) -> None:
    tokenizer, template = smollm2.tokenizer, ChatTemplate(CHATML)
    whole, held = begun(tokenizer, template)
    going_on = Conversation(template, tokenizer, held=[*held, tokenizer.eos_id] if ended else held)
    assert going_on.add("And an otter?") == whole.add("And an otter?")
    for conversation in (whole, going_on):
        conversation.answered("A brown one.")
    assert going_on.add("Thanks") == whole.add("Thanks")


@pytest.mark.parametrize("source", [LLAMA3, GEMMA])
def test_going_on_makes_the_text_of_the_whole_conversation(smollm2: Any, source: str) -> None:
    tokenizer, template = smollm2.tokenizer, ChatTemplate(source)
    whole, held = begun(tokenizer, template)
    going_on = Conversation(template, tokenizer, held=held)
    assert tokenizer.decode(going_on.add("And an otter?")) == tokenizer.decode(whole.add("And an otter?"))


def test_a_template_that_hides_earlier_answers_is_refused_before_the_chat(run: Any) -> None:
    run("-p", "first", "-n", "4", "-no-cnv")
    err = run("-cnv", "--chat-template", "{{ messages[-1].content }}", stdin="second\n", status=2)
    assert err.startswith("tqgguf: error: the chat template does not show earlier answers")


def test_a_system_prompt_that_comes_too_late_is_told(run: Any) -> None:
    run("-p", "first", "-n", "4", "-no-cnv")
    run("-n", "4", "-sys", "Be brief.", stdin="", err="the system prompt has no effect: the text has begun")


def test_a_template_that_hides_earlier_answers_is_refused(smollm2: Any) -> None:
    template = ChatTemplate("{{ messages[-1].content }}", "", "")
    with pytest.raises(RequestError, match="no chat can go on"):
        Conversation(template, smollm2.tokenizer, held=[1, 2, 3]).add("x")


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ prompt }}", "{{ raise_exception('no') }}"])
def test_a_template_that_can_hold_no_chat_is_refused_before_the_first_turn(run: Any, template: str) -> None:
    err = run("-cnv", "--chat-template", template, stdin="first\n", status=2)
    assert err.startswith("tqgguf: error: chat template: ") and err.count("\n") == 1


def test_a_template_that_is_not_used_is_not_looked_at(run: Any) -> None:
    run("-p", "first", "-n", "1", "-no-cnv", "--chat-template", "{% for m in messages %}")
