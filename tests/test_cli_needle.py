"""`tqgguf eval --needle` as its users meet it: tables, JSON, Ctrl-C, and what it refuses before loading."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from induction_model import write_induction
from tiny_models import TinyModel, write_tiny

from tqgguf.cli import main as program
from tqgguf.cli import needle_command
from tqgguf.cli.eval_request import EvalRequest
from tqgguf.cli.main import main
from tqgguf.measuring.evaluation import needle

SENTENCE = "The cat sat on a mat and then went to bed for another day in town. "


@pytest.fixture(autouse=True)
def no_llama_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It finds every needle from balanced blocks, and few from plain ones."""
    return str(write_induction(tmp_path_factory.mktemp("needle") / "m.gguf", 800.0))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SENTENCE * 100)
    return str(path)


def tqgguf(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of one call in this process."""
    status = main(["eval", "--needle", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_table_for_each_length_says_which_depths_were_found(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "2048", "--needle-depths", "20,60", "--cache-types", "turbo4/turbo3")
    status, out, err = tqgguf(capsys, *argv)
    tables = [[line.split() for line in table.splitlines()] for table in out.split("\n\n")]
    assert status == 0 and len(tables) == 3
    for length, table in zip(("512", "1,024", "2,048"), tables, strict=True):
        assert table == [
            [length, "tokens", "20%", "60%", "found"],
            ["f16/f16", "yes", "yes", "2", "of", "2"],
            ["turbo4/turbo3", "yes", "yes", "2", "of", "2"],
        ]
    assert re.search(r"needle 6 of 6: \d+ s\n$", err)


def test_json_holds_every_answer_and_how_its_keys_were_read(capsys: Any, model: str, text: str) -> None:
    types = "turbo4,turbo4@plain"
    argv = ("-m", model, "-f", text, "--needle-lengths", "2000", "--needle-depths", "10", "--cache-types", types)
    found = json.loads(tqgguf(capsys, *argv, "--json")[1])
    assert (found["seed"], found["interrupted"], found["model"]["name"]) == (1, False, "induction")
    (cell,) = found["needles"]
    assert (cell["length"], cell["depth"]) == (2000, 10) and 1900 < cell["prompt_tokens"] < 2000
    f16, balanced, plain = cell["answers"]
    assert [answer["label"] for answer in cell["answers"]] == ["f16/f16", "turbo4/turbo4", "turbo4/turbo4@plain"]
    assert [answer["found"] for answer in cell["answers"]] == [True, True, False]
    assert f16["text"] == balanced["text"] == f" {cell['number']}" and cell["number"] not in plain["text"]
    assert f16["reads"]["keys_from_blocks"] == 0 < balanced["reads"]["keys_from_blocks"]
    other = json.loads(tqgguf(capsys, *argv[:-2], "--cache-types", "turbo4", "--json", "-s", "7")[1])
    assert other["needles"][0]["number"] != cell["number"]


def test_default_lengths_without_room_for_a_needle_are_left_out(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "512", "--needle-depths", "50", "--cache-types", "turbo4", "--json")
    status, out, err = tqgguf(capsys, *argv)
    assert status == 0, err
    assert [cell["length"] for cell in json.loads(out)["needles"]] == [256, 512]
    assert re.search(r"lengths of 128 tokens are left out: a needle needs 1\d\d\n", err)


def test_cells_where_f16_fails_say_so(capsys: Any, tmp_path: Path, text: str) -> None:
    tiny = str(write_tiny(tmp_path / "m.gguf", TinyModel(n_layers=1)))
    argv = ("-m", tiny, "-f", text, "--needle-lengths", "600", "--needle-depths", "50", "--cache-types", "turbo4")
    status, out, _ = tqgguf(capsys, *argv)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert lines[1:3] == [["f16/f16", "no", "0", "of", "1"], ["turbo4/turbo4", "-", "0", "of", "0"]]
    assert out.endswith("-: f16 fails, so nothing can be said of others\n")
    found = json.loads(tqgguf(capsys, *argv, "--json")[1])
    assert [(a["found"], a["reads"] is None) for a in found["needles"][0]["answers"]] == [(False, False), (None, True)]


def test_default_types_that_do_not_answer_as_run_does_are_left_out(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "--needle-lengths", "400", "--needle-depths", "0", "--json")
    _, out, err = tqgguf(capsys, *argv)
    labels = [answer["label"] for answer in json.loads(out)["needles"][0]["answers"]]
    assert "turbo4/turbo3" in labels and "mlx-q4" not in labels
    assert "mlx-q4 is left out: only caches of ours answer as run does" in err


def test_ctrl_c_prints_the_finished_cells_and_ends_with_130(model: str, text: str) -> None:
    depths = ",".join(map(str, range(0, 100)))
    argv = [sys.executable, "-m", "tqgguf.cli.main", "eval", "--needle", "-m", model, "-f", text, "--needle-lengths"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    with subprocess.Popen(
        [*argv, "400", "--needle-depths", depths, "--cache-types", "turbo4"],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as run:  # fmt: skip
        for line in run.stderr:  # type: ignore[union-attr]
            if "needle 2 of 100" in line:
                run.send_signal(signal.SIGINT)
                break
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    asked = re.search(r"tqgguf: interrupted: (\d+) of 100 needles were asked for\n$", err)
    assert asked and 2 <= int(asked[1]) < 100
    head, f16, turbo = out.splitlines()[:3]
    assert len(head.split()) == int(asked[1]) + 3 and f16.startswith("f16/f16") and turbo.startswith("turbo4/turbo4")


def test_ctrl_c_during_the_last_answer_is_not_lost(
    capsys: Any, model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[needle.Generation] = []

    class Interrupted(needle.Generation):
        def pieces(self, logits: Any) -> Iterator[str]:
            answers.append(self)
            if len(answers) == 2:  # f16's comes first
                signal.raise_signal(signal.SIGINT)
            return super().pieces(logits)

    argv = ("-m", model, "-f", text, "--needle-lengths", "400", "--needle-depths", "0", "--cache-types", "turbo4")
    monkeypatch.setattr(needle, "Generation", Interrupted)
    status, out, err = tqgguf(capsys, *argv)
    assert status == 130 and "f16/f16" in out
    assert err.endswith("tqgguf: interrupted: 1 of 1 needles were asked for\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--needle-depths 0,101", "--needle-depths: expected numbers from 0 to 100 with commas between, found '0,101'"),
        ("--needle-depths half", "--needle-depths: expected numbers from 0 to 100"),
        ("--needle-lengths 0", "--needle-lengths: expected numbers from 1 to 2,147,483,647"),
        (f"--needle-lengths {'9' * 5000}", "--needle-lengths: expected numbers from 1 to 2,147,483,647"),
        ("-c 1024 --needle-lengths 1025", "--needle-lengths: expected at most -c, 1,024 tokens, found 1,025"),
        ("--needle-lengths 100", "--needle-lengths: expected 1"),
        ("--no-tail", "--no-tail: has no meaning with --needle, which asks as run does; leave one out"),
        ("--like-llama", "--like-llama: has no meaning with --needle"),
        ("--cache-types mlx-q4", "--cache-types mlx-q4: only caches of ours answer as run does; leave it out"),
        ("--cache-types sim:kivi4", "--cache-types sim:kivi4: only caches of ours answer as run does"),
        ("-c 8192", "text.txt has 4,000 tokens: expected at least 8,0"),
        ("-c 64", "-c: expected 1"),
    ],
)
def test_a_bad_request_is_one_line(capsys: Any, model: str, text: str, argv: str, message: str) -> None:
    status, out, err = tqgguf(capsys, "-m", model, "-f", text, *argv.split())
    assert (status, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("tqgguf: error: ")]
    assert message in line


def test_every_option_reaches_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[EvalRequest] = []
    monkeypatch.setattr(needle_command, "find_needles", lambda request: requests.append(request) or 0)
    assert program.main(["eval", "--needle", "--needle-lengths", "500,900", "--needle-depths", "3,4", "-s", "9"]) == 0
    assert requests[0] == EvalRequest(
        needle=True, needle_lengths="500,900", needle_depths="3,4", seed=9, given=requests[0].given
    )
    assert requests[0].depths == [3, 4] and requests[0].needle_lengths_of(1000) == [500, 900]
    assert EvalRequest().needle_lengths_of(1000) == [250, 500, 1000]
