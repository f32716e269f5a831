"""A run that Ctrl-C or SIGTERM ends at any moment, gone on with from its prompt cache, gives the uninterrupted text."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.carriers.table import Foreign, open_carrier, write_carrier
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.outline import outline_of_gguf
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.runtime.generation.session import Session
from tqgguf.text.byte_stream import ByteStream
from tqgguf.text.text_stream import TextStream

N = 24
PROMPT = "the stone heron on the water by the boat "
TURBO = ("-ctk", "turbo4", "-ctv", "turbo3")


class Runs:
    """Calls of the program whose k-th evaluation is interrupted."""

    def __init__(self, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.cache = write_tiny(folder / "m.gguf", TinyModel()), folder / "f.gguf"
        self.capsys, self.monkeypatch, self.err = capsys, monkeypatch, ""

    def __call__(self, *flags: str, status: int = 0, stdin: str = "", cached: bool = True) -> str:
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        kept = ("--prompt-cache", str(self.cache), "--prompt-cache-all") if cached else ()
        argv = ["run", "-m", str(self.model), "--temp", "0", "--ignore-eos", "-ub", "128", *kept, *flags]
        assert main(argv) == status, self.capsys.readouterr().err
        out, self.err = self.capsys.readouterr()
        assert out.endswith("\n")
        return out[:-1]

    def interrupted(self, at: int, call: Callable[[], str], *numbers: int) -> str:
        """Signals arrive while the evaluation number `at` (from 0) is under way."""
        evaluate, calls = Session._evaluate, []

        def evaluated(session: Session, ids: list[int], want_logits: bool) -> Any:
            calls.append(ids)
            if len(calls) == at + 1:
                for number in numbers:
                    signal.raise_signal(number)
            return evaluate(session, ids, want_logits)

        with self.monkeypatch.context() as patch:
            patch.setattr(Session, "_evaluate", evaluated)
            return call()


@pytest.fixture
def runs(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, capsys, monkeypatch)


def prompt_of(runs: Runs, n_tokens: int) -> str:
    """A prompt of about so many tokens."""
    tokenizer = open_tokenizer(runs.model)
    text = PROMPT
    while len(tokenizer.encode(text)) < n_tokens:
        text += "w"
    return text


def open_tokenizer(model: Path) -> Any:
    from tqgguf.runtime.models.load import open_model

    return open_model(model).tokenizer


def goes_on(runs: Runs, first: str, n_prompt: int, *flags: str) -> str:
    """What was printed before, and what a run without a prompt prints, up to N tokens in all."""
    n_generated = max(0, len(open_snapshot(runs.cache).tokens) - n_prompt)
    return first + runs("-n", str(N - n_generated), "-no-cnv", *flags)


@pytest.mark.parametrize("flags", [(), TURBO], ids=["f16", "turbo"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_text_goes_on_as_if_it_had_never_been_interrupted(
    runs: Runs, flags: tuple[str, ...], number: int, status: int
) -> None:
    prompt = prompt_of(runs, 248)  # two pieces; the answer crosses the edge of a page
    n_prompt = len(open_tokenizer(runs.model).encode(prompt))
    ask = ("-p", prompt, "-n", str(N), "-no-cnv", "--no-display-prompt", *flags)
    whole = runs(*ask, cached=False)
    for at in range(0, N + 1, 1 if number == signal.SIGINT else 6):
        runs.cache.unlink(missing_ok=True)
        first = runs.interrupted(at, lambda: runs(*ask, status=status), number)
        assert goes_on(runs, first, n_prompt) == whole, at


def test_an_impatient_second_ctrl_c_loses_nothing_while_tokens_are_generated(runs: Runs) -> None:
    ask = ("-p", PROMPT, "-n", str(N), "-no-cnv", "--no-display-prompt")
    whole, n_prompt = runs(*ask, cached=False), len(open_tokenizer(runs.model).encode(PROMPT))
    first = runs.interrupted(5, lambda: runs(*ask, status=130), signal.SIGINT, signal.SIGINT)
    assert goes_on(runs, first, n_prompt) == whole


def test_a_text_in_several_pieces_is_the_whole_text_whatever_ended_them(runs: Runs) -> None:
    """Tokens of this model are often parts of characters."""
    ask = ("-no-cnv", "--no-display-prompt")
    whole = runs("-p", PROMPT, "-n", "60", *ask, cached=False)
    assert "\ufffd" in whole
    text = runs("-p", PROMPT, "-n", "1", *ask)
    for _ in range(59):
        text += runs("-n", "1", *ask)
    assert text == whole


def test_an_answer_that_filled_the_context_goes_on_in_a_larger_one(runs: Runs) -> None:
    n_prompt = len(open_tokenizer(runs.model).encode(PROMPT))
    ask = ("-p", PROMPT, "-n", str(N), "-no-cnv", "--no-display-prompt")
    whole = runs(*ask, "-c", "256", cached=False)
    first = runs(*ask, "-c", str(n_prompt + 8))
    assert "the context of" in runs.err and "raise -c (the model takes up to" in runs.err
    assert goes_on(runs, first, n_prompt, "-c", "256") == whole


def test_a_llama_cpp_session_has_rows_of_every_token_that_it_names(runs: Runs) -> None:
    n_prompt = len(open_tokenizer(runs.model).encode(PROMPT))
    ask = ("-p", PROMPT, "-n", str(N), "-no-cnv", "--no-display-prompt")
    whole = runs(*ask, cached=False)
    runs("-p", PROMPT[:20], "-n", "1", "-no-cnv")
    write_carrier(str(runs.cache), open_snapshot(runs.cache), FileKind.SESSION)
    first = runs.interrupted(6, lambda: runs(*ask, status=130), signal.SIGINT)
    with open_gguf(runs.model) as file:
        held = open_carrier(str(runs.cache), Foreign(outline_of_gguf(file)))
    assert held.n_cells == len(held.tokens)
    assert first + runs("-n", str(N - (len(held.tokens) - n_prompt)), "-no-cnv") == whole


def test_a_chat_goes_on_with_all_that_was_shown(runs: Runs) -> None:
    begins = ("-cnv", "-n", str(N), "-c", "1024")
    shown = runs.interrupted(7, lambda: runs(*begins, stdin="first\n"), signal.SIGINT)
    tokenizer = open_tokenizer(runs.model)
    held = open_snapshot(runs.cache).tokens.tolist()
    text = tokenizer.decode(held)
    assert text.rstrip("\ufffd").endswith(shown.rstrip("\n").rstrip("\ufffd"))
    assert "interrupted" in runs.err
    runs(*begins, stdin="second\n")
    assert open_snapshot(runs.cache).tokens.tolist()[: len(held)] == held


class Bytes:
    """A tokenizer whose ids are bytes."""

    def is_special(self, token_id: int) -> bool:
        return token_id > 255

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def stream_decoder(self, context: Sequence[int] = (), *, show_special: bool = False) -> ByteStream:
        return ByteStream(self.token_bytes, self.is_special)


@pytest.mark.parametrize("cut", range(len("aé👍 END of".encode()) + 1))
def test_a_stream_that_is_taken_up_shows_what_the_one_before_held_back(cut: int) -> None:
    data = list("aé👍 END of".encode())
    for stop in ((), ("END",)):
        whole, first, second = (TextStream(Bytes(), stop) for _ in range(3))  # type: ignore[arg-type]
        expected = "".join(map(whole.push, data))
        shown = "".join(map(first.push, data[:cut]))
        if not first.stopped:
            second.take_up([300, *data[:cut]], cut)
            shown += "".join(map(second.push, data[cut:]))
        assert shown == expected


def test_a_prompt_is_no_beginning_of_a_stop_string() -> None:
    stream = TextStream(Bytes(), ("END",))  # type: ignore[arg-type]
    stream.take_up(list(b"to the E"), 0)
    assert stream.push(ord("N")) + stream.push(ord("D")) == "ND"
