"""`tqgguf bench` measures what it says it measures, keeps what was measured, and compares two runs."""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrations import made
from test_without_mlx import COMMAND_LINE, REFUSE_MLX, python
from tiny_models import TinyModel, write_tiny

from tqgguf.cli.bench_table import notes
from tqgguf.cli.main import main
from tqgguf.formats.bench_record import BenchRecord, Memory, Speed, compare, differing_settings
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import kv_bytes
from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.models.calibration import write_calibration
from tqgguf.measuring.bench import speed
from tqgguf.measuring.bench.match import measure_matches
from tqgguf.measuring.bench.memory import MemoryPlan, measure_memory
from tqgguf.measuring.bench.modes import ModeSession, modes_of
from tqgguf.measuring.bench.speed import WARM_DECODED, SpeedPlan, measure_speeds
from tqgguf.measuring.cache_pairs import parse_pairs
from tqgguf.measuring.evaluation.caches import CacheOptions
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import LoadedModel, load_model
from tqgguf.runtime.models.model_opening import ModelAsk

LLAMA = TinyModel(head_dim=128, context_length=4096)
GEMMA = TinyModel("gemma3", n_layers=3, window=200, window_pattern=3, head_dim=128, context_length=4096)
NAMES = "f16,q8_0,turbo4/turbo3,mlx-q4"
LABELS = ["f16/f16", "q8_0/q8_0", "turbo4/turbo3", "mlx-q4"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("bench") / "m.gguf", LLAMA)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path)


def modes(loaded: LoadedModel, names: str = NAMES) -> list[Any]:
    return modes_of(parse_pairs(names), loaded.config.layer_shapes(), 2048, CacheOptions())


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["bench", *argv])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_a_fork_goes_on_as_its_session_would_and_leaves_it_as_it_is(model: TinyModel, tmp_path: Path) -> None:
    loaded = load_model(write_tiny(tmp_path / "m.gguf", model))
    ids = [1 + i % 250 for i in range(700)]
    for mode in modes(loaded):
        base = ModeSession(loaded, mode, n_ctx=1024, chunk=128)
        base.prefill(ids[:384])
        whole = ModeSession(loaded, mode, n_ctx=1024, chunk=128)
        whole.prefill(ids[:384])
        expected = whole.prefill(ids)
        for other in ([7] * 300, ids[384:], [9] * 40, ids[384:]):
            fork = base.fork()
            logits = fork.prefill(ids[:384] + other)
            fork.decode(3)
            if other == ids[384:]:
                np.testing.assert_array_equal(logits, expected)
        assert len(base.tokens) == 384


def test_a_mode_of_ours_is_what_run_has(loaded: LoadedModel) -> None:
    ids = [1 + i % 250 for i in range(300)]
    for mode, spec in zip(
        modes(loaded, "f16,turbo4/turbo3"), (CacheSpec(), CacheSpec("turbo4", "turbo3")), strict=True
    ):
        ours, runs = ModeSession(loaded, mode, n_ctx=512, chunk=256), Session(loaded, spec, n_ctx=512, chunk=256)
        np.testing.assert_array_equal(ours.prefill(ids), runs.prefill(ids))
        assert ours.kv_bytes == runs.report().kv_bytes


def test_every_test_of_every_cache_has_a_sample_of_every_repetition(loaded: LoadedModel) -> None:
    plan = SpeedPlan([40, 200], [3], [0, 256], repetitions=2, chunk=256, seed=5)
    speeds: list[Speed] = []
    ticks: list[int] = []
    measure_speeds(loaded, modes(loaded), plan, speeds, ticks.append)
    assert [(s.name, s.mode) for s in speeds] == [
        (name, label)
        for name in ("pp40", "pp200", "tg3", "pp40 @ d256", "pp200 @ d256", "tg3 @ d256")
        for label in LABELS
    ]
    assert all(len(s.seconds) == 2 and min(s.seconds) > 0 and s.seeds == [5, 6] for s in speeds)
    assert sum(ticks) == plan.n_tokens(len(LABELS))


def test_caches_take_turns_in_an_order_of_each_repetition(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    decode = ModeSession.decode

    def noted(self: ModeSession, token: int) -> Any:
        turns.append(self.mode.label)
        return decode(self, token)

    monkeypatch.setattr(ModeSession, "decode", noted)
    speeds: list[Speed] = []
    plan = SpeedPlan([], [1], [128], repetitions=6, chunk=128, seed=0)
    measure_speeds(loaded, modes(loaded), plan, speeds, lambda n: None)
    assert turns[: len(LABELS)] == LABELS  # warmed up, each by the one token that is then measured
    turns = turns[len(LABELS) :]
    rounds = [turns[i : i + 4] for i in range(0, len(turns), 4)]
    assert len(rounds) == 6 and all(sorted(turn) == sorted(LABELS) for turn in rounds)
    assert len(set(map(tuple, rounds))) > 1


@pytest.mark.parametrize(
    ("prompts", "answers", "warm"),
    [
        ([40], [], [("prefill", 40)]),
        ([1000], [], [("prefill", 256 + 232)]),
        ([512], [3], [("prefill", 256), ("decode", 3)]),
        ([], [WARM_DECODED + 9], [("decode", WARM_DECODED)]),
    ],
)
def test_every_shape_of_every_cache_is_warmed_up_before_it_is_measured(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[int],
    answers: list[int],
    warm: list[tuple[str, int]],
) -> None:
    """A first measurement would hold what is compiled for a shape and what memory is touched for the first time."""
    plan = SpeedPlan(prompts, answers, [0, 128], repetitions=1, chunk=256, seed=1)
    seen: list[tuple[str, str, int]] = []
    measured = speed._measured

    def noted(session: ModeSession, phase: str, new: list[int], tick: Any) -> float:
        seen.append((session.mode.label, phase, len(new)))
        return measured(session, phase, new, tick)

    monkeypatch.setattr(speed, "_measured", noted)
    measure_speeds(loaded, modes(loaded, "f16,turbo4"), plan, [], lambda n: None)
    of_depth = len(seen) // 2
    for at_depth in (seen[:of_depth], seen[of_depth:]):
        first = at_depth[: 2 * len(warm)]
        assert first == [(label, *test) for label in ("f16/f16", "turbo4/turbo4") for test in warm]
        steps = {n % 256 or 256 for _, phase, n in at_depth[2 * len(warm) :] if phase == "prefill"}
        assert steps <= {n % 256 or 256 for _, n in warm} and len(at_depth) == 4 * len(warm)


def test_what_was_measured_before_an_interrupt_stays(loaded: LoadedModel) -> None:
    plan = SpeedPlan([64], [2], [0], repetitions=3, chunk=128, seed=1)
    speeds: list[Speed] = []
    left = plan.n_tokens(4) // 2

    def tick(n: int) -> None:
        nonlocal left
        left -= n
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_speeds(loaded, modes(loaded), plan, speeds, tick)
    record = BenchRecord(LABELS, {"model": {"file": "m"}}, speeds)
    samples = sum(len(speed.seconds) for speed in record.measured())
    assert 0 < samples < 24
    json.dumps(record.as_json())


def test_memory_is_that_of_a_process_of_its_own(path: Path, loaded: LoadedModel) -> None:
    ballast = mx.ones((64, 1 << 20))  # 256 MB of this process
    mx.eval(ballast)
    found = measure_memory(MemoryPlan(ModelAsk(str(path)), "turbo4/turbo4", [300, 1500], 256, 1, None, None))
    types, shapes = CacheSpec("turbo4", "turbo4").resolve(2), loaded.config.layer_shapes()
    assert [m.kv for m in found] == [kv_bytes(shapes, types, n) for n in (300, 1500)]
    for memory in found:
        assert memory.kv < memory.device < 64 << 20
        assert memory.rss is not None and 20 << 20 < memory.rss < 256 << 20
    assert found[0].device <= found[1].device
    del ballast


@pytest.mark.parametrize(
    ("types", "flags", "is_used"),
    [("q8_0", ("--kv-balance", "full"), True), ("turbo4", ("--kv-balance", "off"), False), ("turbo4", (), True)],
)
def test_a_calibration_serves_the_balance_that_is_asked_for(
    types: str, flags: tuple[str, ...], is_used: bool, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, sidecar = load_model(path), tmp_path / "named.gguf"
    scales = {i: np.ones((s.n_kv_heads, s.head_dim_k), np.float32) for i, s in enumerate(loaded.config.layer_shapes())}
    write_calibration(sidecar, made(scales=scales, fingerprint=loaded.fingerprint))
    argv = ["bench", "-m", str(path), "-p", "8", "-n", "0", "-r", "1", "--match", "0", "--no-memory", "--json"]
    assert main([*argv, "--cache-types", types, "--kv-calibration", str(sidecar), *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kv_calibration"] == (str(sidecar) if is_used else None)
    assert ("no effect, no K is balanced in full" in err) != is_used


def test_a_process_that_fails_says_why(path: Path) -> None:
    plan = MemoryPlan(ModelAsk(str(path.with_name("none.gguf"))), "f16/f16", [10], 256, 1, None, None)
    with pytest.raises(Exception, match=r"memory of f16/f16 could not be measured .*none\.gguf"):
        measure_memory(plan)


def test_answers_are_compared_on_prompts_that_lie_in_blocks(loaded: LoadedModel) -> None:
    prompts = [[(i * k) % 251 for i in range(1310)] for k in (3, 7)]
    found: list[Any] = []
    measure_matches(loaded, modes(loaded), prompts, 12, 256, found, lambda n: None)
    f16, q8_0, turbo, mlx_lm = found
    assert [m.mode for m in found] == LABELS
    assert (f16.tokens, f16.n_tokens, f16.first, f16.token_share, f16.character_share) == (24, 24, [12, 12], 1.0, 1.0)
    assert f16.in_blocks == 0 and mlx_lm.in_blocks is None
    assert q8_0.in_blocks >= 0.9 and turbo.in_blocks >= 0.9
    for match in (turbo, mlx_lm):
        assert all(first <= 12 for first in match.first) and sum(match.first) <= match.tokens <= 24
    with pytest.raises(RequestError, match="expected 1,310 tokens or more, found 1,309"):
        measure_matches(loaded, modes(loaded), [prompts[0][1:]], 12, 256, found, lambda n: None)


ARGV = ("-p", "64", "-n", "4", "-d", "0,200", "-r", "2", "--cache-types", "mlx-q4", "--match", "4",
        "--match-prompts", "1")  # fmt: skip


@pytest.fixture(scope="module")
def report(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "made <here>"
    assert main(["bench", "-m", str(path), *ARGV, "--report", str(folder)]) == 0
    return folder


def test_a_report_is_a_page_with_its_figures_beside_it(report: Path) -> None:
    page = (report / "bench.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?!#)", re.sub(r"xlink:href=\"#", "", page))
    assert page.count("<svg") == 5  # prefill, decode, KV cache, device, resident
    for text in ("tokens/s", "context (tokens)", "peak device memory (MB)", "--cache-types mlx-q4", "mlx-lm"):
        assert text in re.sub(r"<[^>]*>", "", page)
    found = json.loads((report / "bench.json").read_text(encoding="utf-8"))
    assert found["modes"] == ["f16/f16", "mlx-q4"] and found["n_depth"] == [0, 256]
    assert all(len(row["seconds"]) == len(row["seeds"]) == 2 for row in found["speed"])
    assert {row["n_tokens"] for row in found["memory"]} == {64, 320}
    assert found["machine"]["cores"] >= 1 and found["seed"] == 1 and found["versions"]["mlx"]
    lines = list(csv.DictReader((report / "bench.csv").read_text(encoding="utf-8").splitlines()))
    kinds = [line["kind"] for line in lines]
    assert (kinds.count("speed"), kinds.count("memory"), kinds.count("match")) == (8, 4, 2)
    speed = found["speed"][0]
    assert float(lines[0]["tokens_per_second"]) == pytest.approx(64 / np.median(speed["seconds"]), rel=0.2)


def test_a_cache_that_the_machine_cannot_serve_is_left_out_and_the_others_are_measured(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqgguf.cli import bench_command

    measure = bench_command.measure_memory

    def without_mlx_q4(plan: Any) -> Any:
        """As with MLX's CUDA backend, which cannot multiply float32 by 4 bits."""
        if plan.pair == "mlx-q4":
            raise TqggufError("the memory of mlx-q4 could not be measured (status 1)")
        return measure(plan)

    monkeypatch.setattr(bench_command, "measure_memory", without_mlx_q4)
    argv = ("-m", str(path), "-p", "32", "-n", "0", "-r", "1", "--match", "0", "--cache-types", "mlx-q4,q8_0", "--json")
    status, out, err = bench(capsys, *argv)
    found = json.loads(out)
    assert status == 0 and "tqgguf: mlx-q4 is left out" in err
    assert found["modes"] == ["f16/f16", "q8_0/q8_0"]
    assert {row["mode"] for row in found["speed"]} == {"f16/f16", "q8_0/q8_0"}


def test_two_runs_are_compared(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = report / "bench.json"
    found = json.loads(first.read_text(encoding="utf-8"))
    found["speed"][0]["seconds"] = [s / 10 for s in found["speed"][0]["seconds"]]
    found["chunk"] = 512
    second = tmp_path / "b.json"
    second.write_text(json.dumps(found), encoding="utf-8")
    status, out, err = bench(capsys, "--compare", str(first), str(second))
    lines = out.splitlines()
    assert status == 0 and err == "tqgguf: chunk differs: 256 and 512\n"
    assert re.fullmatch(r"pp64 tokens/s +f16/f16 +[\d.,]+ +[\d.,]+ +10\.00x", lines[1])
    assert lines[2].endswith("1.00x  within the spread")
    status, out, _ = bench(capsys, "--compare", str(first), str(second), "--json")
    rows = json.loads(out)["differences"]
    assert rows[0]["ratio"] == pytest.approx(10) and rows[0]["within_spread"] is False
    assert {row["within_spread"] for row in rows[1:8]} == {True}


def test_a_difference_within_the_spread_is_where_samples_overlap() -> None:
    def record(*seconds: float) -> BenchRecord:
        speed = Speed("f16/f16", "decode", 10, 0, list(seconds), [1] * len(seconds))
        memory = Memory("f16/f16", 10, 100, 200, None, 1)
        return BenchRecord(["f16/f16"], {"chunk": 256}, [speed], [memory])

    near = list(compare(record(1.0, 2.0, 3.0), record(2.5, 3.5, 4.5)))
    assert [d.samples for d in near] == [3, None, 1]
    assert [d.within_spread for d in near] == [True, None, None]
    assert (near[0].first, near[0].second) == (5.0, pytest.approx(10 / 3.5))
    assert next(compare(record(1.0, 2.0), record(2.1, 4.0))).within_spread is False
    assert differing_settings(record(1.0), record(1.0)) == []


def test_one_sample_is_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, seconds: list[float], device: int) -> str:
        speeds = [Speed("f16/f16", "decode", 10, 0, seconds, [1] * len(seconds))]
        record = BenchRecord(["f16/f16"], {"chunk": 256}, speeds, [Memory("f16/f16", 10, 100, device, None, 1)])
        (tmp_path / name).write_text(json.dumps(record.as_json()))
        return str(tmp_path / name)

    one, other, three = write("1", [1.0], 200), write("2", [1.03], 206), write("3", [1.03, 1.04, 1.05], 206)
    for first, second in ((one, other), (one, three), (three, one)):
        status, out, _ = bench(capsys, "--compare", first, second)
        speed_row, kv_row, device_row = out.splitlines()[1:]
        assert status == 0 and speed_row.endswith("x  one sample") and device_row.endswith("x  one sample")
        assert kv_row.endswith("1.00x")
    _, out, _ = bench(capsys, "--compare", one, other, "--json")
    rows = json.loads(out)["differences"]
    assert [(row["samples"], row["within_spread"]) for row in rows] == [(1, None), (None, None), (1, None)]


def test_a_peak_above_that_of_f16_is_explained() -> None:
    def record(blocks: int, chunk: int = 256) -> BenchRecord:
        rows = [Memory("f16/f16", 256, 600, 1000, None, 1), Memory("turbo4/turbo4", 256, 150, blocks, None, 1)]
        return BenchRecord(["f16/f16", "turbo4/turbo4"], {"chunk": chunk}, memories=rows, notes=["noted"])

    assert notes(record(999)) == notes(record(1001, chunk=64)) == ["noted"]
    noted, why = notes(record(1001))
    assert noted == "noted" and why.startswith("peak device at 256 tokens: a cache in blocks takes more than f16")


def test_the_rows_of_a_step_do_not_stay_beside_their_blocks(path: Path) -> None:
    """What a step of 256 leaves after 508 tokens is what one of 128 leaves: blocks, and tails of a page's length."""
    held = []
    for chunk in (256, 128):
        loaded = load_model(path)
        (mode,) = modes(loaded, "turbo4@plain")
        session = ModeSession(loaded, mode, n_ctx=512, chunk=chunk)
        gc.collect()  # of other tests' models
        before = mx.get_active_memory()
        session.prefill([1 + i % 250 for i in range(508)])
        gc.collect()
        held.append(mx.get_active_memory() - before)
        del session
    row = 2 * 2 * LLAMA.n_kv_heads * LLAMA.head_dim * 2  # K and V of two layers in f16
    assert abs(held[0] - held[1]) < 128 * row / 10


def test_ratios_to_f16_are_those_of_single_repetitions() -> None:
    f16 = Speed("f16/f16", "decode", 10, 0, [1.0, 10.0, 1.0], [1, 2, 3])
    own = Speed("turbo4/turbo4", "decode", 10, 0, [2.0, 20.0, 0.5], [1, 2, 3])
    assert BenchRecord([], {}, [f16, own]).ratio(own) == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a file of `tqgguf bench -o json`, found none"),
        ("{", "expected JSON, found a mistake"),
        ('{"format": "x"}', "expected what `tqgguf bench -o json` writes (version 1), found 'x'"),
        ('{"format": "tqgguf bench", "version": 1}', "expected the records of `tqgguf bench`, found a mistake"),
    ],
)
def test_what_is_no_run_is_refused(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    status, out, err = bench(capsys, "--compare", str(path), str(path))
    assert status == 1 and not out and message in err and err.count("\n") == 1


def test_a_comparison_needs_no_mlx(report: Path) -> None:
    done = python(REFUSE_MLX + COMMAND_LINE, "bench", "--compare", *[str(report / "bench.json")] * 2)
    assert (done.returncode, done.stderr) == (0, "") and "1.00x  within the spread" in done.stdout


def test_in_the_form_that_is_asked_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("-m", str(path), "-p", "32", "-n", "0", "-r", "1", "-ctk", "q8_0,turbo4", "--match", "0", "--no-memory")
    _, out, err = bench(capsys, *argv, "-d", "100", "-o", "md")
    assert "-d 100: depths are whole pages of 128, so 128 is used" in err
    assert out.splitlines()[:2] == [
        "| cache K/V | test | tokens/s | slowest | fastest | of f16 |", "|---|---:|---:|---:|---:|---:|"
    ]  # fmt: skip
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["f16/f16", "q8_0/f16", "turbo4/f16"]
    _, out, _ = bench(capsys, *argv, "-o", "csv")
    assert [row["cache"] for row in csv.DictReader(out.splitlines())] == ["f16/f16", "q8_0/f16", "turbo4/f16"]
    _, out, _ = bench(capsys, *argv, "--json")
    assert [row["test"] for row in json.loads(out)["speed"]] == ["pp32"] * 3


def test_default_caches_that_the_heads_cannot_have_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=32, context_length=512))
    _, out, err = bench(capsys, "-m", str(small), "-p", "16", "-n", "0", "-r", "1", "--no-memory", "--json")
    found = json.loads(out)
    assert "turbo4/turbo4 is left out" in err and "turbo4/turbo4" not in found["modes"]
    assert found["match"] == [] and "answers are not compared" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-p", "0", "-n", "0", "--match", "0"], "nothing is left to measure"),
        (["-p", "1kB"], "-p: expected numbers from 0 to"),
        (["-d", "4096", "-p", "64"], "-d, -p, -n: 4,160 tokens stand together; expected at most 4,096"),
        (["--cache-types", "sim:kivi4"], "sim:kivi4: imitated caches have no speed and no bytes"),
        (["--cache-types", "q8_0", "-ctk", "f16"], "leave one out"),
        (["-r", "0"], "-r: expected a number from 1 to 1000, found 0"),
        (["--compare", "a", "b", "-p", "5"], "--n-prompt has no meaning with it"),
        (["-o", "csv", "--json"], "--json and -o csv: leave one out"),
        (["--temp", "0"], "`tqgguf bench` does not take --temp"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    flags: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--compare" in flags else ["-m", str(path)]
    status, out, err = bench(capsys, *model, *flags)
    assert status == 2 and message in err
    assert message in json.loads(out)["error"]["message"] if "--json" in flags else not out


def test_an_interrupt_before_the_first_figure_leaves_an_earlier_report(
    path: Path, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tqgguf.cli.bench_command.measure_memory", interrupted)
    before = (report / "bench.json").read_bytes()
    assert bench(capsys, "-m", str(path), *ARGV, "--report", str(report))[0:2] == (130, "")
    assert (report / "bench.json").read_bytes() == before


def test_ctrl_c_keeps_what_was_measured(path: Path) -> None:
    argv = [sys.executable, "-m", "tqgguf.cli.main", "bench", "-m", str(path), "-p", "0", "-n", "50", "-r", "1000"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    with subprocess.Popen(
        [*argv, "--no-memory", "--match", "0", "--cache-types", "q8_0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stderr is not None and "model: " in process.stderr.readline()
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    found = json.loads(out)
    assert process.returncode == 130 and found["interrupted"] is True and found["speed"]
    assert err == "tqgguf: interrupted: these are the figures that were measured by then\n"
