"""The block type table agrees with ggml's sizes and ids, and with the published layouts of the turbo types."""

from __future__ import annotations

import gguf
import pytest

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, CACHE_TYPE_NAMES

IN_GGML = [t for t in BLOCK_TYPES.values() if t.ggml_type is not None]


@pytest.mark.parametrize("block_type", IN_GGML, ids=lambda t: t.name)
def test_ids_and_sizes_are_those_of_ggml(block_type):
    theirs = gguf.GGMLQuantizationType(block_type.ggml_type)
    assert theirs.name.lower() == block_type.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (block_type.block_size, block_type.block_bytes)


def test_turbo_types_have_no_ggml_id():
    assert {t.name for t in BLOCK_TYPES.values() if t.ggml_type is None} == {"turbo2", "turbo3", "turbo4"}


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        ("turbo2", {64: 18, 96: 26, 128: 34, 192: 50}),
        ("turbo3", {64: 26, 96: 38, 128: 50, 192: 74}),
        ("turbo4", {64: 34, 96: 50, 128: 66, 192: 98}),
    ],
)
def test_turbo_blocks_take_two_bytes_and_their_codes(name, n_bytes):
    assert {n: BLOCK_TYPES[name].bytes_for(n) for n in n_bytes} == n_bytes
    assert BLOCK_TYPES[name].block_bytes == n_bytes[128]


def test_names_are_the_command_lines_cache_types():
    names = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl turbo4 turbo3 turbo2"
    assert " ".join(CACHE_TYPE_NAMES) == names
    assert all(name == block_type.name for name, block_type in BLOCK_TYPES.items())


def test_fields_stand_in_the_order_in_which_they_lie_in_a_block():
    assert BLOCK_TYPES["turbo3"].fields == ("norm", "qs", "signs")
    assert BLOCK_TYPES["q5_1"].fields == ("d", "m", "qh", "qs")
    assert BLOCK_TYPES["q4_1"].n_scales == 2
    assert BLOCK_TYPES["f16"].n_scales == 0
