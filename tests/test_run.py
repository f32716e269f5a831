"""`tqgguf run` as its users meet it: what stdout and stderr carry, how it ends, and what it refuses before loading."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyModel, write_tiny

from tqgguf import __version__
from tqgguf.cli import run_command
from tqgguf.cli.main import main
from tqgguf.formats.errors import TqggufError
from tqgguf.runtime.generation import prompt_cache
from tqgguf.runtime.models.load import embedded_model

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
COMMAND = [sys.executable, "-m", "tqgguf.cli.main"]


def tqgguf(capsys, *argv: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of one call in this process."""
    status = main(["run", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_stdout_carries_the_answer_alone_and_stderr_the_report(capsys) -> None:
    status, out, err = tqgguf(capsys, "-p", QUESTION, "--temp", "0", "-ctk", "turbo4", "-ctv", "turbo3")
    assert (status, out) == (0, ANSWER + "\n")
    assert re.search(r"prompt: 37 tokens, [\d.]+ tokens/s; answer: 7 tokens, [\d.]+ tokens/s; ended by the model", err)
    held = "K turbo4 balanced (scale from page 0), V turbo3, first 4 tokens exact; 44 tokens in 1.04 MB, as f16 1.01 MB"
    assert f"KV cache: {held}" in err
    assert "keys read from blocks: prompt 0.0% (0 of 21,090), answer 0.0% (0 of " in err
    assert "; the rest in f16, none by fallback" in err


def test_a_run_in_f16_reports_nothing_of_blocks_and_counts_what_n_asks_for(capsys) -> None:
    _, _, err = tqgguf(capsys, "-p", QUESTION, "-n", "5", "--temp", "0", "--ignore-eos")
    assert re.fullmatch(
        r"tqgguf: prompt: 37 tokens, [\d.]+ tokens/s; answer: 5 tokens, [\d.]+ tokens/s; ended by -n\n"
        r"tqgguf: KV cache: K f16, V f16; 41 tokens in [\d.]+ \w+\n",
        err,
    )


@pytest.mark.parametrize("flag", ["--no-perf", "-q", "--quiet"])
def test_the_report_can_be_turned_off_and_errors_stay(capsys, flag: str) -> None:
    argv = ("-p", QUESTION, "-n", "2", "--temp", "0", "-ctk", "turbo4", flag)
    assert tqgguf(capsys, *argv) == (0, "The capital\n", "")
    status, _, err = tqgguf(capsys, *argv, "-c", "20")
    assert status == 2 and err.startswith("tqgguf: error: the prompt has 37 tokens")
    notice = tqgguf(capsys, *argv, "--prio", "1")[2]
    assert (notice == "") is (flag != "--no-perf")


def test_bounds_for_a_gpu_are_told_to_have_no_effect_without_one(capsys) -> None:
    _, _, err = tqgguf(capsys, "-p", "Hi", "-n", "1", "--kv-workspace", "64", "--kv-kernel-rows", "4")
    assert "--kv-workspace: no effect here, MLX has no GPU" in err and "--kv-kernel-rows: no effect here" in err


def test_json_is_one_object_with_the_text_and_the_figures(capsys) -> None:
    status, out, _ = tqgguf(capsys, "-p", QUESTION, "--json", "-s", "7", "--temp", "0")
    result = json.loads(out)
    assert (status, result["text"], result["finish"], result["seed"]) == (0, ANSWER, "eog", 7)
    assert result["timing"]["prompt_tokens"] == 37
    assert result["kv_cache"]["type_k"] == result["kv_cache"]["type_v"] == "f16"
    assert result["timing"]["answer_tokens"] == 7
    assert result["model"]["architecture"] == "llama" and result["versions"]["tqgguf"] == __version__
    assert "null" not in out


@pytest.mark.parametrize(
    ("argv", "kind", "status"),
    [
        (["run", "-p", "x", "--json", "-m", "none.gguf"], "TqggufError", 1),
        (["run", "--json", "-p", "x", "-ctk", "turbo5"], "RequestError", 2),
        (["run", "--json", "-cnv"], "RequestError", 2),
        (["run", "-p", "x", "--json", "--nonsense"], "RequestError", 2),
        (["cache", "info", "none.gguf", "--json"], "TqggufError", 1),
        (["cache", "restore", "none.gguf", "-p", "x", "--json"], "RequestError", 2),
        (["inspect", "none.gguf", "--json"], "TqggufError", 1),
        (["plan", "-m", "none.gguf", "--json"], "TqggufError", 1),
        (["convert", "none.gguf", "x.gguf", "--json"], "TqggufError", 1),
        (["eval", "--json", "-m", "none.gguf"], "TqggufError", 1),
        (["doctor", "--json", "-m", "none.gguf"], "TqggufError", 1),
        (["bench", "--json", "-m", "none.gguf"], "TqggufError", 1),
        (["selftest", "--json", "--device", "abacus"], "RequestError", 2),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else str(part),
)
def test_json_says_on_stdout_why_a_verb_failed(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str], kind: str, status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == status
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_status"]) == (kind, status)
    assert f"tqgguf: error: {error['message']}\n" == err


def test_a_value_that_reads_json_asks_for_none(capsys) -> None:
    assert tqgguf(capsys, "-p", "--json", "-ctk", "turbo5")[:2] == (2, "")


def test_json_holds_the_answer_and_why_it_could_not_be_kept(capsys, monkeypatch, tmp_path: Path) -> None:
    def full(path: Any, snapshot: Any, kind: Any) -> None:
        raise TqggufError("no space left")

    monkeypatch.setattr(prompt_cache, "write_carrier", full)
    status, out, _ = tqgguf(
        capsys,
        "-p",
        QUESTION,
        "--json",
        "--temp",
        "0",
        "--prompt-cache",
        str(tmp_path / "f.gguf"),
        "--prompt-cache-all",
    )
    result = json.loads(out)
    assert (status, result["text"], result["error"]["message"]) == (1, ANSWER, "no space left")


@pytest.mark.parametrize("name", ["new/", "new/.", "new/.."])
def test_a_folders_name_is_no_file_to_write(capsys, tmp_path: Path, name: str) -> None:
    model, path = str(embedded_model()), str(tmp_path) + "/" + name
    for argv in (
        ["run", "-p", "x", "-n", "1", "--prompt-cache", path],
        ["cache", "save", path, "-p", "x"],
        ["calibrate", "-o", path],
        ["convert", model, path, "--to", "gguf"],
    ):
        assert main(argv) == 2
        assert "expected the name of a file to write, found a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_long_prompt_is_read_from_blocks(capsys, tmp_path: Path) -> None:
    model, prompt = write_tiny(tmp_path / "m.gguf", TinyModel()), tmp_path / "prompt.txt"
    prompt.write_text("What is this? " * 135)  # 1,350 tokens
    argv = ("-m", str(model), "-f", str(prompt), "--json", "-n", "4")
    status, out, _ = tqgguf(capsys, *argv, "-ctk", "turbo4", "-ctv", "turbo4", "--strict-kv")
    cache = json.loads(out)["kv_cache"]
    assert status == 0
    for phase, factor in (("prompt_reads", 6), ("answer_reads", 9)):
        assert cache[phase]["keys_from_blocks"] > factor * cache[phase]["keys_in_float"] > 0
    assert cache["by_fallback"] == 0
    assert cache["f16_bytes"] > 3 * cache["kv_bytes"]


def test_without_conversation_the_prompt_is_continued_and_shown(capsys) -> None:
    argv = ("-p", "The capital of France is", "-no-cnv", "--temp", "0", "-n", "2")
    assert tqgguf(capsys, *argv)[1] == "The capital of France is Paris.\n"
    assert tqgguf(capsys, *argv, "--no-display-prompt")[1] == " Paris.\n"


def test_a_reverse_prompt_ends_the_answer_and_is_not_shown(capsys) -> None:
    status, out, err = tqgguf(capsys, "-p", QUESTION, "--temp", "0", "-r", "France is Par")
    assert (status, out) == (0, "The capital of \n")
    assert "ended at a stop string" in err


def test_a_seed_of_minus_one_is_picked_and_reported_so_that_it_can_be_repeated(capsys) -> None:
    argv = ("-p", "Tell me about the sea.", "-n", "12", "--temp", "1.2")
    _, first, err = tqgguf(capsys, *argv)
    seed = re.search(r"seed: (\d+)", err)
    assert seed is not None
    assert tqgguf(capsys, *argv, "-s", seed[1])[1] == first


def test_a_full_context_ends_with_a_message(capsys) -> None:
    status, out, err = tqgguf(capsys, "-p", QUESTION, "-c", "40", "--temp", "0")
    assert (status, out) == (0, "The capital of France\n")
    assert "stopped: the context of 40 tokens is full; raise -c" in err


def test_chat_answers_until_the_input_ends_and_remembers(monkeypatch, capsys) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"My name is Bob. Say hello.\n\nWhat is the capital of France?\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, err = tqgguf(capsys, "-cnv", "--temp", "0", "-ctk", "turbo4", "-ctv", "turbo4")
    assert status == 0
    assert "Bob" in out.splitlines()[0]
    assert "Paris" in out.splitlines()[-1]
    evaluated = re.search(r"prompt: (\d+) tokens.*KV cache: .*; (\d+) tokens in", err, re.DOTALL)
    assert evaluated is not None
    assert int(evaluated[1]) < int(evaluated[2]) < 100  # the second turn evaluated only what was new


def test_a_prompt_comes_through_a_pipe(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(QUESTION.encode() + b"\n")))
    assert tqgguf(capsys, "--temp", "0")[:2] == (0, ANSWER + "\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-ctk", "turbo5"], "-ctk: unknown cache type 'turbo5', did you mean 'turbo4'? known: f32, f16"),
        (["-ctv", "turbo4", "-fa", "off"], "-ctv turbo4 with -fa off: a quantised V cache needs flash attention"),
        (["-c", "16384"], "-c 16384: the model was trained for 8192 tokens; expected at most that"),
        (["-c", "20"], "the prompt has 37 tokens: expected at most 20, the size of the context (-c)"),
        (["--temp", "nan"], "--temp: expected a number, found 'nan'"),
        (["--exact-prefix", "129"], "--cache-exact-first: expected a number from 0 to 128, found 129"),
        (["-l", "49152+1"], "--logit-bias: expected a token id below 49152, found 49152"),
        (["--rope-scale", "1e-38"], "RoPE frequency scale: expected 2.33e-10 to 4.29e+09, found 1"),
        (["--rope-freq-base", "1e-44"], "RoPE frequency base: expected 2.33e-10 to 1.84e+19, found 1e-44"),
        (["-f", os.devnull], f"-f {os.devnull}: expected a prompt, found an empty file"),
        (["--grammar", "root ::= x"], "constrained output is not supported yet"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_requests_get_one_line_and_exit_2_before_any_weight_is_read(capsys, argv: list[str], message: str) -> None:
    started = time.perf_counter()
    status, out, err = tqgguf(capsys, "-p", QUESTION, *argv)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("tqgguf: error: ") and message in err
    assert time.perf_counter() - started < 60  # nothing is generated


def test_a_missing_or_damaged_model_gets_one_line_and_exit_1(capsys, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with open(embedded_model(), "rb") as file:
        cut.write_bytes(file.read(1 << 20))
    for path, message in (
        (tmp_path / "none.gguf", "No such file"),
        (cut, "byte"),
        (Path(__file__), "expected a file that begins with"),
    ):
        status, out, err = tqgguf(capsys, "-p", QUESTION, "-m", str(path))
        assert (status, out) == (1, "")
        assert len(err.splitlines()) == 1 and str(path) in err and message in err


def test_ctrl_c_ends_cleanly_with_what_was_generated() -> None:
    argv = [*COMMAND, "run", "-p", "Count from 1 to 1000.", "--ignore-eos", "--temp", "0", "-s", "1"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).decode().endswith("\n")
    assert b"interrupted" in err and b"Traceback" not in err


def test_ctrl_c_after_the_last_piece_is_not_lost(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(run_command.Generation):
        def pieces(self, logits: Any) -> Iterator[str]:
            yield from super().pieces(logits)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_command, "Generation", Interrupted)
    status, out, err = tqgguf(capsys, "-p", "hi", "-n", "1", "--temp", "0")
    assert status == 130 and out.strip() and "interrupted" in err


def test_a_closed_pipe_is_quiet() -> None:
    argv = [*COMMAND, "run", "-p", "Count from 1 to 1000.", "--ignore-eos", "-n", "40"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in err and b"Exception" not in err
