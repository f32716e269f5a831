"""`tqgguf convert` of models' GGUFs: weights in other types as gguf-py makes them, split and merged, all else kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_builder import F32, I8, STRING, U8, Typed, build_gguf, quantised, write_split
from tiny_models import TinyModel, model_metadata, model_tensors, write_tiny

from tqgguf.cli.main import main
from tqgguf.conversion.files import write_plan
from tqgguf.conversion.gguf_to_gguf import STEPS_KEY, plan_gguf
from tqgguf.conversion.weight_rules import FILE_TYPES, ModelFacts, choose
from tqgguf.formats.gguf.reader import TensorInfo, open_gguf
from tqgguf.runtime.native.encode_rows import row_encoder

ODD: dict[str, Any] = {
    "general.alignment": 64,
    "odd.nested": [[1, 2], [], [3]],
    "odd.empty": Typed(STRING, []),
    "odd.bytes": b"not \xff UTF-8",
    "odd.flags": [True, False],
    "odd.small": Typed(I8, [-1, 5]),
    "odd.number": Typed(U8, 7),
    "odd.float": Typed(F32, 1e-6),
}


class Files:
    """`tqgguf convert` in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder
        self.err = ""

    def __call__(self, *argv: str, status: int = 0) -> str:
        found = main(["convert", *argv])
        out, self.err = self.capsys.readouterr()
        assert found == status, self.err
        return out

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture
def files(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> Files:
    monkeypatch.chdir(tmp_path)
    return Files(capsys, tmp_path)


def tensors_of(path: str) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("source", ["F32", "F16"])
@pytest.mark.parametrize("wanted", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_weights_are_quantised_as_gguf_py_does(files: Files, source: str, wanted: str) -> None:
    write_tiny(Path("a.gguf"), TinyModel("qwen3", weights=source, tied=False))
    files("a.gguf", "b.gguf", "--type", wanted)
    before = tensors_of("a.gguf")
    for name, tensor in tensors_of("b.gguf").items():
        values = before[name].data
        is_matrix = values.ndim == 2
        wanted_type = gguf.GGMLQuantizationType[wanted.upper()]
        if name == "output.weight" and wanted.startswith(("q4", "q5")):
            wanted_type = gguf.GGMLQuantizationType.Q8_0
        assert tensor.tensor_type == (wanted_type if is_matrix else before[name].tensor_type), name
        expected = gguf.quantize(values.astype(np.float32), wanted_type) if is_matrix else values
        assert tensor.data.tobytes() == expected.tobytes(), name


def test_numpy_and_the_c_library_make_the_same_file(files: Files) -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="F16", hidden_size=96, intermediate_size=160))
    for wanted in ("q8_0", "q4_0", "iq4_nl"):
        with open_gguf("a.gguf") as file:
            write_plan(plan_gguf(file, "numpy.gguf", wanted))
            write_plan(plan_gguf(file, "c.gguf", wanted), row_encoder())
        assert files.read("numpy.gguf") == files.read("c.gguf")


def info(name: str, *shape: int, ggml_type: int = 1) -> TensorInfo:
    return TensorInfo(name, shape, ggml_type, int(np.prod(shape)), 0, 0, 0)


TIED = ModelFacts("llama", 32, 0, 4, is_tied=True)
UNTIED = ModelFacts("llama", 32, 0, 4, is_tied=False)
MIXTRAL = ModelFacts("llama", 32, 8, 1, is_tied=False)


@pytest.mark.parametrize(
    ("name", "shape", "wanted", "model", "expected"),
    [
        # as llama-quantize of llama.cpp b9906 has it, q8_0 in place of its Q6_K and q5_1 of its Q5_K
        ("blk.0.ffn_up.weight", (64, 64), "q4_0", TIED, "q4_0"),
        ("token_embd.weight", (64, 64), "q4_0", TIED, "q8_0"),
        ("token_embd.weight", (64, 64), "q4_0", UNTIED, "q4_0"),
        ("output.weight", (64, 64), "q5_1", UNTIED, "q8_0"),
        ("output.weight", (64, 64), "bf16", UNTIED, "bf16"),
        ("output.weight", (64, 40), "q8_0", UNTIED, "f16"),
        ("blk.0.ffn_up.weight", (64, 40), "q4_0", TIED, "f16"),
        ("blk.0.ffn_up.weight", (64, 40), "f32", TIED, "f32"),
        ("blk.3.ffn_down.weight", (64, 64), "iq4_nl", TIED, "q5_1"),
        ("blk.4.ffn_down.weight", (64, 64), "iq4_nl", TIED, "iq4_nl"),
        ("blk.9.attn_v.weight", (64, 64), "iq4_nl", TIED, "q5_1"),
        ("blk.9.attn_v.weight", (64, 64), "q4_0", MIXTRAL, "q8_0"),
        ("blk.9.attn_k.weight", (64, 64), "q4_0", MIXTRAL, "q8_0"),
        ("blk.9.attn_output.weight", (64, 64), "iq4_nl", MIXTRAL, "q5_1"),
        ("blk.0.ffn_gate_inp.weight", (8, 64), "q8_0", MIXTRAL, None),
        ("blk.0.attn_norm.weight", (64,), "f16", TIED, None),
        ("blk.0.attn_norm.weight", (2, 64), "f16", TIED, None),
        ("blk.0.attn_q.bias", (2, 64), "q8_0", TIED, None),
        ("blk.0.one.weight", (1, 64), "q8_0", TIED, None),
        ("blk.0.ffn_up_exps.weight", (8, 64, 64), "q8_0", MIXTRAL, "q8_0"),
    ],
)
def test_each_tensor_gets_the_type_that_llama_quantize_gives_it(
    name: str, shape: tuple[int, ...], wanted: str, model: ModelFacts, expected: str | None
) -> None:
    found = choose(info(name, *shape), wanted, model)
    assert found.ggml_type == (1 if expected is None else int(gguf.GGMLQuantizationType[expected.upper()]))
    assert bool(found.reason) == (found.ggml_type != gguf.GGMLQuantizationType[wanted.upper()])


def test_metadata_and_tensors_that_nobody_knows_pass_untouched(files: Files) -> None:
    others = {
        "odd.i32.weight": np.arange(12, dtype=np.int32).reshape(3, 4),
        "odd.f64": np.array(0.5),
        "odd.nothing": np.zeros((0, 4), np.float32),
        "blk.0.ffn_up_exps.weight": np.linspace(-1, 1, 3 * 5 * 32, dtype=np.float32).reshape(3, 5, 32),
        "z.q6_k.bias": quantised(np.ones((2, 32)), "Q8_0"),
    }
    Path("a.gguf").write_bytes(build_gguf({"general.file_type": 0, **ODD}, others))
    files("a.gguf", "b.gguf", "--type", "q8_0")
    with open_gguf("a.gguf") as before, open_gguf("b.gguf") as after:
        assert list(after.tensors) == list(before.tensors)
        raw = after.raw_entries()
        assert all(raw[key] == entry for key, entry in before.raw_entries().items() if key != "general.file_type")
        assert after.metadata["general.file_type"] == FILE_TYPES["q8_0"]
        assert after.metadata["general.quantization_version"] == 2
        assert [step.split(": ")[1] for step in after.metadata[STEPS_KEY]] == ["from a.gguf, weights to q8_0"]
        assert after.alignment == 64
        for name in set(others) - {"blk.0.ffn_up_exps.weight"}:
            assert after.raw(name).tobytes() == before.raw(name).tobytes()
        assert after.tensors["blk.0.ffn_up_exps.weight"].shape == (3, 5, 32)
    files("b.gguf", "c.gguf", "--type", "f16")
    with open_gguf("c.gguf") as again:
        assert len(again.metadata[STEPS_KEY]) == 2


def test_parts_have_llama_cpps_names_and_keys_and_become_the_same_file_again(files: Files) -> None:
    Path("a.gguf").write_bytes(build_gguf({**model_metadata(TinyModel()), **ODD}, model_tensors(TinyModel())))
    files("a.gguf", "p.gguf", "--split-max-size", "1M")
    names = sorted(name for name in os.listdir(".") if name.startswith("p-"))
    assert len(names) > 2
    assert names == [f"p-{i + 1:05d}-of-{len(names):05d}.gguf" for i in range(len(names))]
    assert main(["validate", names[1]]) == 0
    assert all(os.path.getsize(name) <= 10**6 for name in names)
    split = gguf.GGUFReader(names[1]).fields
    assert [split[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")] == [1, len(names), 20]
    assert split["split.no"].types == [gguf.GGUFValueType.UINT16]
    for i in (0, 2):
        files(names[i], "b.gguf")
        assert files.read("b.gguf") == files.read("a.gguf")
    files(names[1], "q.gguf", "--type", "q8_0", "--split-max-size", "1G")
    files("q-00001-of-00001.gguf", "r.gguf")
    files("a.gguf", "s.gguf", "--type", "q8_0")
    assert files.read("r.gguf")[-1000:] == files.read("s.gguf")[-1000:]


def test_what_is_quantised_is_quantised_again_only_where_that_is_allowed(files: Files) -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="Q8_0"))
    files("a.gguf", "b.gguf", "--type", "q4_0", status=2)
    assert "--requantise allows it" in files.err
    assert not os.path.exists("b.gguf")
    files("a.gguf", "b.gguf", "--type", "q4_0", "--requantise")
    files("a.gguf", "c.gguf", "--type", "f16")  # wider floats lose nothing
    files("a.gguf", "d.gguf", "--type", "q8_0")
    assert files.read("d.gguf")[-1000:] == files.read("a.gguf")[-1000:]


def test_a_dry_run_lists_what_would_be_refused_and_then_refuses(files: Files) -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="Q8_0"))
    shown = files("a.gguf", "b.gguf", "--type", "q4_0", "--dry-run", status=2)
    row = next(line for line in shown.splitlines() if line.startswith("blk.0.attn_q.weight"))
    assert row.split()[-4:] == ["Q8_0", "Q4_0", "36,864", "refused"]
    assert "nothing was written" in files.err and "--requantise allows it" in files.err
    assert not os.path.exists("b.gguf")


def test_a_shard_that_is_larger_than_asked_is_named_with_what_makes_it_so(files: Files) -> None:
    tensors = {"a.weight": np.zeros((1024, 512), np.float32), "b.weight": np.zeros((4, 512), np.float32)}
    Path("a.gguf").write_bytes(build_gguf({"general.architecture": "x"}, tensors))
    files("a.gguf", "b.gguf", "--split-max-size", "1M")
    expected = "has 2.10 MB, more than --split-max-size 1M: its tensor 'a.weight' has 2.10 MB, which is not divided"
    assert f"b-00001-of-00002.gguf {expected}" in files.err
    assert "b-00002-of-00002.gguf has" not in files.err


def test_sizes_of_tensors_are_compared_with_tensors(files: Files) -> None:
    tensors = {"a.weight": np.zeros((1000, 512), np.float32)}
    Path("a.gguf").write_bytes(build_gguf({"general.architecture": "x", "x.long": "y" * 10**6}, tensors))
    files("a.gguf", "b.gguf", "--type", "f16")
    assert "2.05 MB of tensors to 1.02 MB" in files.err and "the file has 2.02 MB" in files.err


@pytest.mark.parametrize(("name", "reason"), [("q4_k_m", True), ("Q6_K", True), ("iq2_xs", True), ("q9", False)])
def test_a_type_that_is_not_written_is_refused_with_the_reason(files: Files, name: str, reason: bool) -> None:
    files("a.gguf", "b.gguf", "--type", name, status=2)
    assert f"--type: expected one of {', '.join(FILE_TYPES)}, found '{name.lower()}'" in files.err
    assert ("are read and not written" in files.err) is reason


def test_a_dry_run_and_json_say_what_becomes_of_each_tensor(files: Files) -> None:
    write_tiny(Path("a.gguf"), TinyModel(weights="F16"))
    told = json.loads(files("a.gguf", "b.gguf", "--type", "q4_0", "--dry-run", "--json"))
    assert not os.path.exists("b.gguf")
    assert not told["written"]
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert by_name["token_embd.weight"]["to"] == "Q8_0"
    assert by_name["token_embd.weight"]["reason"] == "the output layer"
    shown = files("a.gguf", "b.gguf", "--type", "q4_0", "--dry-run")
    row = next(line for line in shown.splitlines() if line.startswith("blk.0.attn_q.weight"))
    assert row.split() == ["blk.0.attn_q.weight", "256", "x", "256", "F16", "Q4_0", "36,864"]
    assert "5 (one-dimensional), 1 (the output layer)" in files.err
    written = json.loads(files("a.gguf", "b.gguf", "--type", "q4_0", "--json"))
    assert written["files"] == [{"path": "b.gguf", "bytes": told["bytes"], "tensors": 20}]
    assert os.path.getsize("b.gguf") == told["bytes"]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("a.gguf", "a.gguf"), 2, "a.gguf: is a file to be converted; give another name"),
        (("a.gguf", "link.gguf"), 2, "link.gguf: is a file to be converted"),
        (("s-00001-of-00002.gguf", "s-00002-of-00002.gguf"), 2, "is the name of a shard"),
        (("s-00001-of-00002.gguf", "s.gguf", "--split-max-size", "1G", "--type", "f16"), 0, ""),
        (("s-00002-of-00002.gguf", "s.gguf", "--split-max-size", "400M"), 0, ""),
        (("a.gguf", "b.gguf", "--split-max-size", "2T"), 2, "--split-max-size: expected a number with M or G"),
        (
            ("a.gguf", "b.gguf", "--split-max-size", "9" * 5000 + "M"),
            2,
            "expected a number with M or G, as in 2G, found '9",
        ),
        (("a.gguf", "b.gguf", "--split-max-size", "٣M"), 2, "as in 2G, found '\\u0663M'"),
        (("a.gguf", "b.session"), 2, "a model becomes a GGUF or a folder for mlx-lm; expected"),
        (("a.gguf", "b.what", "--to", "sequence"), 2, "a model becomes a GGUF"),
        (("a.gguf", "no/b.gguf"), 2, "does not exist; make it first"),
        (
            ("a.gguf", "b.gguf", "-ctk", "q8_0"),
            2,
            "-ctk: has no effect where a.gguf, a GGUF of weights, becomes a GGUF of weights",
        ),
        (("a.gguf", "b.gguf", "-m", "a.gguf"), 2, "-m: has no effect where a.gguf"),
        (
            ("session", "b.kv.gguf", "--type", "q8_0"),
            2,
            "--type: has no effect where session, a llama.cpp session, becomes a prompt cache",
        ),
        (("session", "b.kv.gguf", "--dry-run"), 2, "--dry-run: has no effect where session"),
        (("other.gguf", "b.gguf"), 2, "found a calibration; copy it"),
        (("nothing.gguf", "b.gguf"), 1, "nothing.gguf: cannot be opened"),
        (("text", "b.gguf"), 1, "text: expected a model (a GGUF, a Hugging Face folder) or a prompt cache"),
        (("empty", "b.gguf"), 1, "found an empty file (0 bytes)"),
        (("empty", "b.session"), 1, "found an empty file (0 bytes)"),
        (("prose", "b.gguf"), 1, "found a file that begins with Once"),
        (("a.gguf", "b.gguf", "--requantise"), 2, "--requantise: has no effect on weights without --type"),
        (("nan.gguf", "b.gguf", "--type", "q8_0"), 1, "nan.gguf: tensor output.weight, rows from 0 on"),
        *(
            (
                ("big.gguf", "b.gguf", "--type", wanted),
                1,
                f"in row 1 of them is too large for {wanted}; leave out --type",
            )
            for wanted in FILE_TYPES
            if wanted not in ("f32", "bf16")
        ),
        (
            ("big.gguf", "b.gguf", "--type", "q8_0"),
            1,
            "big.gguf: tensor a.weight, rows from 0 on: -1e+30 in row 1 of them is too large for q8_0",
        ),
        (("huge.gguf", "b.gguf", "--type", "bf16"), 1, "3.4e+38 in row 0 of them is too large for bf16"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    files: Files, argv: tuple[str, ...], status: int, message: str
) -> None:
    data = Path(__file__).parent / "data"
    write_tiny(Path("a.gguf"), TinyModel())
    os.link("a.gguf", "link.gguf")
    write_split(Path("."), "s", {}, [{"a": np.zeros(4, np.float32)}, {"b": np.zeros(4, np.float32)}])
    shutil.copy(data / "fork_turbo3.session", "session")
    Path("other.gguf").write_bytes(build_gguf({"general.type": "kv-calibration"}))
    Path("text").write_text('{"error": "not found"}')
    Path("empty").touch()
    Path("prose").write_text("Once upon a time")
    Path("nan.gguf").write_bytes(
        build_gguf({}, {"output.weight": np.where(np.eye(32) > 0, np.nan, 1).astype(np.float32)})
    )
    for name, place, value in (("big", (1, 40), -1e30), ("huge", (0, 0), 3.4e38)):
        values = np.ones((3, 64), np.float32)
        values[place] = value
        Path(f"{name}.gguf").write_bytes(build_gguf({}, {"a.weight": values}))
    before = sorted(os.listdir("."))
    files(*argv, status=status)
    assert message in files.err
    if status:
        assert files.err.count("\n") == 1
        assert sorted(os.listdir(".")) == before


def test_a_disk_without_room_is_noticed_before_anything_is_written(files: Files, monkeypatch: Any) -> None:
    write_tiny(Path("a.gguf"), TinyModel())
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    files("a.gguf", "b.gguf", status=1)
    assert "are to be written, and 1,000 are free on that disk" in files.err
    assert os.listdir(".") == ["a.gguf"]


def test_the_model_still_answers_by_the_name_that_is_on_stdout(files: Files) -> None:
    write_tiny(Path("a.gguf"), TinyModel(head_dim=128))
    first = files("a.gguf", "b.gguf", "--type", "q8_0", "--split-max-size", "1M").rstrip("\n")
    assert main(["run", "-m", first, "-p", "a", "-n", "2", "--no-conversation"]) == 0
