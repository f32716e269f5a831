"""Prompts that are longer than the context are refused, and huge ones before they are cut into tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folders import write_folder
from tiny_models import ORACLE_CASES, TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.runtime.models.load import embedded_model, open_model
from tqgguf.text.folder_tokenizer import load_folder_tokenizer

PIECES = (
    "word ",
    " ",
    "\n",
    "=",
    "é",
    "e\u0301",
    "漢字",
    "\x04",
    "\U0001f600",
    "<|im_start|>",
    "<s>",
    "\u1112\u1161\u11ab",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("models")
    paths = [write_tiny(folder / f"{i}.gguf", model) for i, model in enumerate(ORACLE_CASES.values())]
    found = [open_model(path).tokenizer for path in (embedded_model(), *paths)]
    return [*found, load_folder_tokenizer(write_folder(folder / "folder"))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 300)), max_size=5))
def test_no_text_has_fewer_tokens_than_it_is_said_to_have(tokenizers: list[Any], parts: list[tuple[str, int]]) -> None:
    text = "".join(piece * n for piece, n in parts)
    for tokenizer in tokenizers:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_a_long_text_is_known_to_be_long(tokenizers: list[Any]) -> None:
    for tokenizer in tokenizers:
        assert tokenizer.least_tokens("a word " * 100_000) > 2_000


def test_blanks_that_a_token_swallows_do_not_count(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyModel(), {"general.name": "Phi-3 mini"})
    tokenizer = open_model(path).tokenizer
    assert tokenizer.least_tokens(" " * 1_000_000) == 0


@pytest.mark.parametrize(
    "verb", [["run"], ["run", "-no-cnv"], ["cache", "save", "c.gguf"], ["cache", "restore", "c.gguf"]]
)
def test_a_text_of_megabytes_is_refused_before_it_is_cut(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "m.gguf", TinyModel())
    (tmp_path / "text").write_text("a word " * 2_000_000)
    assert main(["cache", "save", "c.gguf", "-m", "m.gguf", "-p", "one"]) == 0
    capsys.readouterr()
    assert main([*verb, "-m", "m.gguf", "-f", "text", "-c", "1024"]) == 2
    err = capsys.readouterr().err
    assert "the prompt has at least " in err and "expected at most 1024, the size of the context (-c)" in err
    assert err.count("\n") == 1
