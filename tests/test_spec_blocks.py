"""spec/vectors hold for an implementation made from spec/ alone (plain_blocks), for the package, for others' work."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import plain_blocks as plain
import pytest

from tqgguf.formats.blocks.balance import (
    RopeLayout,
    balance_rows,
    centred_squares,
    channel_scale,
    counted_rows,
    page_mean,
    unbalance_rows,
)
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import Codec, make_codec, resolve_codec, turbo_rotation
from tqgguf.formats.blocks.rotation import Rotation

VECTORS = Path(__file__).parent.parent / "spec" / "vectors"
NOT_BLOCKS = ("page.json", "page-outliers.json", "turbo-fork.json")
BLOCK_FILES = sorted(path.name for path in VECTORS.glob("*.json") if path.name not in NOT_BLOCKS)
TURBO = ("turbo4", "turbo3", "turbo2")


@cache
def load(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


def as_f32(values: list[float]) -> str:
    return struct.pack(f"<{len(values)}f", *values).hex()


def codec_of(case: dict[str, Any], head_dim: int) -> Codec:
    if case["type"] in TURBO:
        return resolve_codec(case["type"], head_dim, "k")
    chunk = case.get("chunk")
    return make_codec(case["type"], head_dim, Rotation(chunk, signed=False) if chunk else None)


def test_the_vectors_cover_every_type_and_every_block_size_and_stay_small() -> None:
    seen = {(case["type"], len(plain.floats(load(name)["inputs_f32"][case["input"]])))
            for name in BLOCK_FILES for case in load(name)["cases"]}  # fmt: skip
    assert {name for name, _ in seen} == set(BLOCK_TYPES)
    assert {(name, n) for name in TURBO for n in (64, 96, 128, 192, 256)} <= seen
    assert sum(path.stat().st_size for path in VECTORS.parent.rglob("*") if path.is_file()) < 1 << 20


@pytest.mark.parametrize("name", BLOCK_FILES)
def test_plain_loops_over_the_tables_give_the_bytes_and_values_of(name: str) -> None:
    vectors = load(name)
    for case in vectors["cases"]:
        x = plain.floats(vectors["inputs_f32"][case["input"]])
        about = (case["input"], case["type"], case.get("side"))
        row = plain.encode_row(case["type"], x, case.get("chunk"))
        assert row.hex() == case["bytes"], about
        for field, rotated in (("decoded_f32", False), ("decoded_rotated_f32", True)):
            if field in case:
                decoded = plain.decode_row(case["type"], row, len(x), case.get("chunk"), rotated=rotated)
                assert as_f32(decoded) == case[field], (*about, field)


@pytest.mark.parametrize("name", BLOCK_FILES)
def test_the_package_gives_the_bytes_and_values_of(name: str) -> None:
    vectors = load(name)
    for case in vectors["cases"]:
        x = np.frombuffer(bytes.fromhex(vectors["inputs_f32"][case["input"]]), "<f4")
        codec, about = codec_of(case, len(x)), (case["input"], case["type"], case.get("side"))
        row = codec.encode(x)
        assert row.tobytes().hex() == case["bytes"], about
        for field, decode in (("decoded_f32", codec.decode), ("decoded_rotated_f32", codec.decode_rotated)):
            if field in case:
                assert decode(row).tobytes().hex() == case[field], (*about, field)


def test_rotations_of_ggml_types_in_the_vectors_are_those_that_a_cache_has() -> None:
    for case in load("ggml-rotated.json")["cases"]:
        for side in ("k", "v"):
            if side in case["side"].split(" and "):
                codec = resolve_codec(case["type"], case["head_dim"], side)
                assert codec == codec_of(case, case["head_dim"])


def test_blocks_that_gguf_py_confirms_are_its_own_bytes() -> None:
    vectors = load("ggml-plain.json")
    confirmed = [case for case in vectors["cases"] if case["confirmed_by"]]
    assert len(confirmed) >= 70 and {case["type"] for case in confirmed} == {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0"}
    for case in confirmed:
        x = np.frombuffer(bytes.fromhex(vectors["inputs_f32"][case["input"]]), "<f4")
        kind = gguf.GGMLQuantizationType(BLOCK_TYPES[case["type"]].ggml_type)
        assert gguf.quants.quantize(x[None], kind).tobytes().hex() == case["bytes"]


# A fork's C code: generation 2, turbo4 with a second norm that is always zero, infinite norms where ours are clamped.
FORK = load("turbo-fork.json")
INFINITE_NORM = b"\x00\x7c"
NON_FINITE = {"lcg_nan_at5", "lcg_inf_at5", "lcg_neginf_at5"}


def fork_block(case: dict[str, Any]) -> bytes:
    block = bytes.fromhex(case["bytes"])
    if case["type"] == "turbo4":
        assert len(block) == 68 and block[2:4] == b"\0\0"
        block = block[:2] + block[4:]
    return block


FINITE_CASES = [case for case in FORK["cases"] if case["input"] not in NON_FINITE]


def test_exactly_these_fork_vectors_are_not_finite() -> None:
    inputs = {name: np.array(plain.floats(text)) for name, text in FORK["inputs_f32"].items()}
    assert {name for name, x in inputs.items() if not np.isfinite(x).all()} == NON_FINITE
    assert len(FORK["inputs_f32"]) == 34 and len(FORK["cases"]) == 3 * 34


def test_a_forks_blocks_of_generation_2_are_ours_but_for_infinite_norms() -> None:
    for case in FINITE_CASES:
        expected = fork_block(case)
        if expected[:2] == INFINITE_NORM:
            expected = b"\xff\x7b" + expected[2:]
        x = plain.floats(FORK["inputs_f32"][case["input"]])
        assert plain.encode_row(case["type"], x, generation=2) == expected, (case["input"], case["type"])
        codec = make_codec(case["type"], 128, turbo_rotation(128), generation=2)
        assert codec.encode(x).tobytes() == expected, (case["input"], case["type"])


def test_a_forks_blocks_decode_to_the_forks_values() -> None:
    decoded = [case for case in FINITE_CASES if "decoded_first8" in case]
    assert len(decoded) > 80
    for case in decoded:
        block, expected = fork_block(case), np.array(case["decoded_first8"])
        rotated = plain.decode_row(case["type"], block, 128, generation=2, rotated=True)
        assert as_f32(rotated[:8]) == case["decoded_rotated_first8_f32"]
        restored = np.array(plain.decode_row(case["type"], block, 128, generation=2)[:8])
        np.testing.assert_allclose(restored, expected, rtol=1e-6, atol=1e-6 * np.abs(restored).max())
        codec = make_codec(case["type"], 128, turbo_rotation(128), generation=2)
        assert codec.decode(np.frombuffer(block, np.uint8))[:8].tolist() == restored.tolist()


def test_the_forks_code_with_the_tables_of_generation_3_gives_our_bytes() -> None:
    assert len(FORK["generation_3"]) == 12
    for case in FORK["generation_3"]:
        x = plain.floats(FORK["inputs_f32"][case["input"]])
        assert plain.encode_row(case["type"], x).hex() == case["bytes"]
        assert resolve_codec(case["type"], 128, "k").encode(x).tobytes().hex() == case["bytes"]


# A page: arrays of page.json as [n_kv_heads, tokens, head_dim].
PAGE = load("page.json")
HEADS, DIM = PAGE["n_kv_heads"], PAGE["head_dim"]


def page_rows() -> np.ndarray:
    return np.frombuffer(bytes.fromhex(PAGE["rows_f16"]), "<f2").reshape(128, HEADS, DIM).swapaxes(0, 1)


def array(text: str, dtype: str, *shape: int) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype).reshape(shape)


def used_scale() -> np.ndarray:
    scales = PAGE["channel_scale"]
    return array(scales["by_rope_layout_f32"][scales["used"]], "<f4", HEADS, DIM)


@pytest.mark.parametrize(("field", "n_prefix"), [("mean_behind_prefix_f16", 4), ("mean_of_all_rows_f16", 0)])
def test_the_mean_of_a_page_is_that_of_the_spec(field: str, n_prefix: int) -> None:
    by_loops = [plain.page_mean(rows.astype(float).tolist(), n_prefix) for rows in page_rows()]
    assert np.array(by_loops, "<f2").tobytes().hex() == PAGE[field]
    assert page_mean(page_rows(), n_prefix).tobytes().hex() == PAGE[field]


PAIRS = {
    "halves_64": (RopeLayout(64), [(i, i + 32) for i in range(32)]),
    "neighbours_64": (RopeLayout(64, traditional=True), [(i, i + 1) for i in range(0, 64, 2)]),
    "halves_32": (RopeLayout(32), [(i, i + 16) for i in range(16)]),
    "none": (RopeLayout(0), []),
}


@pytest.mark.parametrize("layout", PAIRS)
def test_the_channel_scale_is_that_of_the_spec(layout: str) -> None:
    given = PAGE["channel_scale"]
    rope, pairs = PAIRS[layout]
    expected = array(given["by_rope_layout_f32"][layout], "<f4", HEADS, DIM)
    q, k = np.array(given["query_squares"]), np.array(given["key_squares"])
    by_loops = [plain.channel_scale(q[h].tolist(), k[h].tolist(), pairs) for h in range(HEADS)]
    np.testing.assert_allclose(by_loops, expected, rtol=given["relative_tolerance"])
    np.testing.assert_allclose(channel_scale(q, k, rope), expected, rtol=given["relative_tolerance"])
    centred = (
        page_rows()[:, 4:].astype(float)
        - array(PAGE["mean_behind_prefix_f16"], "<f2", HEADS, DIM).astype(float)[:, None]
    )
    np.testing.assert_allclose((centred**2).sum(axis=1), k, rtol=1e-6)


@pytest.mark.parametrize("page", PAGE["pages"], ids=lambda page: f"{page['side']}-{page['type']}")
def test_blocks_of_a_page_are_those_of_the_spec(page: dict[str, Any]) -> None:
    n_prefix, balanced = page["exact_prefix"], page["balance"] != "off"
    mean = array(PAGE["mean_behind_prefix_f16"], "<f2", HEADS, DIM) if balanced else np.zeros((HEADS, DIM), np.float16)
    scale = used_scale() if page["balance"] == "full" else np.ones((HEADS, DIM), np.float32)
    codec = resolve_codec(page["type"], DIM, page["side"])
    chunk = None if page["type"] in TURBO else 64

    rows = page_rows().astype(np.float32)
    if balanced:
        rows = balance_rows(page_rows(), mean, scale)
    rows[:, :n_prefix] = 0
    blocks = codec.encode(rows)
    assert blocks.swapaxes(0, 1).tobytes().hex() == page["blocks"]

    stored = array(page["blocks"], "u1", 128, HEADS, codec.row_bytes)
    decoded = unbalance_rows(codec.decode(blocks), mean, scale) if balanced else codec.decode(blocks)
    for head in range(HEADS):
        means, scales = mean[head].astype(float).tolist(), scale[head].tolist()
        for token in (0, n_prefix - 1, *range(n_prefix, 128, 3), 127):
            row = page_rows()[head, token].astype(float).tolist()
            row = plain.balance(row, means, scales) if balanced else row
            row = [0.0] * DIM if token < n_prefix else row
            assert plain.encode_row(page["type"], row, chunk) == stored[token, head].tobytes()
        for token, text in page["decoded_f32"].items():
            expected = array(text, "<f4", HEADS, DIM)[head].tolist()
            values = plain.decode_row(page["type"], stored[int(token), head].tobytes(), DIM, chunk)
            assert (plain.unbalance(values, means, scales) if balanced else values) == expected
            decoded = codec.decode(blocks)
            assert (unbalance_rows(decoded, mean, scale) if balanced else decoded)[
                head, int(token)
            ].tolist() == expected


# The same with rows far outside: arrays of page-outliers.json.
OUTLIERS = load("page-outliers.json")


def test_rows_far_outside_are_those_of_the_spec() -> None:
    n_heads, n_prefix = OUTLIERS["n_kv_heads"], OUTLIERS["exact_prefix"]
    rows = array(OUTLIERS["rows_f16"], "<f2", 128, n_heads, DIM).swapaxes(0, 1)
    expected = [[9, *range(20, 50), 60, 127], [77]]
    assert OUTLIERS["far_outside"] == expected
    for head, counts in enumerate(counted_rows(rows, n_prefix)):
        assert (np.flatnonzero(~counts) + n_prefix).tolist() == expected[head]
        by_loops = plain.counted_rows(rows[head].astype(float).tolist(), n_prefix)
        assert sorted({*range(n_prefix, 128)} - {*by_loops}) == expected[head]
    by_loops = [plain.page_mean(of_head, n_prefix) for of_head in rows.astype(float).tolist()]
    assert np.array(by_loops, "<f2").tobytes().hex() == OUTLIERS["mean_f16"]
    assert page_mean(rows, n_prefix).tobytes().hex() == OUTLIERS["mean_f16"]


def test_blocks_of_a_page_with_rows_far_outside_are_those_of_the_spec() -> None:
    n_heads, n_prefix = OUTLIERS["n_kv_heads"], OUTLIERS["exact_prefix"]
    rows = array(OUTLIERS["rows_f16"], "<f2", 128, n_heads, DIM).swapaxes(0, 1)
    mean, a = (
        array(OUTLIERS["mean_f16"], "<f2", n_heads, DIM),
        array(OUTLIERS["channel_scale_f32"], "<f4", n_heads, DIM),
    )
    exact = (rows.astype(float) - mean.astype(float)[:, None]) ** 2
    counts = [[t for t in range(n_prefix, 128) if t not in outside] for outside in OUTLIERS["far_outside"]]
    squares = np.stack([of_head[tokens].sum(axis=0) for of_head, tokens in zip(exact, counts, strict=True)])
    queries, tolerance = np.array(OUTLIERS["query_squares"]), OUTLIERS["relative_tolerance"]
    np.testing.assert_allclose(OUTLIERS["key_squares"], squares, rtol=tolerance)
    np.testing.assert_allclose(centred_squares(rows, mean, n_prefix), squares, rtol=tolerance)
    np.testing.assert_allclose(channel_scale(queries, squares, RopeLayout(DIM)), a, rtol=tolerance)
    pairs = PAIRS["halves_64"][1]
    by_loops = [plain.channel_scale(queries[h].tolist(), squares[h].tolist(), pairs) for h in range(n_heads)]
    np.testing.assert_allclose(by_loops, a, rtol=tolerance)
    for page in OUTLIERS["pages"]:
        codec = resolve_codec(page["type"], DIM, "k")
        scale = a if page["balance"] == "full" else np.ones_like(a)
        coded = balance_rows(rows, mean, scale)
        coded[:, :n_prefix] = 0
        assert codec.encode(coded).swapaxes(0, 1).tobytes().hex() == page["blocks"]
        stored = array(page["blocks"], "u1", 128, n_heads, codec.row_bytes)
        for head, token in ((0, 3), (0, 9), (0, 10), (0, 30), (0, 126), (0, 127), (1, 77), (1, 78)):
            by_head = (x[head].astype(float).tolist() for x in (rows[:, token], mean, scale))
            row = plain.balance(*by_head) if token >= n_prefix else [0.0] * DIM
            chunk = None if page["type"] in TURBO else 64
            assert plain.encode_row(page["type"], row, chunk) == stored[token, head].tobytes()


@pytest.mark.parametrize("result", PAGE["attention"]["results"], ids=lambda result: f"window-{result['window']}")
def test_attention_from_rotated_blocks_by_the_steps_of_the_spec(result: dict[str, Any]) -> None:
    given, (key_page, _, value_page) = PAGE["attention"], PAGE["pages"]
    query = array(given["query_f32"], "<f4", HEADS, -1, DIM)
    tails = [array(given[f"tail_{side}_f16"], "<f2", 3, HEADS, DIM).astype(float) for side in "kv"]
    mean, scale = array(PAGE["mean_behind_prefix_f16"], "<f2", HEADS, DIM).astype(float), used_scale().astype(float)
    first = 0 if result["window"] is None else given["position"] + 1 - result["window"]
    out = []
    for head in range(HEADS):
        codecs = [resolve_codec(page["type"], DIM, page["side"]) for page in (key_page, value_page)]
        keys, values = (
            codec.decode_rotated(array(page["blocks"], "u1", 128, HEADS, codec.row_bytes)[:, head]).astype(float)
            for codec, page in zip(codecs, (key_page, value_page), strict=True)
        )
        exact = page_rows()[head, :4].astype(float)
        for q in query[head].astype(float):
            coded = codecs[0].rotate(q / scale[head]).astype(float)
            scores = np.concatenate([exact @ q, keys[4:] @ coded + mean[head] @ q, tails[0][:, head] @ q])
            weights = np.exp(given["scale"] * scores[first:] - (given["scale"] * scores[first:]).max())
            weights = np.concatenate([np.zeros(first), weights / weights.sum()])
            in_blocks = codecs[1].unrotate(weights[4:128] @ values[4:])
            out.append(in_blocks + weights[:4] @ exact + weights[128:] @ tails[1][:, head])
    np.testing.assert_allclose(out, result["output"], atol=given["absolute_tolerance"])
