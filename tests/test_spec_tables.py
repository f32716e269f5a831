"""spec/tables.json has the package's numbers, and every table in spec's texts has those of tables.json."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tqgguf.formats.llama.format import VERSIONS

SPEC = Path(__file__).parent.parent / "spec"
TABLES: dict[str, Any] = json.loads((SPEC / "tables.json").read_text(encoding="utf-8"))
TYPES = {t["name"]: t for t in TABLES["types"]}
HEAD_DIMS = (64, 96, 128, 192, 256)
BLOCKS = (SPEC / "blocks.md").read_text(encoding="utf-8")
COMPATIBILITY = (SPEC / "compatibility.md").read_text(encoding="utf-8")

Rows = list[list[str]]


def module(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, SPEC / f"{name}.py")
    assert found is not None and found.loader is not None
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


def tables_of(text: str) -> dict[str, Rows]:
    """The body rows of each named table, cells as text."""
    parts = re.findall(r"^<!-- table: (\w+) -->\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return {name: [cells(line) for line in body.splitlines()[2:]] for name, body in parts}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]


def number(value: float | None) -> str:
    return "-" if value is None else str(int(value)) if value == int(value) and abs(value) < 1e6 else repr(value)


def short(value: float) -> str:
    return f"{value:.4g}"


def numbers(values: list[float]) -> str:
    return " ".join(number(value) for value in values)


def test_the_numbers_for_machines_are_the_packages() -> None:
    made = json.loads(json.dumps(module("make_tables").tables()))
    assert made == TABLES, "run python spec/make_tables.py"


def test_numbers_that_stand_for_float32_are_exact() -> None:
    books = [*TABLES["codebooks"], TABLES["iq4_nl"]]
    values = [v for book in books for v in (*book["values"], *book["boundaries"])]
    values += [b[key] for b in TABLES["turbo_blocks"] for key in ("rotation_factor", "codebook_factor")]
    values += [TABLES["limits"][key] for key in ("norm_floor", "iq4_nl_floor")]
    assert len(values) > 300
    assert all(float(np.float32(value)) == value for value in values)


def test_codebooks_are_the_tables_times_their_factor() -> None:
    factors = {b["values"]: np.float32(b["codebook_factor"]) for b in TABLES["turbo_blocks"]}
    halves = {(h["generation"], h["bits"]): h for h in TABLES["codebook_halves"]}
    for book in TABLES["codebooks"]:
        half, factor = halves[book["generation"], book["bits"]], factors[book["group"]]
        upper = [float(np.float32(v) * factor) for v in half["values"]]
        assert book["values"] == [-v for v in reversed(upper)] + upper
        edges = [float(np.float32(b) * factor) for b in half["boundaries"]]
        assert book["boundaries"] == [-b for b in reversed(edges[1:])] + edges


def test_a_blocks_fields_fill_it_in_order() -> None:
    blocks = [(t["bytes"], t["fields"]) for t in TABLES["types"]]
    blocks += [(b["bytes"][name], b["fields"][name]) for b in TABLES["turbo_blocks"] for name in b["bytes"]]
    for n_bytes, fields in blocks:
        assert [f["offset"] for f in fields] == [sum(g["bytes"] for g in fields[:i]) for i in range(len(fields))]
        assert sum(f["bytes"] for f in fields) == n_bytes


def expected_types() -> Rows:
    keys = ("name", "family", "ggml_type", "values", "bytes", "bits_per_value")
    return [[t[k] if isinstance(t[k], str) else number(t[k]) for k in keys] for t in TABLES["types"]]


def expected_layouts() -> Rows:
    return [
        [t["name"], *(str(field.get(k, "")) for k in ("name", "offset", "bytes", "holds", "bits", "shift", "order"))]
        for t in TABLES["types"]
        if t["family"] != "float"
        for field in t["fields"]
    ]


def expected_turbo_blocks() -> Rows:
    return [
        [str(n) for n in (b["values"], b["bytes"]["turbo4"], b["bytes"]["turbo3"], b["fields"]["turbo3"][2]["offset"],
                          b["bytes"]["turbo2"], b["parts"], b["part"])]
        for b in TABLES["turbo_blocks"]
    ]  # fmt: skip


def expected_factors() -> Rows:
    return [
        [str(b["values"]), str(b["part"]), repr(b["rotation_factor"]), repr(b["codebook_factor"])]
        for b in TABLES["turbo_blocks"]
    ]


def expected_codebooks() -> Rows:
    return [
        [str(h["generation"]), str(h["bits"]), numbers(h["values"]), numbers(h["boundaries"])]
        for h in TABLES["codebook_halves"]
    ]


def expected_limits() -> Rows:
    limits = TABLES["limits"]
    values = (
        *(limits[k] for k in ("f16_max", "norm_floor", "iq4_nl_floor", "page_tokens", "exact_prefix_max")),
        *(limits["exact_prefix_default"][family] for family in ("turbo", "ggml")),
        *(limits[k] for k in ("far_outside", "balance_floor", "channel_scale_min", "channel_scale_max")),
    )
    return [[number(value)] for value in values]


def expected_rows() -> Rows:
    found = {(r["type"], r["head_dim"]): r for r in TABLES["rows"]}
    return [
        [name, *(f"{r['row_bytes']} ({short(r['bits_per_value'])})" for r in (found[name, d] for d in HEAD_DIMS))]
        for name in TYPES
    ]


def expected_pages() -> Rows:
    found = {(r["type"], r["head_dim"]): r for r in TABLES["rows"]}
    return [
        [name, *(str(found[name, d][key]) for key in ("page_bytes", "page_bytes_balanced") for d in HEAD_DIMS)]
        for name, t in TYPES.items()
        if t["family"] != "float"
    ]


def expected_fork_profiles() -> Rows:
    return [
        [p["profile"], *(number(p[t]) for t in ("turbo2", "turbo3", "turbo4")),
         ", ".join(f"{name} {type_id}" for name, type_id in p["others"].items())]
        for p in TABLES["fork_profiles"]
    ]  # fmt: skip


IN_WORDS = {
    "types": expected_types,
    "layouts": expected_layouts,
    "turbo_blocks": expected_turbo_blocks,
    "signs": lambda: [[name, hex_bits] for name, hex_bits in TABLES["signs"].items()],
    "factors": expected_factors,
    "codebooks": expected_codebooks,
    "iq4_nl": lambda: [
        ["q", numbers(TABLES["iq4_nl"]["values"])],
        ["boundaries", numbers(TABLES["iq4_nl"]["boundaries"])],
    ],
    "ggml_rotation": lambda: [[side.upper(), *(number(r[side]) for r in TABLES["ggml_rotation"])] for side in "kv"],
    "limits": expected_limits,
    "rows": expected_rows,
    "pages": expected_pages,
}


@pytest.mark.parametrize("name", IN_WORDS)
def test_a_table_of_the_block_types_has_the_numbers_for_machines(name: str) -> None:
    found = tables_of(BLOCKS)[name]
    if name == "limits":
        found = [row[1:] for row in found]  # the first column is prose
    assert found == IN_WORDS[name]()


def test_the_zero_blocks_in_words_are_those_for_machines() -> None:
    def as_bytes(cell: str) -> str:
        runs = (re.fullmatch(r"(\d+) bytes (..)", part) for part in cell.split(", "))
        return "".join(
            run[2] * int(run[1]) if run else part.replace(" ", "")
            for run, part in zip(runs, cell.split(", "), strict=True)
        )

    found = {name: as_bytes(cell) for name, cell in tables_of(BLOCKS)["zero_blocks"]}
    assert found == {name: block for name, block in TABLES["zero_blocks"].items() if TYPES[name]["family"] != "float"}


def test_no_table_of_the_block_types_is_unchecked() -> None:
    assert set(tables_of(BLOCKS)) == {*IN_WORDS, "zero_blocks"}
    assert len(re.findall(r"^\|[-|]+\|$", BLOCKS, re.MULTILINE)) == len(IN_WORDS) + 1, "a table has no name"
    header = next(line for line in BLOCKS.splitlines() if line.startswith("| head_dim |"))
    assert cells(header)[1:] == [str(r["head_dim"]) for r in TABLES["ggml_rotation"]]


def test_the_encoders_of_ggml_types_in_words_have_the_numbers_for_machines() -> None:
    def steps(name: str) -> str:
        return re.search(rf"^\* \*\*{name}\*\*:(.*?)^\* \*\*", BLOCKS, re.MULTILINE | re.DOTALL)[1]

    for name in ("q4_0", "q5_0"):
        how = TYPES[name]["encode"]
        for part in (f"extreme / {how['divisor']}", f"+ {how['zero_code']}.5)", f"at most {how['max_code']}."):
            assert part in steps(name)
        assert f"{name} (code - {how['zero_code']})·d" in BLOCKS
    assert f"max|x[i]| / {TYPES['q8_0']['encode']['divisor']}." in steps("q8_0")
    levels = TYPES["q4_1"]["encode"]["levels"]
    assert f"/ {levels}," in steps("q4_1") and f"at most {levels}." in steps("q4_1")
    assert f"with {TYPES['q5_1']['encode']['levels']} in place of both {levels}" in steps("q5_1")


def test_the_profiles_of_forks_in_words_are_those_for_machines() -> None:
    assert tables_of(COMPATIBILITY)["fork_profiles"] == expected_fork_profiles()


def test_the_forms_of_forks_in_words_add_up() -> None:
    for form, values, n_bytes, fields, bits in tables_of(COMPATIBILITY)["foreign_forms"]:
        sizes = [int(n or 2) for n in re.findall(r"\w+(?: f16|\[(\d+)\])", fields)]
        assert sum(sizes) == int(n_bytes) and float(bits) == 8 * int(n_bytes) / int(values), form


def test_the_versions_of_llama_cpps_files_are_those_that_are_read() -> None:
    rows = re.findall(r"^\| (session|sequence) .*\| `\w+` \| (\d+) \| (\d+) \|$", COMPATIBILITY, re.MULTILINE)
    assert {kind: (int(old), int(new)) for kind, new, old in rows} == VERSIONS
