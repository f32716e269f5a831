"""A split GGUF model is opened by naming any of its shards, and a set that is not whole says which file is at fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_builder import I32, STRING, U16, Tensor, Typed, build_gguf, quantised, tensor_of, write_split

import tqgguf
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.rules.table import RULES

METADATA = {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"]}
TENSORS = {
    "token_embd.weight": np.arange(64, dtype=np.float32).reshape(2, 32),
    "blk.0.attn_q.weight": quantised(np.ones((2, 32), np.float32), "Q8_0"),
    "blk.1.attn_q.weight": np.arange(32, dtype=np.float16),
}
SHARDS = [{name: tensor} for name, tensor in TENSORS.items()]


def split_keys(number: int, count: int = 3, n_tensors: int = 3) -> dict[str, Typed]:
    return {
        "split.no": Typed(U16, number),
        "split.count": Typed(U16, count),
        "split.tensors.count": Typed(I32, n_tensors),
    }


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """A sound set of three shards with one tensor each."""
    return write_split(tmp_path, "model", METADATA, SHARDS)


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_shard_opens_the_whole_model(named: int, paths: list[Path]) -> None:
    with open_gguf(paths[named]) as file:
        assert file.path == str(paths[named])
        assert file.paths == tuple(map(str, paths))
        assert file.text("general.architecture") == "llama"
        assert file.texts("tokenizer.ggml.tokens") == ["a", "b"]
        assert list(file.tensors) == list(TENSORS)
        assert [info.shard for info in file.tensors.values()] == [0, 1, 2]
        assert np.array_equal(file.array("token_embd.weight"), TENSORS["token_embd.weight"])
        assert file.array("blk.0.attn_q.weight").tobytes() == TENSORS["blk.0.attn_q.weight"].data
        assert np.array_equal(file.array("blk.1.attn_q.weight"), TENSORS["blk.1.attn_q.weight"])


def test_a_shard_is_found_beside_the_named_one_from_any_working_folder(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(paths[0].parent)
    with open_gguf(paths[1].name) as file:
        assert len(file.tensors) == 3


def test_a_set_of_gguf_pys_writer_is_opened(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    values = {f"t{i}": np.full((3, 4), i, np.float32) for i in range(5)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "model-00003-of-00003.gguf") as file:
        assert file.text("general.architecture") == "llama"
        assert list(file.tensors) == list(values)
        assert all(np.array_equal(file.array(name), value) for name, value in values.items())


def test_a_set_of_one_is_a_plain_file_under_any_name(tmp_path: Path) -> None:
    for name in ("model-00001-of-00001.gguf", "renamed.gguf"):
        (tmp_path / name).write_bytes(build_gguf({**METADATA, **split_keys(0, 1)}, TENSORS))
        with open_gguf(tmp_path / name) as file:
            assert len(file.paths) == 1 and len(file.tensors) == 3


def remove(paths: list[Path]) -> Path:
    paths[1].unlink()
    return paths[2]


def remove_two(paths: list[Path]) -> Path:
    paths[0].unlink()
    paths[1].unlink()
    return paths[2]


def rename(paths: list[Path]) -> Path:
    return paths[1].rename(paths[1].with_name("second.gguf"))


def swap(paths: list[Path]) -> Path:
    other = paths[1].with_name("other")
    paths[1].rename(other)
    paths[2].rename(paths[1])
    other.rename(paths[2])
    return paths[0]


def swap_and_name_the_swapped(paths: list[Path]) -> Path:
    swap(paths)
    return paths[1]


def duplicate(paths: list[Path]) -> Path:
    shutil.copy(paths[1], paths[2])
    return paths[0]


def whole_model_under_a_shard_name(paths: list[Path]) -> Path:
    paths[0].write_bytes(build_gguf(METADATA, TENSORS))
    return paths[0]


def rewrite(index: int, **changes: object) -> Callable[[list[Path]], Path]:
    """Shard `index` with some of its metadata changed (None: left out), opened by naming the first shard."""

    def damage(paths: list[Path]) -> Path:
        keys = {**(METADATA if index == 0 else {}), **split_keys(index), **changes}
        keys = {key: value for key, value in keys.items() if value is not None}
        paths[index].write_bytes(build_gguf(keys, SHARDS[index]))
        return paths[0]

    return damage


def same_tensor_twice(paths: list[Path]) -> Path:
    paths[2].write_bytes(build_gguf(split_keys(2), SHARDS[1]))
    return paths[0]


def one_tensor_too_few(paths: list[Path]) -> Path:
    paths[2].write_bytes(build_gguf(split_keys(2), {}))
    return paths[0]


def cut(paths: list[Path]) -> Path:
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    return paths[0]


FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3))

# name of the case: (what is done to the set, code, the file at fault, what the message says)
DAMAGED: dict[str, tuple[Callable[[list[Path]], Path], str, str, str]] = {
    "a shard is missing": (remove, "split-missing", THIRD, f"split into 3 files, and {SECOND} is missing beside"),
    "two shards are missing": (remove_two, "split-missing", THIRD, f"{FIRST} and 1 more is missing"),
    "the named shard was renamed": (rename, "split-name", "second.gguf", "it is shard 2 of 3, expected a name"),
    "two shards changed names": (swap, "split-number", SECOND, "split.no is 2, expected 1"),
    "the named shard changed its name": (swap_and_name_the_swapped, "split-name", SECOND, "it is shard 3 of 3"),
    "a shard is a copy of another": (duplicate, "split-number", THIRD, "split.no is 1, expected 2"),
    "a whole model has a shard's name": (whole_model_under_a_shard_name, "split-name", FIRST, "give it another name"),
    "counts disagree": (rewrite(1, **split_keys(1, count=4)), "split-disagrees", SECOND, "is 4, expected 3"),
    "tensor counts disagree": (
        rewrite(2, **split_keys(2, n_tensors=9)), "split-disagrees", THIRD, f"is 9, expected 3, as {FIRST} says",
    ),
    "the first says another count": (rewrite(0, **split_keys(0, count=2)), "split-name", FIRST, "shard 1 of 2"),
    "tensors are missing": (one_tensor_too_few, "split-disagrees", FIRST, "but the shards have 2 tensors together"),
    "a tensor is in two shards": (same_tensor_twice, "duplicate-tensor", THIRD, f"is also in shard {SECOND}"),
    "shards of two models": (
        rewrite(1, **{"general.architecture": "qwen2"}), "split-disagrees", SECOND, "'qwen2', expected 'llama'",
    ),
    "a later shard says another name": (
        rewrite(1, **{"llama.block_count": 3}), "split-disagrees", SECOND, "'llama.block_count' is 3, expected 2 as in",
    ),
    "a later shard has other tokens": (
        rewrite(2, **{"tokenizer.ggml.tokens": ["a", "c"]}), "split-disagrees", THIRD, "is ['a', 'c'], expected",
    ),
    "an architecture of numbers": (
        rewrite(1, **{"general.architecture": [1, 2]}), "split-disagrees", SECOND, "is [1, 2], expected",
    ),
    "a shard has no number": (rewrite(1, **{"split.no": None}), "split-key", SECOND, "split.no is missing"),
    "a shard is no shard": (rewrite(1, **{"split.count": None}), "split-key", SECOND, "split.count is missing"),
    "number as text": (rewrite(1, **{"split.no": "1"}), "split-key", SECOND, "split.no is STRING '1'"),
    "number below zero": (rewrite(0, **{"split.no": -1}), "split-key", FIRST, "split.no is I32 -1"),
    "number beyond the count": (rewrite(0, **{"split.no": 3}), "split-disagrees", FIRST, "split.no is 3 and split"),
    "count as texts": (rewrite(0, **{"split.count": Typed(STRING, ["3"])}), "split-key", FIRST, "is ARRAY of"),
    "absurd count": (rewrite(0, **{"split.count": 1 << 40}), "over-limit", FIRST, "split.count is 1099511627776"),
    "a later shard is cut": (cut, "truncated-data", THIRD, "truncated in the tensor data"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_set_names_the_file_at_fault(case: str, paths: list[Path]) -> None:
    damage, code, at_fault, fragment = DAMAGED[case]
    named = damage(paths)
    with pytest.raises(GgufError) as caught:
        open_gguf(named)
    assert caught.value.code == code, str(caught.value)
    assert caught.value.path == str(named.parent / at_fault)
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_every_defect_of_a_set_has_a_case() -> None:
    errors = {code for code, rule in RULES.items() if code.startswith("split-") and rule.severity == "error"}
    assert errors <= {code for _, code, _, _ in DAMAGED.values()}


PARTS = [f"{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "ffn_up")]


def layer(number: int, *type_names: str) -> dict[str, Tensor]:
    """The matrices of a layer, of these types in turn, and a norm."""
    types = type_names * len(PARTS)
    rows = {f"blk.{number}.{part}": quantised(np.ones((1, 32)), types[i]) for i, part in enumerate(PARTS)}
    return rows | {f"blk.{number}.attn_norm.weight": tensor_of(np.ones(32, np.float32))}


@pytest.mark.parametrize(
    ("shards", "found"),
    [
        ([layer(0, "Q4_0"), layer(1, "Q8_0"), layer(2, "Q4_0")], [SECOND]),
        ([layer(0, "Q4_0"), layer(1, "Q8_0"), layer(2, "Q8_0")], [FIRST]),
        ([layer(0, "Q4_0"), layer(1, "Q4_0"), layer(2, "Q4_0")], []),
        ([layer(0, "Q4_0", "Q8_0"), layer(1, "Q4_0"), layer(2, "Q4_0", "Q5_0")], []),
        ([{}, layer(1, "Q8_0"), layer(2, "Q8_0")], []),
        ([{"output.weight": quantised(np.ones((1, 32)), "Q8_0")}, layer(1, "Q4_0"), layer(2, "Q4_0")], []),
    ],
)
def test_shards_of_another_quantisation_are_worth_a_warning(tmp_path: Path, shards: Any, found: list[str]) -> None:
    paths = write_split(tmp_path, "model", METADATA, shards)
    warned = [finding.file for finding in tqgguf.validate(paths[0]) if finding.rule.name == "split-types"]
    assert warned == [str(tmp_path / name) for name in found]
    open_gguf(paths[0]).close()
