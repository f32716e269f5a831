"""`tqgguf eval` as its users meet it: tables, JSON, the page, how it ends, and what it refuses before loading."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import write_folder
from tiny_models import TinyModel, write_tiny

from tqgguf.cli import eval_command, eval_table
from tqgguf.cli import main as program
from tqgguf.cli.eval_request import EvalRequest
from tqgguf.cli.main import main
from tqgguf.cli.measuring import OWN_TEXT

COMMAND = [sys.executable, "-m", "tqgguf.cli.main", "eval"]
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()


@pytest.fixture(autouse=True)
def no_llama_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = TinyModel(head_dim=128, n_layers=1, hidden_size=128, intermediate_size=128, seed=4)
    return str(write_tiny(tmp_path_factory.mktemp("eval") / "tiny.gguf", spec))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def tqgguf(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of one call in this process."""
    status = main(["eval", *argv])
    out, err = capsys.readouterr()
    return status, out, err


# What it prints


def test_stdout_carries_the_tables_and_stderr_the_rest(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "1536", "--chunks", "1", "--cache-types", "turbo4/turbo3,mlx-q4")
    status, out, err = tqgguf(capsys, *argv)
    head, f16, turbo, mlx, empty, by_position, *rest = out.splitlines()
    assert status == 0 and empty == ""
    assert head.split() == ["cache", "K/V", "bits", "perplexity", "ratio", "KLD", "median", "99%", "same", "top"]
    assert re.fullmatch(
        r"f16/f16 +16\.000 +[\d.]+ ± [\d.]+ +1\.0000 ± 0\.0000 +0\.0000 ± 0\.0000( +0\.0000){2} +100\.00%", f16
    )
    assert re.match(r"turbo4/turbo3 +3\.\d{3} +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+ +[\de.-]+ ± [\de.-]+ ", turbo)
    assert mlx.startswith("mlx-q4 ") and " 4.500 " in mlx
    assert by_position.split() == ["KLD", "by", "position", "0-1k", "1k-2k"]
    *ranges, empty, note = rest
    assert [line.split()[0] for line in ranges] == ["turbo4/turbo3", "mlx-q4"]
    assert (empty, note) == ("", "channel scale of K, where it is balanced in full: from page 0")
    assert f"model: {model}: llama 'tiny llama', 1 layers" in err
    assert f"text: {text}; 1 window of 1,536 tokens, 1,535 of them scored" in err
    assert re.search(r"window 1 of 1: \d+ s\n$", err)


def test_json_is_one_object_with_every_figure(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "256", "--chunks", "2", "--cache-types", "turbo4,q4_0", "--json")
    status, out, _ = tqgguf(capsys, *argv)
    found = json.loads(out)
    assert status == 0 and out.count("\n") == 1
    assert (found["n_ctx"], found["n_windows"], found["n_scored"], found["interrupted"]) == (256, 2, 510, False)
    assert found["model"]["file"] == "tiny.gguf" and found["model"]["bytes"] == os.path.getsize(model)
    assert {"tqgguf", "mlx", "mlx-lm", "numpy", "python"} <= set(found["versions"])
    f16, turbo, q4 = found["rows"]
    assert [row["label"] for row in found["rows"]] == ["f16/f16", "turbo4/turbo4", "q4_0/q4_0"]
    assert (f16["ratio"], f16["kld"], f16["same_top"]) == (1, 0, 1)
    assert turbo["kld"] > 0 and turbo["ratio"] == pytest.approx(turbo["perplexity"] / f16["perplexity"])
    assert (turbo["balance"], turbo["exact_first"], turbo["tail"]) == ("full", 4, True)
    assert (q4["balance"], q4["exact_first"]) == ("off", 0) and q4["bits_per_value"] == {
        "k": 4.5,
        "v": 4.5,
        "mean": 4.5,
    }
    assert [(r["start"], r["end"], r["n_tokens"]) for r in q4["by_position"]] == [(0, 1024, 510)]
    assert q4["by_position"][0]["kld"] == q4["kld"]
    assert turbo["reads"]["keys_from_blocks"] > 0 and turbo["by_fallback"] == 0


def test_bits_of_a_window_without_a_whole_page_are_null(capsys: Any, model: str, text: str) -> None:
    _, out, _ = tqgguf(capsys, "-m", model, "-f", text, "-c", "100", "--cache-types", "turbo4", "--json")
    assert json.loads(out)["rows"][1]["bits_per_value"] == {"k": None, "v": None, "mean": None}


def test_without_a_tail_there_are_two_rows_of_a_pair_in_blocks(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "256", "--cache-types", "turbo3,f32,mlx-q4", "--no-tail", "--json")
    found = json.loads(tqgguf(capsys, *argv)[1])["rows"]
    assert [row["label"] for row in found] == ["f16/f16", "turbo3/turbo3 no tail", "turbo3/turbo3", "f32/f32", "mlx-q4"]
    judged, production = found[1:3]
    assert (judged["tail"], production["tail"]) == (False, True)
    assert judged["kld"] > production["kld"]
    assert judged["bits_per_value"] == production["bits_per_value"]


def test_like_llama_scores_the_second_half_of_each_window_with_plain_caches(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "512", "--chunks", "3", "--cache-types", "turbo3,q8_0", "--like-llama")
    found = json.loads(tqgguf(capsys, *argv, "--json")[1])
    assert (found["first_scored"], found["n_scored"]) == (256, 3 * 255)
    turbo, q8 = found["rows"][1:]
    for row in (turbo, q8):
        assert (row["balance"], row["exact_first"], row["tail"]) == ("off", 0, False)
        assert row["reads"]["keys_in_float"] == row["reads"]["values_in_float"] == 0
    assert turbo["kld"] > 10 * q8["kld"]


def test_balance_and_exact_prefix_are_the_flags(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "256", "--cache-types", "turbo3,q4_0", "--json")
    flags = ("--kv-balance", "page", "--cache-exact-first", "9")
    found = json.loads(tqgguf(capsys, *argv, *flags)[1])["rows"]
    assert [(row["balance"], row["exact_first"]) for row in found] == [("off", 0), ("page", 9), ("page", 9)]


def test_text_comes_through_stdin_too(capsys: Any, model: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("-m", model, "-c", "256", "--cache-types", "q8_0", "--json")
    named = json.loads(tqgguf(capsys, *argv, "-f", text)[1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    piped = json.loads(tqgguf(capsys, *argv, "-f", "-")[1])
    assert piped["rows"] == named["rows"]


def test_without_a_text_tqggufs_own_is_taken_and_two_windows_of_it(capsys: Any, model: str) -> None:
    found = json.loads(tqgguf(capsys, "-m", model, "-c", "256", "--cache-types", "q8_0", "--json")[1])
    assert (found["text"], found["n_windows"]) == (OWN_TEXT, 2)


def test_chunks_is_how_many_windows_and_minus_one_takes_all(capsys: Any, model: str, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("\x01" * 1000)
    argv = ("-m", model, "-f", str(short), "-c", "300", "--cache-types", "q8_0", "--json")
    counts = [json.loads(tqgguf(capsys, *argv, *more)[1])["n_windows"] for more in ((), ("--chunks", "-1"))]
    assert counts == [2, 3]
    assert json.loads(tqgguf(capsys, *argv[:4], "-c", "900", *argv[6:])[1])["n_windows"] == 1


def test_default_types_that_the_models_heads_cannot_have_are_left_out(capsys: Any, tmp_path: Path, text: str) -> None:
    model = str(write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=96, n_layers=1)))
    status, out, err = tqgguf(capsys, "-m", model, "-f", text, "-c", "256", "--chunks", "1", "--json")
    labels = [row["label"] for row in json.loads(out)["rows"]]
    assert status == 0 and "turbo4/turbo4" in labels and "mlx-q4" not in labels
    assert "mlx-q4 is left out: layer 0, K: cache type mlx-q4 cannot hold head_dim 96" in err


def test_an_mlx_folder_is_evaluated_too(capsys: Any, tmp_path: Path, text: str) -> None:
    write_folder(tmp_path / "folder")
    argv = ("-m", str(tmp_path / "folder"), "-f", text, "-c", "256", "--chunks", "1", "--cache-types", "turbo3,mlx-q4")
    status, out, err = tqgguf(capsys, *argv, "--json")
    found = json.loads(out)
    assert status == 0, err
    assert found["model"]["file"] == "folder" and found["model"]["bytes"] > 0
    assert all(row["n_tokens"] == 255 and row["kld"] > 0 for row in found["rows"][1:])


# The page


class Page(HTMLParser):
    """What a page refers to, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "made <here>"
    types = "turbo4/turbo3,turbo3,q4_0,mlx-q4"
    argv = ["-m", model, "-f", text, "-c", "1536", "--chunks", "1", "--no-tail", "--cache-types", types]
    assert main(["eval", *argv, "--report", str(folder)]) == 0
    return folder


def test_the_page_needs_nothing_but_itself(report: Path) -> None:
    source = (report / "eval.html").read_text()
    page = Page(source)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<img", source)


def test_the_page_holds_tables_plots_settings_and_the_command(report: Path, model: str) -> None:
    source = (report / "eval.html").read_text()
    text = Page(source).text
    found = json.loads((report / "eval.json").read_text())
    for row in found["rows"]:
        assert row["label"] in text and eval_table.number(row["kld"]) in text
    for part in ("tiny.gguf", "1,535 tokens were scored", "0-1k", "1k-2k", found["versions"]["mlx"], found["date"]):
        assert part in text
    assert f"tqgguf eval -m {model} " in text and "'" in text  # a folder with blanks is quoted
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", source, re.DOTALL)]
    assert [plot.get("aria-label") for plot in plots] == [
        "KL divergence over bits per value",
        "KL divergence over position",
    ]
    for plot in plots:
        words = "".join(plot.itertext())
        assert "mean KL divergence from f16 (nats)" in words
        names = [row["label"].removesuffix(" no tail").split("/") for row in found["rows"][1:]]
        assert all((types[0] if len(set(types)) == 1 else "/".join(types)) in words for types in names)
    assert "stored bits per value" in "".join(plots[0].itertext())
    assert "position in the window (tokens)" in "".join(plots[1].itertext())


def test_the_plot_of_kld_over_bits_is_a_picture_of_its_own_too(report: Path) -> None:
    picture = ElementTree.parse(report / "kld_over_bits.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "stored bits per value" in "".join(picture.itertext())
    assert sorted(path.name for path in report.iterdir()) == ["eval.html", "eval.json", "kld_over_bits.svg"]


def test_without_matplotlib_a_report_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    code = (
        "import sys\nimport importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'matplotlib' else find(name, *more)\n"
        "from tqgguf.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "eval", "-m", "missing.gguf", "--report", str(tmp_path / "r")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--report needs matplotlib, which is not installed; get it with: pip install matplotlib" in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_read(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = tqgguf(capsys, "-m", "missing.gguf", "--report", str(tmp_path / "file"))
    assert status == 2 and re.search(r"--report .*file: expected a folder to write into: File exists", err)
    (tmp_path / "eval.json").mkdir()
    status, _, err = tqgguf(capsys, "-m", "missing.gguf", "--report", str(tmp_path))
    assert status == 2 and err.endswith("eval.json: expected the name of a file to write, found a folder\n")
    assert not (tmp_path / "eval.html").exists()


@pytest.mark.parametrize(
    "argv", [("eval", "--report"), ("calibrate", "-o"), ("run", "--kv-calibration"), ("run", "-m")]
)
def test_an_empty_name_of_a_file_is_refused(capsys: Any, argv: tuple[str, str]) -> None:
    assert main([*argv, ""]) == 2
    assert capsys.readouterr().err == f"tqgguf: error: {argv[1]}: expected a name, found an empty one\n"


# Ctrl-C


def test_ctrl_c_prints_what_was_measured_and_ends_with_130(model: str, text: str) -> None:
    argv = [*COMMAND, "-m", model, "-f", "-", "-c", "256", "--chunks", "-1", "--cache-types", "turbo4,q4_0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(argv, text=True, env=environment, **pipes) as run:  # type: ignore[call-overload]
        run.stdin.write(TEXT * 400)
        run.stdin.close()
        run.stdin = None
        for line in run.stderr:
            if "window 2 of" in line:
                run.send_signal(signal.SIGINT)
                break
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    scored = re.search(r"tqgguf: interrupted: ([\d,]+) of ([\d,]+) tokens were scored\n$", err)
    assert scored
    n, total = (int(number.replace(",", "")) for number in scored.groups())
    assert 255 <= n < total and n % 255 == 0  # a window is counted once it is evaluated, and then scored
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["f16/f16", "turbo4/turbo4", "q4_0/q4_0"]


# What is refused


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ("--cache-types turbo5", 2, "--cache-types: unknown cache type 'turbo5', did you mean 'turbo4'?"),
        ("--cache-types f16", 2, "--cache-types: nothing is left to compare with f16"),
        ("--cache-types mlx-q4/f16", 2, "give its name alone"),
        ("-c 4096", 2, "-c 4096: the model was trained for 2048 tokens"),
        ("--needle-lengths 512", 2, "--needle-lengths: has no meaning without --needle; add it, or leave this out"),
        ("--needle-depths 5", 2, "--needle-depths: has no meaning without --needle"),
        ("--cache-types turbo4,,q4_0", 2, "--cache-types: expected cache types such as"),
        ("--cache-types turbo4,", 2, "with commas between, found 'turbo4,'"),
        ("-c 2 --like-llama", 2, "-c: expected a window of 3 or more with --like-llama"),
        ("-c 1", 2, "-c: expected a window of 2 tokens or more"),
        ("--chunks 0", 2, "--chunks: expected 1 or more, or -1 for the whole text, found 0"),
        ("--chunks 99 -c 2048", 2, "text.txt has"),
        ("--cache-exact-first 129", 2, "--cache-exact-first: expected a number from 0 to 128, found 129"),
        ("--kv-balance some", 2, "--kv-balance: expected off, page, full, found 'some'"),
        ("-f missing.txt", 2, "-f missing.txt: No such file or directory"),
        ("-ctk turbo4", 2, "-ctk is refused: pairs of types are compared: --cache-types K/V,K/V"),
        ("--temp 0", 2, "`tqgguf eval` does not take --temp"),
        ("-m missing.gguf", 1, "missing.gguf: cannot be opened: No such file or directory"),
        ("words", 2, "unexpected argument 'words'; a text file goes after -f"),
    ],
)
def test_a_bad_request_is_one_line(capsys: Any, model: str, text: str, argv: str, status: int, message: str) -> None:
    found, out, err = tqgguf(capsys, "-m", model, "-f", text, *argv.split())
    assert (found, out) == (status, "")
    (line,) = [line for line in err.splitlines() if line.startswith("tqgguf: error: ")]
    assert message in line


def test_text_that_is_not_utf8_is_bad_input(capsys: Any, model: str, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    status, _, err = tqgguf(capsys, "-m", model, "-f", str(path))
    assert status == 1 and err.endswith(
        "latin.txt: expected UTF-8 text, found byte 0xe9; convert the file to UTF-8 (at byte 3)\n"
    )


def test_other_flags_of_llama_perplexity_are_noted_or_rounded(capsys: Any, model: str, text: str) -> None:
    argv = ("-m", model, "-f", text, "-c", "256", "--chunks", "1", "--cache-types", "q8_0", "-ngl", "99", "-ub", "100")
    status, _, err = tqgguf(capsys, *argv)
    assert status == 0
    assert "-ngl 99: no effect here" in err
    assert "-ub 100: texts are evaluated in whole pages of 128, so 128 is used" in err


def test_every_option_reaches_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[EvalRequest] = []
    monkeypatch.setattr(eval_command, "evaluate", lambda request: requests.append(request) or 0)
    line = (
        "-m m.gguf -f t.txt -c 512 --chunks 7 -b 1024 -ub 128 -t 3 --rope-scale 4 --rope-freq-base 5e5 --like-llama "
        "--cache-types q8_0 --no-tail --kv-balance page --cache-exact-first 2 --report r --json -v --debug"
    )
    assert program.main(["eval", *line.split()]) == 0
    assert requests[0] == EvalRequest(
        model="m.gguf", text_file="t.txt", cache_types="q8_0", n_ctx=512, n_chunks=7, n_batch=1024, n_ubatch=128,
        rope_freq_base=5e5, rope_freq_scale=0.25, threads=3, like_llama=True, no_tail=True, balance="page",
        exact_first=2, report="r", json_output=True, verbose=True, debug=True, given=requests[0].given,
    )  # fmt: skip
    assert program.main(["eval"]) == 0
    assert requests[1] == EvalRequest()


# Figures as they are shown


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (0.0, "0.0000"),
        (1.23456, "1.2346"),
        (0.001, "0.0010"),
        (0.000123, "0.000123"),
        (2e-9, "<0.000001"),
        (-2e-9, ">-0.000001"),
        (math.nan, "-"),
    ],
)
def test_small_figures_keep_six_decimals(x: float, shown: str) -> None:
    assert eval_table.number(x) == shown
