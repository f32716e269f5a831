"""`tqgguf plan` tells from a header alone what `run` will then hold, and what fits."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import Tensor, build_gguf
from inspecting import model_of, unknown
from test_without_mlx import COMMAND_LINE, REFUSE_MLX, python
from tiny_models import TinyModel, model_metadata, model_tensors, tiny_gguf, write_tiny

from tqgguf.cli.main import main
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape, kv_bytes
from tqgguf.formats.errors import RequestError
from tqgguf.formats.planning.machine_memory import machine_bytes
from tqgguf.formats.planning.memory_plan import longest_context, peak_bytes
from tqgguf.formats.quantities import parse_bytes, parse_count
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import open_model

LLAMA = TinyModel(n_layers=3, head_dim=128)
GEMMA = TinyModel("gemma3", n_layers=4, window=200, window_pattern=3, head_dim=128)
PAIRS = (
    "f32", "f16", "bf16/q8_0", "q8_0", "q5_1/q4_1", "q4_0", "iq4_nl/f16", "turbo4", "turbo4/turbo3", "turbo3/q4_0",
    "turbo2", "turbo3,0:q8_0/turbo3",
)  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], path: Path | None, *flags: str) -> dict[str, Any]:
    model = [] if path is None else ["-m", str(path)]
    assert main(["plan", *model, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> list[str]:
    assert main(["plan", "-m", str(path), *flags]) == 0
    return capsys.readouterr().out.splitlines()


def of_runs(loaded: Any, lengths: list[int]) -> dict[str, dict[str, int]]:
    """What a session's report states for every pair at growing lengths, prompts and one decoded token."""
    found: dict[str, dict[str, int]] = {}
    for pair in PAIRS:
        type_k, _, type_v = pair.partition("/")
        session = Session(loaded, CacheSpec(type_k, type_v or type_k))
        sizes = found[f"{type_k}/{type_v or type_k}"] = {}
        for length in lengths:
            session.prefill([1 + i % 200 for i in range(length)])
            sizes[str(length)] = session.report().kv_bytes
            held = sum(cache.nbytes for cache in session.cache) + 4 * length
            a_page_more = sizes[str(length)] * (length + 128) / length
            assert sizes[str(length)] <= held <= a_page_more * 33 / 32
            session.decode(7)
            sizes[str(length + 1)] = session.report().kv_bytes
    return found


def assert_is_what_runs_hold(plan: dict[str, Any], runs: dict[str, dict[str, int]]) -> None:
    assert {row["label"]: row["kv_bytes"] for row in plan["types"]} == runs


@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_the_bytes_of_a_cache_are_those_that_a_run_holds(
    model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", model)
    runs = of_runs(open_model(path).load(), [300, 767])
    plan = planned(capsys, path, "--cache-types", ",".join(PAIRS), "-c", "300,301,767,768")
    assert_is_what_runs_hold(plan, runs)


@pytest.mark.slow
def test_so_it_is_with_smollm2(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = of_runs(smollm2, [260])
    assert_is_what_runs_hold(planned(capsys, None, "--cache-types", ",".join(PAIRS), "-c", "260,261"), runs)


@pytest.mark.gemma
def test_so_it_is_with_gemma(capsys: pytest.CaptureFixture[str]) -> None:
    gemma = Path(os.environ["TQGGUF_GEMMA"])
    runs = of_runs(open_model(gemma).load(), [700])
    assert_is_what_runs_hold(planned(capsys, gemma, "--cache-types", ",".join(PAIRS), "-c", "700,701"), runs)


SHAPES = [
    [LayerShape(2, 128, 128)],
    [LayerShape(1, 128, 128, 200), LayerShape(1, 128, 128), LayerShape(1, 64, 128, 513)],
    [LayerShape(2, 64, 64, 5), LayerShape(1, 128, 128, 256)],
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("spec", [CacheSpec(), CacheSpec("turbo4", "q4_0", 128), CacheSpec("turbo2", "turbo2")])
def test_the_longest_context_is_the_one_before_the_first_that_overflows(
    shapes: list[LayerShape], spec: CacheSpec
) -> None:
    types = spec.resolve(len(shapes))
    peaks = np.maximum.accumulate([kv_bytes(shapes, types, n) for n in range(1200)])
    assert [peak_bytes(shapes, types, n) for n in range(1200)] == peaks.tolist()
    for room in (0, 4000, 100_000, 300_000, 10**9):
        fitting = np.flatnonzero(peaks + peaks // 32 <= room)
        assert longest_context(shapes, types, room, 1199) == (fitting[-1] if len(fitting) else 0)


def test_a_plan_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", GEMMA)
    text = shown(capsys, path, "--memory", "256M", "-c", "512,2048")
    assert text[0] == f"{path}: gemma3, tiny gemma3, trained for 2,048 tokens"
    assert text[1] == "memory     268.44 MB"
    assert all(len(line) <= 80 for line in text[1:])
    row = next(line.split() for line in text if line.startswith("turbo4 "))
    assert row[-1] == "2,048+"
    advice = (
        "For 2,048 tokens: -c 2048 -ctk f16 -ctv f16 (the first that fits of f16, q8_0, turbo4, turbo4/turbo3, turbo3:"
    )
    assert " ".join(text[-2:]) == f"{advice} least loss first)"


def test_many_contexts_stand_below_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    text = shown(capsys, path, "-c", "100,200,300,400,500,600,700,800,9000", "--memory", "1G")
    assert all(len(line) <= 80 for line in text[1:])
    assert sum(line.startswith("KV cache, K/V") for line in text) == 2
    assert "only with --rope-scale" in " ".join(" ".join(text).split())


def memory_for(path: Path, kv: int, capsys: pytest.CaptureFixture[str]) -> str:
    empty = planned(capsys, path, "--memory", "1G", "--device", "cpu")
    return str(2**30 - empty["left"] + kv + kv // 32)


@pytest.mark.parametrize(
    "pair",
    ["f16", "q8_0", "turbo4", "turbo4/turbo3", "turbo3", "turbo2"],
)
def test_the_best_types_that_fit_are_proposed(pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    type_k, _, type_v = pair.partition("/")
    shapes = [LayerShape(2, 128, 128)] * 3
    kv = peak_bytes(shapes, CacheSpec(type_k, type_v or type_k).resolve(3), 2048)
    just_enough = memory_for(path, kv, capsys)
    assert planned(capsys, path, "--memory", just_enough, "--device", "cpu")["choice"]["label"] == pair
    too_little = str(int(just_enough) - 1)
    assert planned(capsys, path, "--memory", too_little, "--device", "cpu")["choice"]["label"] != pair


def test_what_only_turbo2_holds_is_said_to_be_costly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    kv = peak_bytes([LayerShape(2, 128, 128)] * 3, CacheSpec("turbo2", "turbo2").resolve(3), 2048)
    just_enough = memory_for(path, kv, capsys)
    text = " ".join(shown(capsys, path, "--memory", just_enough, "--device", "cpu"))
    assert "-ctk turbo2 -ctv turbo2 (nothing else fits; turbo2 changes answers much" in text
    shorter = " ".join(shown(capsys, path, "--memory", str(int(just_enough) - 1), "--device", "cpu"))
    assert "2,048 tokens fit in none of these; the longest context at a small loss: -c" in shorter
    assert shorter.endswith("-ctk turbo3 -ctv turbo3")


def test_heads_that_no_turbo_type_holds_are_offered_llamas_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_of(tmp_path, unknown(**{"attention.key_length": 32, "attention.value_length": 32}))
    assert "turbo4" in planned(capsys, path)["impossible"]
    kv = next(row for row in planned(capsys, path, "-c", "4096")["types"] if row["label"] == "q4_1")["kv_bytes"]["4096"]
    found = planned(capsys, path, "-c", "4096", "--device", "cpu", "--memory", memory_for(path, kv + kv // 12, capsys))
    assert found["choice"]["label"] == "q4_1"


def test_of_named_types_the_first_that_fits_is_proposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    found = planned(capsys, path, "--memory", "1G", "-ctk", "turbo2,q4_0", "-ctv", "f16")
    assert [row["label"] for row in found["types"]] == ["turbo2/f16", "q4_0/f16"]
    assert found["choice"]["label"] == "turbo2/f16"
    assert found["choice"]["fits"] == 2048 < found["choice"]["max_context"]


def test_on_a_gpu_the_workspace_is_said_to_be_a_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    assert not planned(capsys, path, "--device", "cpu")["notes"]
    assert planned(capsys, path, "--device", "gpu")["notes"] == [
        "the workspace was measured on CPUs; a GPU's own buffers are not in it"
    ]


def test_where_nothing_fits_that_is_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, write_tiny(tmp_path / "m.gguf", LLAMA), "--memory", "64M")
    assert text[-1] == "No cache fits: take more memory, a smaller model, or a smaller -ub."


def test_a_model_without_a_cache_has_its_weights_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_of(tmp_path, unknown(**{"attention.kv_lora_rank": 512}))
    text = " ".join(shown(capsys, path, "--memory", "1G"))
    assert "multi-head latent attention" in text and "KV cache, K/V" not in text


def test_layers_that_share_a_cache_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_of(tmp_path, unknown(**{"attention.shared_kv_layers": 3}))
    f16 = next(row for row in planned(capsys, path, "-c", "1000")["types"] if row["label"] == "f16")
    assert f16["kv_bytes"]["1000"] == 1000 * (3 * 32 * 2 * 2 + 4)


def test_any_shard_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = planned(capsys, write_tiny(tmp_path / "m.gguf", LLAMA))
    metadata, tensors = model_metadata(LLAMA), model_tensors(LLAMA)
    names = list(tensors)
    for i, part in enumerate((names[:5], names[5:])):
        split = {"split.no": np.uint16(i), "split.count": np.uint16(2), "split.tensors.count": len(names)}
        keys = {**(metadata if i == 0 else {}), **split}
        (tmp_path / f"s-{i + 1:05d}-of-00002.gguf").write_bytes(
            build_gguf(keys, {name: tensors[name] for name in part})
        )
    for i in (1, 2):
        found = planned(capsys, tmp_path / f"s-{i:05d}-of-00002.gguf")
        assert {**found, "model": None} == {**whole, "model": None}


def test_a_model_larger_than_memory_takes_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n_bytes = 2**37
    data = tiny_gguf(LLAMA, tensors={"huge.weight": Tensor((n_bytes // (2 * 2**18), 2**18), 1, b"")})
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with open(path, "r+b") as file:
        file.truncate(len(data) + n_bytes)  # a hole
    started = time.process_time()
    found = planned(capsys, path, "--memory", "192G")
    assert found["file_weights"] > n_bytes and time.process_time() - started < 5


def test_a_plan_needs_no_mlx(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    done = python(REFUSE_MLX + COMMAND_LINE, "plan", "-m", str(path))
    assert (done.returncode, done.stderr) == (0, "") and "turbo4" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory", "much"], "--memory: expected a size of memory such as 16G, 24GB or 512M, found 'much'"),
        (["-c", "1,x"], "-c: expected numbers from 0 to 2,147,483,647 with commas between, found '1,x'"),
        (["-c", "0,512"], "-c 0,512: 0 is the model's own contexts; give it alone, or numbers above 0"),
        (["-ctk", "turbo5"], "-ctk: "),
        (["-ctk", "turbo4/turbo3"], "-ctk turbo4/turbo3: expected cache types of one side"),
        (["--cache-types", "mlx-q4"], "--cache-types mlx-q4/mlx-q4: expected types that run has"),
        (["--cache-types", "f16", "-ctk", "f16"], "--cache-types names pairs, -ctk and -ctv sides: leave one out"),
        (["--kv-balance", "page"], "--kv-balance, --cache-exact-first: name the types that they are for"),
        (["--device", "tpu"], "--device: expected cpu, gpu, found 'tpu'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-m", "not there", *flags]) == 2
    assert message.replace("mlx-q4/mlx-q4", "mlx-q4") in capsys.readouterr().err


def test_types_that_were_asked_for_and_do_not_fit_the_heads_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"attention.key_length": 80, "attention.value_length": 80}
    path = model_of(tmp_path, unknown(**sizes))
    assert "turbo4" in planned(capsys, path)["impossible"]
    assert main(["plan", "-m", str(path), "-ctk", "turbo4"]) == 2
    assert "80" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("16G", 16 * 2**30), ("1.5GiB", 3 * 2**29), ("24GB", 24 * 10**9), ("512m", 2**29), ("1T", 2**40), ("4096", 4096)],
)
def test_sizes_of_memory(text: str, n_bytes: int) -> None:
    assert parse_bytes("--memory", text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "1e9", "16 P", "9" * 12 + "T"])
def test_what_is_no_size_of_memory(text: str) -> None:
    with pytest.raises(RequestError, match="expected a size of memory"):
        parse_bytes("--memory", text)


@pytest.mark.parametrize(
    ("text", "n"),
    [("8192", 8192), ("8k", 8192), ("32K", 32768), ("1.5k", 1536), ("1m", 2**20), ("-1", -1), ("+7", 7), ("0", 0)],
)
def test_counts_of_tokens(text: str, n: int) -> None:
    assert parse_count(text) == n


@pytest.mark.parametrize("text", ["", "k", "-1k", "0.3k", "8kB", "8 k", "1G", "1e3", "1_000", "٣k", "8k8"])
def test_what_is_no_count_of_tokens(text: str) -> None:
    assert parse_count(text) is None


def test_a_limit_of_the_control_group_is_this_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("tqgguf.formats.planning.machine_memory._CGROUP_LIMITS", (str(limit),))
    whole = machine_bytes()
    assert whole is not None and whole > 2**28
    limit.write_text("268435456\n")
    assert machine_bytes() == 2**28
    limit.write_text("max\n")
    assert machine_bytes() == whole


def test_a_snapshot_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(build_gguf({"general.type": "tqgguf.calibration"}, {}))
    assert main(["plan", "-m", str(path)]) in (1, 2)
    assert "expected a model" in capsys.readouterr().err
