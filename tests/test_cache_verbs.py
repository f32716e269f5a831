"""`tqgguf cache save`, `restore` and `info`, and the functions for programs of mlx-lm's kind."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from tiny_folders import write_folder
from tiny_models import TinyModel, write_tiny

import tqgguf
from tqgguf.cli.main import main
from tqgguf.formats.errors import FormatError, RequestError, TqggufError
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.runtime.models.load import load_model

DOCUMENT = "\n".join(
    f"The {beast} lives by the {place}." for beast in ("heron", "otter") for place in ("weir", "reeds") * 9
)
TURBO = ("-ctk", "turbo4", "-ctv", "turbo3")


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["cache", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_question_about_a_kept_document_is_answered_in_the_chat_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    handbook = (Path(__file__).parent.parent / "examples/weather-hut.txt").read_text()
    story = handbook.partition("\n\nThe stove and")[0]
    question = "Question: Where does the key of the hut hang? Answer with one sentence."
    text, cache = tmp_path / "text.txt", tmp_path / "cache.gguf"
    text.write_text(story)
    status, out, err = call(capsys, "save", str(cache), "-f", str(text), "-ub", "128", *TURBO)
    assert (status, out) == (0, f"{cache}\n")
    assert "tokens/s; kept in the prompt cache" in err and "answer" not in err
    before = cache.read_bytes()
    asked = ("--temp", "0", "-n", "30", "-ub", "128")
    status, out, err = call(capsys, "restore", str(cache), "-p", question, *asked)
    assert status == 0
    assert "woodshed" in out
    assert ", 128 more from the prompt cache" in err
    assert cache.read_bytes() == before
    whole = main(["run", "-p", f"{story}\n\n{question}", *asked, *TURBO])
    assert (whole, capsys.readouterr().out) == (0, out)


@pytest.mark.parametrize(
    ("head_dim", "flags", "kept"),
    [(64, (), "turbo4"), (32, (), "q8_0"), (64, ("--cache-preset", "small"), "turbo3"), (64, ("-ctv", "f16"), "f16")],
)
def test_a_document_is_kept_compressed_unless_other_types_are_named(
    head_dim: int, flags: tuple[str, ...], kept: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=head_dim)), tmp_path / "cache.gguf"
    status, _, err = call(capsys, "save", str(cache), "-m", str(model), "-p", DOCUMENT[:900], *flags)
    assert status == 0
    assert (f"the document is kept in {kept}/{kept};" in err) == (not flags)
    assert call(capsys, "info", str(cache))[1].count(kept) >= 1


def test_an_older_file_of_that_name_is_replaced_with_a_word(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", TinyModel()), tmp_path / "cache.gguf"
    told = f"tqgguf: {cache}: the older prompt cache of that name is replaced\n"
    cache.write_bytes(b"")  # as a shell's redirection leaves it
    for is_told in (False, True):
        status, _, err = call(capsys, "save", str(cache), "-m", str(model), "-p", DOCUMENT[:300])
        assert (status, told in err) == (0, is_told)


def test_without_a_template_the_text_goes_on_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", TinyModel(with_chat_template=False)), tmp_path / "cache.gguf"
    flags = ("-m", str(model))
    assert call(capsys, "save", "-o", str(cache), "-p", DOCUMENT[:900], *flags, "-ctk", "f16")[0] == 0
    _, asked, _ = call(capsys, "restore", str(cache), *flags, "-p", "and?", "--temp", "0", "-n", "8")
    main(["run", *flags, "-p", f"{DOCUMENT[:900]}\n\nand?", "--temp", "0", "-n", "8", "--no-display-prompt"])
    assert capsys.readouterr().out == asked


def test_a_document_that_was_kept_without_a_template_is_asked_without_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", TinyModel()), tmp_path / "cache.gguf"
    call(capsys, "save", str(cache), "-m", str(model), "-no-cnv", "-p", "plain text")
    n = len(open_snapshot(cache).tokens)
    _, _, err = call(capsys, "restore", str(cache), "-m", str(model), "-p", "and?", "-n", "0", "--json")
    tokens = load_model(model).tokenizer.encode("\n\nand?")
    assert f"prompt: {n + len(tokens)} tokens" in err


IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("saved", "asked", "told"),
    [
        ((), (), ""),
        (("-sys", "Be brief."), (), ""),
        (("--chat-template", IM), ("--chat-template", IM), ""),
        ((), ("--chat-template", "[INST]{{ messages[-1].content }}[/INST]"), "was kept without this chat template"),
        (("--chat-template", "[INST]{{ messages[-1].content }}[/INST]"), (), "was kept without this chat template"),
        ((), ("--chat-template", "{{ messages[-1].content }}[/INST]"), "in the model's own chat template"),
        ((), ("-no-cnv",), "in the model's own chat template"),
        (("-no-cnv",), (), "was kept without this chat template"),
    ],
)
def test_a_question_in_another_template_than_the_documents_is_noticed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, saved: tuple[str, ...], asked: tuple[str, ...], told: str
) -> None:
    cache, model = str(tmp_path / "cache.gguf"), ("-m", str(write_tiny(tmp_path / "m.gguf", TinyModel())))
    if IM in saved:
        model = ()  # the default model's own template begins otherwise: with a system prompt
    assert call(capsys, "save", cache, *model, "-p", "The heron is grey.", *saved)[0] == 0
    status, _, err = call(capsys, "restore", cache, *model, "-p", "Is it?", "-n", "1", "-q", *asked)
    assert status == 0
    assert told in err if told else err == ""


def test_a_document_kept_with_a_system_prompt_is_asked_in_its_turn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cache, brief = str(tmp_path / "cache.gguf"), ("-sys", "Answer in one word.")
    call(capsys, "save", cache, "-p", "The heron is grey.", *brief)
    _, out, _ = call(capsys, "restore", cache, "-p", "Which colour has it?", "-n", "8", "--temp", "0")
    main(["run", "-p", "The heron is grey.\n\nWhich colour has it?", "-n", "8", "--temp", "0", *brief])
    assert capsys.readouterr().out == out


def test_questions_on_stdin_are_each_about_the_document_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = str(write_tiny(tmp_path / "m.gguf", TinyModel())), str(tmp_path / "cache.gguf")
    asked = ("-m", model, "--temp", "0", "-n", "8", "-q")
    call(capsys, "save", cache, "-m", model, "-p", DOCUMENT)
    single = [call(capsys, "restore", cache, "-p", text, *asked)[1] for text in ("Where is it?", "Who?")]
    too_long = "word " * 9000
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"Where is it?\n{too_long}\nWho?\n".encode())))
    status, out, err = call(capsys, "restore", cache, "-cnv", *asked)
    assert out == "".join(single)
    assert status == 2 and "the message was not sent" in err and "send a shorter message" in err


def test_a_document_is_asked_for_on_a_terminal_too(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    status, _, err = call(capsys, "save", "x.gguf")
    assert (status, "expected a prompt, found none" in err) == (2, True)


def test_info_tells_what_the_file_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", TinyModel()), tmp_path / "cache.gguf"
    call(capsys, "save", str(cache), "-m", str(model), "-p", DOCUMENT, *TURBO)
    status, out, _ = call(capsys, "info", str(cache), "--json")
    about = json.loads(out)["about"]
    assert (status, about["n_layers"], about["balance"]) == (0, 2, {"full": 2})
    assert sum(about["parts"].values()) + 4 * about["n_tokens"] == about["n_bytes"]
    status, _, err = call(capsys, "info", str(model))
    assert (status, "expected a prompt cache, found a file of kind model" in err) == (2, True)


def test_nothing_but_a_prompt_cache_is_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, text = write_tiny(tmp_path / "m.gguf", TinyModel()), tmp_path / "text.txt"
    text.write_text(DOCUMENT)
    for path in (model, text):
        before = path.read_bytes()
        status, _, err = call(capsys, "save", str(path), "-m", str(model), "-f", str(text))
        assert status == 2
        assert f"{path}: exists and is no prompt cache, so it is not replaced" in err
        assert path.read_bytes() == before
    cache = str(tmp_path / "cache.gguf")
    for _ in range(2):
        assert call(capsys, "save", cache, "-m", str(model), "-f", str(text))[0] == 0


def test_a_document_that_cannot_be_kept_is_not_reported_as_answered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path / "m.gguf", TinyModel())

    def full(path: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    status, out, err = call(capsys, "save", str(tmp_path / "c.gguf"), "-m", str(model), "-p", DOCUMENT, *TURBO)
    assert (status, out) == (1, "")
    assert err == f"tqgguf: error: {tmp_path}/c.gguf: could not be written: No space left on device\n"


def test_a_document_is_kept_without_processing_escapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, text = write_tiny(tmp_path / "m.gguf", TinyModel(with_chat_template=False)), tmp_path / "text.c"
    text.write_text(r"puts(\"a\nb\");")
    cache = tmp_path / "cache.gguf"
    call(capsys, "save", str(cache), "-m", str(model), "-f", str(text))
    assert load_model(model).tokenizer.decode(open_snapshot(cache).tokens) == text.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("save",), "expected the name of a prompt cache first"),
        (("restore", "-p", "x"), "expected the name of a prompt cache first"),
        (("restore", "nowhere.gguf", "-p", "x"), "nowhere.gguf: expected a prompt cache to go on from, found none"),
        (("save", "no/such/folder.gguf", "-p", "x"), "does not exist; make it first"),
        (("save", "a.gguf", "-p", "x", "--temp", "1", "-st"), "`tqgguf cache save` does not take -st"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, *argv)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


PROMPT = mx.array([int(t) for t in np.random.default_rng(3).integers(0, 280, 300)])


def decoded(model: Any, prompt: mx.array, cache: list[Any], n: int) -> list[int]:
    return [int(token) for token, _ in generate_step(prompt, model, max_tokens=n, prompt_cache=cache)]


def test_a_program_of_mlx_lms_kind_saves_and_loads_caches(tmp_path: Path) -> None:
    loaded = load_model(write_tiny(tmp_path / "m.gguf", TinyModel()))
    path = tmp_path / "cache.gguf"
    cache = tqgguf.make_prompt_cache(loaded.model, "turbo4", "turbo3")
    loaded.model(PROMPT[None], cache=cache)
    tqgguf.save_prompt_cache(path, cache, tokens=PROMPT, model=loaded)
    again, tokens = tqgguf.load_prompt_cache(path, loaded, return_tokens=True)
    assert tokens == PROMPT.tolist()
    after = mx.array([5, 6, 7])
    assert decoded(loaded.model, after, again, 20) == decoded(loaded.model, after, cache, 20)
    assert tqgguf.open_snapshot(path).fingerprint == loaded.fingerprint


def test_a_plain_mlx_model_can_load_what_was_saved_without_tokens(tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "folder")).model
    cache = tqgguf.make_prompt_cache(model, "q8_0", "q4_0")
    model(PROMPT[None], cache=cache)
    tqgguf.save_prompt_cache(tmp_path / "c.gguf", cache)
    again, tokens = tqgguf.load_prompt_cache(tmp_path / "c.gguf", model, return_tokens=True)
    assert set(tokens) == {-1}
    after = mx.array([[5]])
    assert mx.array_equal(model(after, cache=again), model(after, cache=cache))


def test_what_no_file_can_hold_and_what_is_another_models_is_refused(tmp_path: Path) -> None:
    loaded = load_model(write_tiny(tmp_path / "m.gguf", TinyModel()))
    other = load_model(write_tiny(tmp_path / "o.gguf", TinyModel(seed=1)))
    path = tmp_path / "cache.gguf"
    cache = tqgguf.make_prompt_cache(loaded.model, "turbo4", "turbo3")
    loaded.model(PROMPT[None], cache=cache)
    with pytest.raises(RequestError, match="tokens: expected the 300 that the cache holds, found 3"):
        tqgguf.save_prompt_cache(path, cache, tokens=[1, 2, 3])
    with pytest.raises(RequestError, match=r"expected caches of tqgguf\.make_prompt_cache"):
        tqgguf.save_prompt_cache(path, [])
    assert not path.exists()
    tqgguf.save_prompt_cache(path, cache, model=loaded)
    with pytest.raises(RequestError, match="expected this model's weights, found others"):
        tqgguf.load_prompt_cache(path, other)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(FormatError, match="truncated"):
        tqgguf.load_prompt_cache(path, loaded)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """A model, and a cache of it that holds PROMPT."""
    loaded = load_model(write_tiny(tmp_path_factory.mktemp("made") / "m.gguf", TinyModel()))
    cache = tqgguf.make_prompt_cache(loaded.model, "turbo4", "turbo3")
    loaded.model(PROMPT[None], cache=cache)
    return loaded, cache


@pytest.mark.parametrize(
    "tokens", [[-5] * 300, [10**6] * 300, [2**40] * 300, [1.5] * 300, ["a"] * 300, [[1], [1, 2]], [True] * 300, {1, 2}]
)
def test_tokens_that_no_file_may_hold_are_refused(tokens: Any, made: Any, tmp_path: Path) -> None:
    loaded, cache = made
    with pytest.raises(TqggufError, match="token"):
        tqgguf.save_prompt_cache(tmp_path / "c.gguf", cache, tokens=tokens, model=loaded)
    assert os.listdir(tmp_path) == []


def test_a_cache_is_not_said_to_be_of_a_model_that_has_other_layers(made: Any, tmp_path: Path) -> None:
    loaded, cache = made
    wider = load_model(write_tiny(tmp_path / "w.gguf", TinyModel(n_kv_heads=4)))
    for caches, model, message in (
        (cache, wider, "KV heads: expected 4 as the model has, found 2"),
        (cache[:1], loaded, "layers: expected 2 as the model has, found 1"),
        (cache[::-1], None, "expected layers in order, each once, found 0 behind 1"),
        (cache, loaded.model, r"model: expected what tqgguf\.load_model gave, found Model"),
    ):
        with pytest.raises(TqggufError, match=message):
            tqgguf.save_prompt_cache(tmp_path / "c.gguf", caches, model=model)
    assert not (tmp_path / "c.gguf").exists()


def test_a_program_writes_over_nothing_but_prompt_caches_whatever_the_name_is_made_of(
    made: Any, tmp_path: Path
) -> None:
    loaded, cache = made
    (tmp_path / "text").write_text("not to be lost")
    with pytest.raises(RequestError, match="exists and is no prompt cache, so it is not replaced"):
        tqgguf.save_prompt_cache(tmp_path / "text", cache)
    name = os.fsencode(tmp_path / "c.gguf")
    for _ in range(2):
        tqgguf.save_prompt_cache(name, cache, tokens=PROMPT, model=loaded)  # type: ignore[arg-type]
    assert tqgguf.load_prompt_cache(name, loaded, return_tokens=True)[1] == PROMPT.tolist()  # type: ignore[arg-type]
