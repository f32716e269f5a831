"""What is said to people and to programs: one line, not endless, with nothing in it that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import TinyModel, write_tiny

import tqgguf.cli
from tqgguf.cli.json_text import json_text
from tqgguf.cli.main import main
from tqgguf.cli.unexpected import unexpected
from tqgguf.formats.errors import MAX_MESSAGE, FormatError, RequestError, TqggufError, one_line, words_of
from tqgguf.formats.json_file import read_json

HARMLESS = 'é 日本 🙂 <b> \\ "'
OBEYED = [
    "\x1b[31m", "\x7f", "\x85", "\x9b31m", "\u200f", "\u202e", "\u2066", "\u2028", "\ufeff", "\u00ad", "\ud800",
    "\U000e0001",
]  # fmt: skip


@pytest.mark.parametrize("text", OBEYED)
@pytest.mark.parametrize("indent", [None, 1])
def test_json_holds_nothing_that_a_terminal_obeys_and_loses_nothing(text: str, indent: int | None) -> None:
    value = {text: [HARMLESS + text, 1, None], "z": text * 2}
    written = json_text(value, indent)
    assert written.replace("\n", "").isprintable() and HARMLESS[:8] in written
    assert json.loads(written) == value


def test_every_verb_writes_json_by_the_one_function() -> None:
    folder = Path(tqgguf.cli.__file__).parent
    users = {path.name for path in folder.glob("*.py") if "json.dump" in path.read_text(encoding="utf-8")}
    assert users == {"json_text.py"}


@pytest.mark.parametrize("argv", [["inspect", "--json"], ["validate", "--json"]])
def test_a_models_name_cannot_turn_the_terminal_around_in_json(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny(tmp_path / "a\u202eb.gguf", TinyModel(), metadata={"general.name": "x\u009b31m\u202ey"})
    main([argv[0], str(model), *argv[1:]])
    out = capsys.readouterr().out
    assert json.loads(out) is not None and out.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("as  it is", "as  it is"),  # a file's name may have two blanks
        ("a\n  b\r\n\n\tc\n", "a b c"),
        ("a\x0bb\x85c\u2028d", "a b c d"),
        ("", ""),
    ],
)
def test_a_message_is_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert str(TqggufError(text)) == str(RequestError(text)) == line


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = str(FormatError("m.gguf: expected " + "a\n" * 10**7 + "; do this", offset=7))
    assert len(text) <= MAX_MESSAGE
    assert text.startswith("m.gguf: expected a a") and text.endswith("a ; do this (at byte 7)")


@pytest.mark.parametrize("length", [10, 300, 301, 10**6])
def test_a_librarys_words_are_bounded(length: int) -> None:
    assert len(words_of(ValueError("x" * length))) == min(length, 300)
    assert len(unexpected(ValueError("x\n" * length))) < 400


def test_what_the_json_library_says_of_a_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": ' + "[" * 200_000)
    with pytest.raises(FormatError) as caught:
        read_json(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_wrong_argument_of_a_megabyte_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "x\n" * 10**6]) != 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < MAX_MESSAGE + 100


def test_a_template_with_megabytes_to_say_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ raise_exception('no\n' * 5000000) }}"
    model = write_tiny(tmp_path / "m.gguf", TinyModel(), metadata={"tokenizer.chat_template": template})
    assert main(["run", "-m", str(model), "-p", "x", "-n", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tqgguf: error: chat template: cannot render this conversation: no no no")
    assert err.count("\n") == 1 and len(err) < 1000
