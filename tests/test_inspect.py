"""`tqgguf inspect` tells what files of every kind hold, and gives one line for what it cannot read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import llama_builder
import mlx.core as mx
import numpy as np
import pytest
import tiny_folders
from gguf_builder import F32, U8, U32, Payload, Tensor, Typed, build_gguf, write_split
from inspecting import as_json, facts, model_of, shown, unknown
from mlx_cache_files import BEFORE, CURRENT, I32, KEYS, QUANTISED, cache_bytes
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, save_prompt_cache
from snapshots import FINGERPRINT, make_layer, make_snapshot
from tiny_models import TinyModel, model_metadata, model_tensors, write_tiny

from tqgguf.cli import inspect_text
from tqgguf.cli.inspect import with_metadata_value
from tqgguf.cli.main import main
from tqgguf.formats.inspection.inspect import inspect
from tqgguf.formats.models.calibration import Calibration, write_calibration
from tqgguf.formats.snapshots.write import write_snapshot

LLAMA = TinyModel(n_layers=3, head_dim=64, n_heads=4, n_kv_heads=2, weights="Q8_0")
GEMMA = TinyModel("gemma3", n_layers=7, window=256, window_pattern=3, head_dim=128)


def test_tensors_of_unknown_types_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a.weight": Tensor((4, 100), 99, bytes(64)), "b.weight": np.zeros((2, 3), np.float32)}
    path = model_of(tmp_path, unknown(), tensors)
    totals = [line.split("  ") for line in shown(capsys, path).splitlines() if line.startswith("type 99")]
    assert [[cell.strip() for cell in row if cell] for row in totals] == [
        ["type 99 (newer or fork type)", "1", "400", "?", "-"]
    ]
    lines = shown(capsys, path, "--tensors").splitlines()
    assert [line.split() for line in lines] == [
        ["tensor", "type", "dimensions", "bytes"],
        ["a.weight", "type", "99", "(newer", "or", "fork", "type)", "100", "x", "4", "?"],
        ["b.weight", "F32", "3", "x", "2", "24", "B"],
    ]
    listed = as_json(capsys, path, "--tensors")["tensors"]["list"]
    assert [(t["name"], t["dims"], t["n_bytes"]) for t in listed] == [
        ("a.weight", [100, 4], None),
        ("b.weight", [3, 2], 24),
    ]


METADATA = {
    "general.architecture": "xyz",
    "x.text": "two\nlines\tof \x1b[31mtext",
    "x.bytes": b"caf\xe9",
    "x.numbers": Typed(U8, list(range(20))),
    "x.words": ["a", "b\n"],
    "x.nested": [[1, 2], [3]],
    "x.none": Typed(U32, []),
    "x.flag": True,
    "x.nan": Typed(F32, float("nan")),
}


def test_metadata_is_listed_on_one_line_each_as_a_terminal_can_take_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, model_of(tmp_path, METADATA), "--metadata").splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines] == list(METADATA)
    ends = [
        "xyz", r"two\nlines\tof \x1b[31mtext", r"caf\xe9", "20: 0, 1, 2, 3, 4, 5, 6, 7, ...", r'2: "a", "b\n"',
        "2: [2: 1, 2], [1: 3]", "none", "true", "nan",
    ]  # fmt: skip
    assert all(line.endswith(end) for line, end in zip(lines, ends, strict=True))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("x.text", "two\nlines    of \\x1b[31mtext\n"),
        ("x.numbers", "".join(f"{i}\n" for i in range(20))),
        ("x.words", '"a"\n"b\\n"\n'),
        ("x.flag", "true\n"),
        ("x.n*", None),
    ],
)
def test_a_key_gives_its_value_in_full_and_a_pattern_a_list(
    key: str, expected: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, model_of(tmp_path, METADATA), "--metadata", key)
    if expected is None:
        assert [line.split()[0] for line in text.splitlines()] == ["x.numbers", "x.nested", "x.none", "x.nan"]
    else:
        assert text == expected


def test_metadata_as_json_is_whole_where_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_of(tmp_path, METADATA)
    every = as_json(capsys, path, "--metadata")["metadata"]["entries"]
    assert list(every) == list(METADATA)
    assert every["x.numbers"] == {"type": "ARRAY of U8", "count": 20, "first": [0, 1, 2, 3, 4, 5, 6, 7]}
    assert (every["x.nan"]["value"], every["x.bytes"]["value"]) == (None, "caf\\xe9")
    one = as_json(capsys, path, "--metadata", "x.numbers")["metadata"]["entries"]
    assert one == {"x.numbers": {"type": "ARRAY of U8", "value": list(range(20))}}
    assert "entries" not in as_json(capsys, path)["metadata"]


def test_a_key_that_is_not_there_is_refused_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = shown(capsys, model_of(tmp_path, METADATA), "--metadata", "x.txt", status=2)
    assert error.count("\n") == 1 and "has no such key; did you mean 'x.text'" in error


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["f", "--metadata"], ["f", "--metadata="]),
        (["--metadata", "f"], ["--metadata=", "f"]),
        (["--metadata", "key", "f"], ["--metadata=key", "f"]),
        (["f", "--metadata", "key"], ["f", "--metadata=key"]),
        (["f", "--metadata", "--json"], ["f", "--metadata=", "--json"]),
        (["--metadata", "key", "--", "-f"], ["--metadata=key", "--", "-f"]),
        (["f", "--metadata=key"], ["f", "--metadata=key"]),
        (["f"], ["f"]),
    ],
)
def test_the_key_may_be_left_out(given: list[str], taken: list[str]) -> None:
    assert with_metadata_value(given) == taken


def test_any_shard_stands_for_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = list(model_tensors(LLAMA).items())
    paths = write_split(tmp_path, "m", model_metadata(LLAMA), [dict(tensors[:9]), dict(tensors[9:])])
    found = [as_json(capsys, path) for path in paths]
    assert found[0] | {"path": ""} == found[1] | {"path": ""}
    assert [file["path"] for file in found[0]["files"]] == list(map(str, paths))
    assert found[0]["tensors"]["count"] == len(tensors)
    assert shown(capsys, paths[1], "--tensors").splitlines()[-1].endswith(" 2")


def test_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.gguf"
    layers = [make_layer(i, 300, balance="full", n_prefix=4) for i in range(2)]
    write_snapshot(path, make_snapshot(300, *layers, make_layer(2, 300, "q8_0", "f16", window=200)))
    found = facts(shown(capsys, path))
    assert found["model"] == "tiny, llama"
    assert found["tokens"] == "300, 300 evaluated as prompt, on a grid of 256"
    assert found["layers"] == "3, 2 KV heads, 1 of them see a window"
    assert found["K"].startswith("turbo4, heads of 64, rotated (signed, 64), codebook generation 3, in 2 layers; q8_0,")
    assert found["balance of K"] == "full in 2 layers, off in 1 layer"
    assert found["exact prefix"] == "4 tokens"
    about = as_json(capsys, path)["about"]
    assert about["parts"]["rows"] == 2 * 2 * 256 * (34 + 26) + 2 * (256 * 68 + 300 * 128)
    assert about["f16_bytes"] == 3 * 2 * 2 * 300 * 128
    assert about["fingerprint"]["weights"] == "a" * 64


def test_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.gguf"
    scales = {0: np.full((2, 4), 0.5, np.float32), 1: np.full((2, 4), 2, np.float32)}
    write_calibration(path, Calibration(scales, FINGERPRINT, "llama", "tiny", 512, "my text", "e" * 64))
    found = facts(shown(capsys, path))
    assert found["made from"] == "512 tokens of my text (SHA-256 eeeeeeeeeeee...)"
    assert found["channel scale"] == "2 layers, 2 KV heads of 4, from 0.5 to 2"


@pytest.mark.parametrize("kind", ["session", "sequence"])
def test_a_state_file_of_llama_cpp(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = llama_builder.Memory(n_cells=2, first=1, layers=((llama_builder.Side(8, 136),) * 2,), v_trans=0)
    memories = (llama_builder.Memory(v_trans=1), window)
    path = llama_builder.build_state(kind, tokens=(1, 2, 3), memories=memories).write(tmp_path / "state.bin")
    found = facts(shown(capsys, path))
    assert found["tokens"] == "3"
    assert found["base memory"] == "3 cells, positions 0 to 2, 2 layers, 3.07 kB"
    assert found["window memory"] == "2 cells, positions 1 to 2, 1 layer, 544 B"
    assert found["V"] == "q8_0, rows of 136 bytes"
    about = as_json(capsys, path)
    assert about["kind"] == kind and about["about"]["streams"][0]["types_v"] == {"f16": 2}
    assert "has none" in shown(capsys, path, "--tensors", status=2)


def test_a_safetensors_file_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_folders.write_folder(tmp_path / "folder") / "model.safetensors"
    found = as_json(capsys, path, "--tensors", "--metadata")
    assert (found["kind"], found["tensors"]["dims_order"]) == ("safetensors", "slowest first")
    assert found["metadata"]["entries"] == {"format": {"type": "string", "value": "mlx"}}
    embedding = next(t for t in found["tensors"]["list"] if t["name"] == "model.embed_tokens.weight")
    assert (embedding["dims"], embedding["type"], embedding["n_bytes"]) == ([288, 128], "F32", 288 * 128 * 4)


def test_a_prompt_cache_of_mlx_lm_is_known_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As mlx-lm itself writes one: a layer of each class, 9 tokens of which the window keeps 8."""
    layers = [KVCache(), RotatingKVCache(max_size=8), QuantizedKVCache(32, 4)]
    for layer in layers:
        for n in (5, 1, 1, 1, 1):
            layer.update_and_fetch(mx.ones((1, 2, n, 64), mx.float16), mx.ones((1, 2, n, 32), mx.float16))
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(str(path), layers, {"model": "some/model", "notes": "x" * 300})
    about = as_json(capsys, path)
    assert (about["kind"], about["container"]) == ("mlx-lm prompt cache", "safetensors")
    found = about["about"]
    assert found["classes"] == {"KVCache": 1, "RotatingKVCache": 1, "QuantizedKVCache": 1}
    assert (found["n_tokens"], found["n_held"], found["windows"], found["has_tokens"]) == ([9], 9, [8], False)
    assert (found["n_kv_heads"], found["head_dims_k"], found["head_dims_v"]) == ([2], [64], [32])
    assert found["types"] == {"f16": 2, "4 bits in groups of 32": 1}
    assert found["metadata"]["model"] == "some/model"
    overview = facts(shown(capsys, path))
    assert overview["tokens"] == "9, their ids are not in the file"
    assert overview["layers"] == "3, 1 KVCache, 1 RotatingKVCache, 1 QuantizedKVCache"
    assert overview["heads"] == "2 KV heads, 64 values each in K, 32 in V" and overview["window"] == "8 keys"
    assert overview["said beside it"] == f"model: some/model; notes: {'x' * 60}..."
    assert main(["cache", "info", str(path)]) == 0 and "mlx-lm prompt cache" in capsys.readouterr().out


def test_older_caches_of_mlx_lm_and_classes_that_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_bytes(cache_bytes({**BEFORE, "1.model": "m"}, QUANTISED))
    about = as_json(capsys, path)["about"]
    assert (about["layout"], about["n_tokens"], about["types"]) == (
        "mlx-lm before 0.32", [3], {"4 bits in groups of 32": 1}
    )  # fmt: skip
    path.write_bytes(cache_bytes({"1.0": "ArraysCache", "2.0": "", "1.1": "KVCache"}, {"0.0": KEYS} | LAYER_1))
    text = facts(shown(capsys, path))
    assert text["layers"] == "2, 1 ArraysCache, 1 KVCache"
    assert text["note"] == "layers of class ArraysCache can be used by mlx-lm alone: they are not looked into"


LAYER_1 = {f"1.{part}": array for part, array in enumerate((KEYS, KEYS, (I32, ())))}


def test_a_damaged_cache_of_mlx_lm_is_named_as_validate_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_bytes(cache_bytes(CURRENT, {"0.0": KEYS, "0.2": (I32, ())}))
    assert "expected keys and values of the tokens that it counts" in shown(capsys, path, status=1)


def test_weights_are_no_prompt_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_folders.write_folder(tmp_path / "folder") / "model.safetensors"
    assert main(["cache", "info", str(path)]) == 2
    assert "expected a prompt cache, found a file of kind safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "found an empty file"),
        (
            b"root:x:0:0",
            "expected a GGUF (a model or any shard of one, a prompt cache, a calibration), a llama.cpp session",
        ),
        (b"<!DOCTYPE html><html>", "found an HTML page"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "the tensor count"),
        (b"nsgg\7\0\0\0", "expected version 9 or 10"),
        (b"\xff\xff\0\0\0\0\0\0{}", "safetensors header"),
        (build_gguf({"a": Payload(99, b"")}), "value type 99"),
    ],
)
def test_files_that_cannot_be_read_give_one_line(
    data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    error = shown(capsys, path, status=1)
    assert error.count("\n") == 1 and error.startswith(f"tqgguf: error: {path}: ") and message in error


def test_what_is_not_there_and_folders_of_other_things_give_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in shown(capsys, tmp_path / "nothing", status=1)
    assert "expected a model folder with a config.json, found none" in shown(capsys, tmp_path, status=1)
    (tmp_path / "config.json").write_text("[1]")
    assert "expected a JSON object" in shown(capsys, tmp_path, status=1)


def test_lines_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", GEMMA, {"general.name": "a name of many words " * 9})
    wrapped = inspect_text.lines(inspect(path), 80)
    assert max(len(line) for line in wrapped[1:]) <= 80  # the first has the path
    assert wrapped[1].startswith("name            a name of") and wrapped[2].startswith(" " * 16 + "name of")


def test_a_large_vocabulary_takes_memory_of_its_own_size_and_mlx_stays_out(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(1 << 18)]
    path = model_of(tmp_path, {**unknown(), "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": tokens})
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tqgguf.cli.main import main\n"
        f"assert main(['inspect', {str(tmp_path / 'm.gguf')!r}, '--json', '--metadata']) == 0\n"
        "assert not {'mlx', 'mlx_lm', 'tokenizers'} & {name.partition('.')[0] for name in sys.modules}\n"
        "status = Path('/proc/self/status')\n"  # on Linux ru_maxrss is the parent's to begin with
        "own = status.read_text().partition('VmHWM:')[2].split()[0] if status.exists() else None\n"
        "print(own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["about"]["tokenizer"]["n_tokens"] == 1 << 18
    kilobytes = int(done.stderr) // (1024 if sys.platform == "darwin" else 1)
    assert kilobytes < 64 * 1024 + 16 * path.stat().st_size // 1024
