"""`tqgguf convert` of GGUFs that others write otherwise than most: all that is legal passes, byte for byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_builder import BOOL, F64, I64, U8, U64, Typed, build_gguf, quantised, tensor_of, write_split

from tqgguf.cli.main import main
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf

METADATA: dict[str, Any] = {
    "odd.empty text": "",
    "odd.unicode.ключ.鍵": "значение",
    "odd.KEY": "another key than odd.key",
    "odd.key": Typed(F64, -0.0),
    "odd.texts": ["", "a", "", "ü" * 300],
    "odd.nothing": Typed(U64, []),
    "odd.arrays of arrays": [[["deep"], []], [], [["a", ""], ["b"]]],
    "odd.numbers": Typed(I64, [-(1 << 63), (1 << 63) - 1]),
    "odd.flag": Typed(BOOL, True),
    "odd.bytes": Typed(U8, list(range(256))),
    "odd.not UTF-8": b"\xff\xfe\x00",
    "odd.long": "x" * 100_000,
}
RNG = np.random.default_rng(0)
TENSORS = {
    "z last by name, first in the list.weight": RNG.standard_normal((3, 64)).astype(np.float32),
    "тензор.weight": RNG.standard_normal((2, 32)).astype(np.float16),
    "one value": np.array([7], np.int8),
    "odd.numbers.weight": np.arange(6, dtype=np.int64).reshape(2, 3),
    "no values": np.zeros((0, 5), np.float32),
    "four dimensions.weight": RNG.standard_normal((2, 3, 1, 32)).astype(np.float32),
    "a first by name.bias": quantised(RNG.standard_normal((1, 32)), "Q5_1"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


def backwards(tensors: dict[str, Any], alignment: int) -> bytes:
    """A file whose tensors' data lies in the opposite order of their list."""
    made = {name: tensor_of(values) for name, values in tensors.items()}
    offset, offsets = 0, {}
    for name in reversed(made):
        offsets[name] = offset
        offset += len(made[name].data) + -len(made[name].data) % alignment
    listed = {name: tensor_of(tensor, offset=offsets[name], data=b"") for name, tensor in made.items()}
    head = build_gguf({"general.alignment": alignment, **METADATA}, listed)
    data = b"".join(made[name].data + bytes(-len(made[name].data) % alignment) for name in reversed(made))
    return head + data


def held(file: GGUFFile) -> tuple[dict[str, bytes], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Entries of the metadata as their bytes, tensors as type, shape and bytes."""
    tensors = {name: (info.type_name, info.shape, file.raw(name).tobytes()) for name, info in file.tensors.items()}
    return {key: bytes(raw) for key, raw in file.raw_entries().items()}, tensors


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_any_alignment_and_order_passes(alignment: int, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.gguf").write_bytes(backwards(TENSORS, alignment))
    assert main(["validate", "a.gguf"]) == 0, capsys.readouterr()
    assert main(["convert", "a.gguf", "b.gguf"]) == 0, capsys.readouterr()
    with open_gguf("a.gguf") as before, open_gguf("b.gguf") as after:
        assert held(after) == held(before)
        assert list(after.tensors) == list(before.tensors)
        assert after.alignment == alignment
        assert all(info.offset % alignment == 0 for info in after.tensors.values())
    assert main(["convert", "b.gguf", "c.gguf"]) == 0
    assert Path("c.gguf").read_bytes() == Path("b.gguf").read_bytes()


@pytest.mark.parametrize("alignment", [8, 4096])
def test_parts_keep_the_alignment_and_become_the_same_file_again(alignment: int) -> None:
    large = {f"blk.{i}.ffn_up.weight": RNG.standard_normal((512, 512)).astype(np.float32) for i in range(2)}
    Path("a.gguf").write_bytes(backwards({**TENSORS, **large}, alignment))
    assert main(["convert", "a.gguf", "p.gguf", "--split-max-size", "1M"]) == 0
    parts = sorted(name for name in os.listdir(".") if name.startswith("p-"))
    assert len(parts) > 1
    for part in parts:
        reader = gguf.GGUFReader(part)
        assert reader.alignment == alignment
        assert all(int(tensor.data_offset) % alignment == 0 for tensor in reader.tensors)
    assert main(["convert", parts[-1], "whole.gguf"]) == 0
    assert main(["convert", "a.gguf", "copy.gguf"]) == 0
    assert Path("whole.gguf").read_bytes() == Path("copy.gguf").read_bytes()


def test_other_types_touch_weights_alone() -> None:
    Path("a.gguf").write_bytes(backwards(TENSORS, 4096))
    assert main(["convert", "a.gguf", "b.gguf", "--type", "q8_0"]) == 0
    with open_gguf("a.gguf") as before, open_gguf("b.gguf") as after:
        entries, tensors = held(before)
        made_entries, made = held(after)
        added = {"general.file_type", "general.quantization_version", "tqgguf.convert.steps"}
        assert set(made_entries) == set(entries) | added
        assert all(made_entries[key] == raw for key, raw in entries.items())
        changed = {name for name in tensors if made[name] != tensors[name]}
        assert changed == {
            "z last by name, first in the list.weight", "тензор.weight", "four dimensions.weight"
        }  # fmt: skip
        assert all(made[name][1] == tensors[name][1] for name in tensors)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader("b.gguf").tensors}
    values = TENSORS["four dimensions.weight"]
    expected = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert found["four dimensions.weight"].data.tobytes() == expected.tobytes()


def test_parts_without_tensors_become_one_file_with_the_others() -> None:
    names = write_split(Path("."), "s", METADATA, [{}, TENSORS, {}])
    assert main(["convert", str(names[2]), "b.gguf"]) == 0
    with open_gguf("b.gguf") as file:
        entries, tensors = held(file)
        assert set(entries) == set(METADATA)
        assert set(tensors) == set(TENSORS)
    assert main(["validate", "b.gguf"]) == 0


def test_a_version_2_file_becomes_one_of_version_3() -> None:
    Path("a.gguf").write_bytes(build_gguf(METADATA, TENSORS, version=2))
    assert main(["convert", "a.gguf", "b.gguf"]) == 0
    assert Path("b.gguf").read_bytes() == build_gguf(METADATA, TENSORS)


@pytest.mark.parametrize("wanted", ["f16", "q8_0"])
def test_tensors_without_values_pass(wanted: str) -> None:
    shapes = {"no columns.weight": (32, 0), "no rows.weight": (0, 32), "none at all.weight": (0, 0)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    Path("a.gguf").write_bytes(build_gguf(METADATA, {**tensors, "values.weight": np.ones((2, 32), np.float32)}))
    assert main(["convert", "a.gguf", "b.gguf", "--type", wanted]) == 0
    with open_gguf("b.gguf") as file:
        assert {name: info.shape for name, info in file.tensors.items() if not info.n_values} == shapes
        assert file.tensors["values.weight"].type_name == wanted.upper()
