"""`tqgguf plan` tells from a header alone what `run` will then hold, and what fits."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import Tensor, build_gguf
from inspecting import model_of, unknown
from mlx.utils import tree_flatten
from test_mlx_folder import LFM2
from test_model_refusals import DAMAGES, REFUSALS, TENSOR_REFUSALS
from test_without_mlx import COMMAND_LINE, REFUSE_MLX, python
from tiny_folders import write_folder
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


def planned(capsys: pytest.CaptureFixture[str], path: Path | None, *flags: str, status: int = 0) -> dict[str, Any]:
    model = [] if path is None else ["-m", str(path)]
    assert main(["plan", *model, "--json", *flags]) == status
    return json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], path: Path, *flags: str, status: int = 0) -> list[str]:
    assert main(["plan", "-m", str(path), *flags]) == status
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
            room = 128 * session.report().f16_bytes / length  # every tail has room for a whole page
            assert sizes[str(length)] <= held <= (sizes[str(length)] + room) * 33 / 32
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
    path = write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=32, context_length=4096))
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
    text = shown(capsys, write_tiny(tmp_path / "m.gguf", LLAMA), "--memory", "64M", status=2)
    assert text[-1] == "No cache fits: take more memory, a smaller model, or a smaller -ub."
    found = planned(capsys, tmp_path / "m.gguf", "--memory", "64M", status=2)
    assert found["choice"] is None
    assert found["error"] == {"kind": "RequestError", "message": text[-1], "exit_status": 2}


def test_a_model_without_a_cache_has_its_weights_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_of(tmp_path, unknown(**{"attention.kv_lora_rank": 512}))
    text = " ".join(shown(capsys, path, "--memory", "1G", status=2))
    assert "multi-head latent attention" in text and "KV cache, K/V" not in text


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no heads": ({"llama.attention.head_count": None}, {}),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "nobody's"}, {}),
    "vocabulary": ({"tokenizer.ggml.model": "t5"}, {}),
    **{f"metadata: {name}": (metadata, {}) for name, (_, _, _, metadata) in REFUSALS.items()},
    **{f"tensors: {name}": ({}, tensors) for name, (_, _, tensors) in TENSOR_REFUSALS.items()},
    **{f"damage: {name}": (metadata, tensors) for name, (_, metadata, tensors) in DAMAGES.items()},
}
"""What is changed in a sound file: metadata, tensors; None takes one out."""
MODELS = {
    **{f"metadata: {name}": model for name, (_, _, model, _) in REFUSALS.items()},
    **{f"damage: {name}": model for name, (model, _, _) in DAMAGES.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_run_refuses_is_said_first_and_with_its_status(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata, tensors = REFUSED[case]
    path = write_tiny(tmp_path / "m.gguf", MODELS.get(case, TinyModel("llama")), metadata, tensors)
    status = main(["run", "-m", str(path), "-p", "x", "-n", "1"])
    refusal = capsys.readouterr().err.removeprefix("tqgguf: error: ").strip()
    assert status in (1, 2) and refusal
    lines = shown(capsys, path, "--memory", "4G", status=status)
    assert lines[0] == f"run refuses this model: {refusal}" and "-ctk" not in " ".join(lines[1:])
    found = planned(capsys, path, status=status)
    assert (found["error"]["message"], found["error"]["exit_status"]) == (refusal, status)
    assert found["choice"] is None


MOE_KEYS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
BERT_KEYS = {"attention.causal": False, "attention.layer_norm_epsilon": 1e-12}


@pytest.mark.parametrize(("architecture", "keys"), [("qwen3moe", MOE_KEYS), ("bert", BERT_KEYS), ("mamba", {})])
def test_so_are_headers_of_models_that_nobody_here_serves(
    architecture: str, keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {"block_count": 4, "embedding_length": 96, "attention.head_count": 3, "context_length": 4096, **keys}
    named = {f"{architecture}.{key}": value for key, value in header.items()}
    path = model_of(tmp_path, {"general.architecture": architecture, **named})
    refusal = f"run refuses this model: general.architecture is '{architecture}': expected one of llama, qwen2, "
    assert shown(capsys, path, status=2)[0].startswith(refusal)
    assert planned(capsys, path, status=2)["error"]["kind"] == "UnsupportedModelError"


def test_a_file_of_a_tokenizer_alone_is_refused_as_run_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_of(tmp_path, model_metadata(LLAMA))
    assert main(["run", "-m", str(path), "-p", "x"]) == 1
    refusal = capsys.readouterr().err.removeprefix("tqgguf: error: ").strip()
    text = shown(capsys, path, "--memory", "1G", status=1)
    assert text[0] == f"run refuses this model: {refusal}" and "weights    0 B on a CPU, 0 B in the file" in text


def test_types_for_a_model_that_run_refuses_are_not_what_is_complained_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_of(tmp_path, unknown(**{"attention.key_length": 80, "attention.value_length": 80}))
    found = planned(capsys, path, "-ctk", "turbo4,f16", status=2)
    assert "general.architecture is 'xyz'" in found["error"]["message"]
    assert found["impossible"] == ["turbo4/f16"] and [row["label"] for row in found["types"]] == ["f16/f16"]


def test_without_mlx_a_header_says_as_much(tmp_path: Path) -> None:
    refused = {
        "experts": ({"llama.expert_count": 8}, {}, "llama.expert_count is 8", 2),
        "sinks": ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "'blk.0.attn_sinks.weight' has no", 2),
    }
    for name, (metadata, tensors, message, status) in refused.items():
        path = write_tiny(tmp_path / f"{name}.gguf", LLAMA, metadata, tensors)
        done = python(REFUSE_MLX + COMMAND_LINE, "plan", "-m", str(path))
        assert done.returncode == status and done.stdout.startswith("run refuses this model: "), done.stderr
        assert message in done.stdout.partition("\n")[0]


def test_without_mlx_a_folder_is_planned_by_its_header(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    done = python(REFUSE_MLX + COMMAND_LINE, "plan", "-m", str(folder))
    assert (done.returncode, done.stderr) == (0, "") and "-ctk f16 -ctv f16" in done.stdout
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 512}))
    done = python(REFUSE_MLX + COMMAND_LINE, "plan", "-m", str(folder))
    assert done.returncode == 2 and "llama uses multi-head latent attention" in done.stdout.partition("\n")[0]


def growing(tmp_path: Path) -> Path:
    """Matrices in IQ4_NL, and experts in three dimensions, which nothing multiplies as they lie in the file."""
    iq4_nl, q4_0 = 20, 2
    experts = Tensor((4, 64, 128), q4_0, b"\0" * (4 * 64 * 128 // 32 * 18))
    odd = Tensor((64, 128), iq4_nl, b"\0" * (64 * 128 // 32 * 18))
    made = {name: Tensor((64, 128), q4_0, b"\0" * 4608) for name in ("blk.0.a.weight", "blk.0.b.weight")}
    return model_of(tmp_path, unknown(), {"blk.0.experts.weight": experts, "blk.0.odd.weight": odd, **made})


def test_weights_that_grow_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = growing(tmp_path)
    found = planned(capsys, path, "--device", "cpu", status=2)
    assert found["file_weights"] == 18432 + 3 * 4608 and found["weights"] == 4 * 5 * 64 * 128 + 2 * 4608
    text = " ".join(" ".join(shown(capsys, path, "--device", "cpu", "--memory", "4G", status=2)).split())
    assert (
        "weights 173.06 kB on a CPU, 32.26 kB in the file more than in the file, because on a CPU run holds Q4_0 of "
        "experts (18.43 kB) as 32-bit floats (131.07 kB), IQ4_NL (4.61 kB) as 32-bit floats (32.77 kB) workspace"
        in text
    )


def test_on_a_gpu_other_weights_grow_and_each_by_its_own_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, growing(tmp_path), "--device", "gpu", status=2)
    rows = {(row["what"], row["form"]): (row["file_bytes"], row["bytes"]) for row in found["widened"]}
    assert rows[("Q4_0 of experts", "32-bit floats")] == (18432, 4 * 4 * 64 * 128)
    assert sum(held - in_file for in_file, held in rows.values()) == found["weights"] - found["file_weights"]


def test_weights_that_stay_as_they_are_need_no_explanation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, write_tiny(tmp_path / "m.gguf", TinyModel(weights="Q8_0")), "--device", "cpu")
    assert not any("more than in the file" in line for line in text)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_folder_is_planned_like_a_gguf(
    quantised: bool, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"group_size": 32, "bits": 4} if quantised else None
    folder = write_folder(tmp_path / "model", dtype=mx.float16, quantization=settings)
    found = planned(capsys, folder, "-c", "256,2k", "--memory", "2G", "--device", device)
    form = "dense" if device == "cpu" else "packed"
    loaded = open_model(folder).load(form=form)
    assert found["weights"] == sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    shapes = loaded.config.layer_shapes()
    for row in found["types"]:
        types = CacheSpec(row["type_k"], row["type_v"]).resolve(len(shapes))
        assert row["kv_bytes"] == {str(n): kv_bytes(shapes, types, n) for n in (256, 2048)}
    assert "error" not in found and found["notes"][:1] == [
        "the model was trained for 1,024 tokens; run goes beyond only with rope_scaling in config.json"
    ]
    assert found["choice"]["label"] == "f16"


MAMBA = {"state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 8}


def test_the_layers_of_a_folder_are_those_that_mlx_lm_gives_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hybrid = planned(capsys, write_folder(tmp_path / "lfm2", "lfm2", config=LFM2), "-c", "1000", "--memory", "2G")
    f16 = next(row for row in hybrid["types"] if row["label"] == "f16")
    assert f16["kv_bytes"]["1000"] == 1000 * (2 * 64 * 2 * 2 + 4)
    assert hybrid["notes"] == ["2 layers keep a state of another kind, which is not counted"]


def test_a_folder_without_keys_and_values_fits_or_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "mamba", "mamba", config=MAMBA)
    text = shown(capsys, folder, "--memory", "4G", "--device", "cpu")
    assert text[-1] == "note       3 layers keep a state of another kind, which is not counted"
    assert shown(capsys, folder, "--memory", "64M", "--device", "cpu", status=2)[-1].startswith("No cache fits")


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", str(tmp_path)]) == 1
    assert "expected a model folder with a config.json" in capsys.readouterr().err


def test_a_folder_that_run_refuses_is_planned_with_that_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody"}))
    assert "does not know the model type 'nobody'" in planned(capsys, folder, status=2)["error"]["message"]


def test_contexts_are_written_as_sizes_of_memory_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", LLAMA)
    assert planned(capsys, path, "-c", "1k,1.5K,2048")["contexts"] == [1024, 1536, 2048]


def test_a_context_that_does_not_fit_leaves_a_shorter_one_to_propose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=128, context_length=2**20))
    text = " ".join(shown(capsys, path, "--memory", "320M", "-c", "1024k", "--device", "cpu"))
    assert "1,048,576 tokens fit in none of these; the longest context at a small loss: -c " in text


def test_layers_that_share_a_cache_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_of(tmp_path, unknown(**{"attention.shared_kv_layers": 3}))
    f16 = next(row for row in planned(capsys, path, "-c", "1000", status=2)["types"] if row["label"] == "f16")
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
    found = planned(capsys, path, "--memory", "192G", status=2)  # run has no place for such a tensor
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
    path = write_tiny(tmp_path / "m.gguf", TinyModel(head_dim=80))
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
