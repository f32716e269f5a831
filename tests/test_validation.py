"""A validator names every defect by rule, byte offset and tensor, and finds nothing in what is sound, however odd."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import BOOL, STRING, U16, U32, U64, Tensor, Typed, build_gguf, quantised, tensor_of, write_split
from snapshots import carrier_bytes, make_snapshot
from test_gguf_defects import DAMAGED, array, entry, header, text, u32, u64
from test_snapshot_defects import SMALL
from tiny_models import ORACLE_CASES, TinyModel, model_metadata, model_tensors, tiny_gguf
from unsound_files import TINY, Unsound, calibration, safetensors, unsound_files, value_at

import tqgguf
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.file_kind import GENERAL_TYPES, MAX_SAFETENSORS_HEADER, FileKind, gguf_kind
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.calibration import read_calibration
from tqgguf.formats.rules.finding import MAX_PER_RULE, Finding
from tqgguf.formats.rules.table import RULES, DefectError
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.runtime.models.load import open_model


@pytest.fixture(scope="module")
def unsound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unsound]:
    return unsound_files(tmp_path_factory.mktemp("unsound"))


def findings(tmp_path: Path, data: bytes) -> list[Finding]:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return tqgguf.validate(path)


def names(found: list[Finding]) -> list[str]:
    return [finding.rule.name for finding in found]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_smallest_file_that_breaks_it(rule: str, unsound: dict[str, Unsound], tmp_path: Path) -> None:
    case = unsound[rule]
    path = case.write(tmp_path)
    found = tqgguf.validate(path, tmp_path / case.model if case.model else None)
    mine = [finding for finding in found if finding.rule.name == rule]
    assert mine, names(found)
    finding = mine[0]
    assert case.offset in (-1, finding.offset)
    assert case.tensor in (None, finding.tensor)
    assert finding.file == str(tmp_path / (case.file or path.name))
    assert finding.is_error == (RULES[rule].severity == "error")
    assert "\n" not in finding.message and len(finding.message) < 500


@pytest.mark.parametrize("case", DAMAGED)
def test_what_the_reader_refuses_the_validator_finds_at_the_same_place(case: str, tmp_path: Path) -> None:
    data, code, offset, _ = DAMAGED[case]
    found = findings(tmp_path, data)
    if case == "safetensors":  # to a reader of models it is another format, to a validator a damaged file of its own
        assert names(found) == ["safetensors-length"]
    elif code != "other-format" or "llama.cpp" not in case:
        assert (code, offset) in [(finding.rule.name, finding.offset) for finding in found]


def test_what_the_validator_calls_an_error_of_structure_no_reader_opens(
    unsound: dict[str, Unsound], tmp_path: Path
) -> None:
    """Types that are not known are the exception: such a tensor can be listed, and only its data are refused."""
    for rule, case in unsound.items():
        if "TQ001" <= RULES[rule].id < "TQ200" and rule not in ("unknown-type", "removed-type"):
            folder = tmp_path / rule
            folder.mkdir()
            path = case.write(folder)
            if RULES[rule].severity == "error":
                with pytest.raises(DefectError):
                    open_gguf(path)
            else:
                open_gguf(path).close()


ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no tensors": ({"general.architecture": "llama"}, {}),
    "nothing at all": ({}, {}),
    "zero dimensions": ({"general.architecture": "llama"}, {"a": np.ones((0, 3), np.float32), "b": np.ones(2)}),
    "a scalar": ({"general.architecture": "llama"}, {"a": np.ones((), np.float32)}),
    "alignment 8": ({"general.alignment": 8}, {"a": np.ones(3, np.float16), "b": np.ones(3, np.float16)}),
    "alignment 64": ({"general.alignment": 64}, {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}),
    "alignment 4096": ({"general.alignment": 4096}, {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}),
    "alignment 1": ({"general.alignment": 1}, {"a": np.ones(3, np.int8), "b": quantised(np.ones(32), "Q4_0")}),
    "arrays in an array": ({"general.architecture": "llama", "k": [[1, 2], [], [3]]}, {}),
    "arrays 4 deep": ({"k": [[[[1], [2]]]]}, {}),
    "an empty array": ({"k": []}, {}),
    "flags": ({"k": Typed(BOOL, [True, False]), "l": True}, {}),
    "long texts": ({"k": "x" * 100_000, "l": Typed(STRING, ["", "ä" * 5000])}, {}),
    "a name of 63 bytes": ({}, {"n" * 63: np.ones(1, np.float32)}),
    "another purpose": ({"general.type": "adapter", "general.architecture": "llama"}, {"blk.0.x": np.ones(1)}),
}


@pytest.mark.parametrize("case", ODD)
def test_legal_but_odd_is_legal(case: str, tmp_path: Path) -> None:
    metadata, tensors = ODD[case]
    assert findings(tmp_path, build_gguf(metadata, tensors)) == []


def test_the_last_padding_may_be_left_out(tmp_path: Path) -> None:
    assert findings(tmp_path, build_gguf({}, {"a": np.ones(3, np.float32)}, pad_end=False)) == []


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_tiny_models_of_every_architecture_are_sound(name: str, tmp_path: Path) -> None:
    assert findings(tmp_path, tiny_gguf(ORACLE_CASES[name])) == []


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_of_its_own_is_as_legal_as_none(tied: bool, tmp_path: Path) -> None:
    assert findings(tmp_path, tiny_gguf(TinyModel(tied=tied))) == []


def test_the_default_model_is_sound() -> None:
    from tqgguf.runtime.models.load import embedded_model

    assert tqgguf.validate(embedded_model()) == []


@pytest.mark.gemma
def test_gemma_is_sound() -> None:
    assert tqgguf.validate(os.environ["TQGGUF_GEMMA"]) == []


def test_what_tqgguf_writes_is_sound(tmp_path: Path) -> None:
    assert findings(tmp_path, carrier_bytes(SMALL)) == []
    assert findings(tmp_path, calibration(tmp_path)) == []


@pytest.mark.parametrize("said", ["kv-snapshou", "model", "adapter", "kv-calibration", 7, ["kv-snapshot"], None])
def test_our_own_keys_say_what_a_file_is_and_a_general_type_that_disagrees_is_found(said: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.gguf"
    for data, is_snapshot in (
        (carrier_bytes(SMALL, _saying(said)), True),
        (_calibration_saying(said, tmp_path), False),
    ):
        path.write_bytes(data)
        with open_gguf(path) as file:
            kind = gguf_kind(file.metadata, file.tensors)
        assert kind is (FileKind.SNAPSHOT if is_snapshot else FileKind.CALIBRATION)
        if is_snapshot is (said == "kv-calibration") or said not in ("kv-snapshot", "kv-calibration"):
            (finding,) = tqgguf.validate(path)
            assert finding.rule.name == "general-type"
            with pytest.raises(DefectError, match=r"general\.type"):
                (open_snapshot if is_snapshot else read_calibration)(path)
        else:
            assert tqgguf.validate(path) == []


def _saying(said: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], _: dict[str, Any]) -> None:
        metadata.pop("general.type", None)
        if said is not None:
            metadata["general.type"] = said

    return change


def _calibration_saying(said: Any, folder: Path) -> bytes:
    calibration(folder)
    with open_gguf(folder / "made.gguf") as file:
        metadata: dict[str, Any] = {
            key: Typed(U32, value) if isinstance(value, int) else value for key, value in file.metadata.items()
        }
        tensors = {name: file.array(name).copy() for name in file.tensors}
    metadata["tqgguf.calibration.tokens"] = Typed(U64, 5)
    _saying(said)(metadata, tensors)
    return build_gguf(metadata, tensors)


@pytest.mark.parametrize("said", ["modem", "", 7])
def test_a_whole_model_whose_general_type_is_damaged_is_one_and_it_is_found(said: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf(TINY, {"general.type": said}))
    (finding,) = tqgguf.validate(path)
    assert finding.rule.name == ("general-type" if isinstance(said, str) else "metadata-type")
    with pytest.raises(DefectError, match=r"general\.type"):
        open_model(path)


def test_a_whole_set_is_sound_whichever_shard_is_named(tmp_path: Path) -> None:
    tensors = [{name: tensor} for name, tensor in model_tensors(TINY).items()]
    for path in write_split(tmp_path, "m", model_metadata(TINY), tensors):
        assert tqgguf.validate(path) == []


def test_all_findings_of_a_file_are_listed_where_parsing_can_go_on(tmp_path: Path) -> None:
    data = (
        header(0, 5)
        + (text(b"") + u32(7) + b"\x07")
        + (text(b"caf\xe9") + u32(8) + text(b"\xff"))
        + (text(b"k") + u32(4) + u32(1)) * 2
        + (text(b"general.alignment") + u32(4) + u32(3))
    )
    assert names(findings(tmp_path, data)) == ["bool", "key-empty", "key-utf8", "duplicate-key", "alignment"]
    cut = data[:-1]
    assert names(findings(tmp_path, cut)) == ["bool", "truncated-metadata", "key-empty", "key-utf8", "duplicate-key"]


def test_too_long_names_and_too_many_dimensions_are_read_past(tmp_path: Path) -> None:
    record = text(b"n" * 64) + u32(5) + u64(1) * 5 + u32(0) + u64(0)
    data = header(2, 1) + text(b"k" * 70_000) + u32(0) + b"\x01" + record + record
    data += bytes(32 - len(data) % 32 + 4)  # the value that both tensors have
    assert names(findings(tmp_path, data)) == [
        "key-length", "tensor-name-length", "dimensions", "tensor-name-length", "dimensions", "duplicate-tensor",
        "tensor-overlap",
    ]  # fmt: skip


def test_a_model_s_own_numbers_are_held_against_each_other(tmp_path: Path) -> None:
    for key, value, rule in (
        ("llama.block_count", 2, "tensor-missing"),
        ("llama.block_count", 1 << 31, "block-count"),
        ("llama.attention.head_count", 0, "head-count"),
        ("llama.attention.head_count", 65, "head-count"),
        ("llama.attention.head_count_kv", 4, "head-count"),
        ("llama.attention.head_count_kv", [1, 1], "head-count"),
        ("llama.attention.key_length", 0, "head-count"),
        ("llama.attention.key_length", 1 << 20, "head-count"),
        ("llama.context_length", 0, "metadata-value"),
        ("tokenizer.ggml.scores", [0.0] * 5, "vocabulary-size"),
        ("tokenizer.ggml.scores", 1.0, "metadata-type"),
        ("tokenizer.ggml.tokens", [1, 2], "element-type"),
        ("tokenizer.ggml.merges", Typed(U64, [1]), "element-type"),
        ("tokenizer.ggml.bos_token_id", Typed(U64, 1 << 63), "special-token"),
        ("tokenizer.ggml.eog_token_ids", [1, -1], "special-token"),
        ("general.architecture", 5, "metadata-type"),
        ("tokenizer.ggml.model", [1, 2], "metadata-type"),
        ("tokenizer.ggml.pre", [1, 2], "metadata-type"),
    ):
        assert rule in names(findings(tmp_path, tiny_gguf(TINY, {key: value}))), (key, value)


def test_a_model_with_wrong_metadata_is_not_loaded(tmp_path: Path) -> None:
    from tqgguf.runtime.models.load import open_model

    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf(TinyModel(), {"tokenizer.ggml.token_type": Typed(U16, [1] * 288)}))
    with pytest.raises(DefectError) as refused:
        open_model(path)
    assert refused.value.code == "element-type"
    path.write_bytes(tiny_gguf(TinyModel(), {"tokenizer.ggml.padding_token_id": 288}))
    open_model(path).file.close()  # as llama.cpp does, with a warning


def test_heads_may_differ_between_layers_and_be_none(tmp_path: Path) -> None:
    keys = {"x.block_count": 3, "x.embedding_length": 8, "x.attention.head_count": [4, 0, 4]}
    data = build_gguf({"general.architecture": "x", **keys, "x.attention.head_count_kv": [2, 0, 4]}, {})
    assert findings(tmp_path, data) == []


def test_numbers_that_are_not_finite_are_found_in_every_type_of_block(tmp_path: Path) -> None:
    import gguf

    from tqgguf.formats.gguf.finite import DENSE, IQ1_M, SCALES
    from tqgguf.formats.gguf.types import GGML_TYPES

    by_name = {kind.name: (type_id, kind) for type_id, kind in GGML_TYPES.items()}
    for name in (*SCALES, *DENSE, IQ1_M):
        type_id, kind = by_name[name]
        raw = np.random.default_rng(0).integers(0, 256, (6, kind.block_bytes), np.uint8)
        offsets = SCALES[name][1] if name in SCALES else (0,) if name in DENSE else (48,)
        width = 8 if name == IQ1_M else 1 if name == "MXFP4" else kind.block_bytes if name in DENSE else 4
        if name in SCALES and SCALES[name][0].dtype.itemsize == 2:
            width = 2
        for at in offsets:
            raw[:, at : at + width] = 0x33
        data = {"general.architecture": "llama"}, {"t": Tensor((6, kind.block_size), type_id, raw.tobytes())}
        assert findings(tmp_path, build_gguf(*data)) == [], name
        for at in offsets:
            bad = raw.copy()
            bad[3, at : at + width] = 0xFF
            found = findings(tmp_path, build_gguf(data[0], {"t": Tensor((6, kind.block_size), type_id, bad.tobytes())}))
            padded = -(-raw.nbytes // 32) * 32
            place = (tmp_path / "file.gguf").stat().st_size - padded + 3 * kind.block_bytes + at
            assert [finding.offset for finding in found] == [place], name
            if name not in ("Q8_1", "Q8_K", "F64", "Q1_0", "MXFP4"):  # gguf-py decodes the others, and gets no number
                values = gguf.dequantize(bad.reshape(6, -1), gguf.GGMLQuantizationType(type_id))
                with np.errstate(all="ignore"):
                    assert not np.isfinite(values[3]).all() and np.isfinite(values[4]).all(), name


def test_data_of_a_tensor_that_is_not_in_the_file_are_not_read(tmp_path: Path) -> None:
    inside = tensor_of(np.full(8, np.nan, np.float32))
    outside = tensor_of(np.full(8, np.nan, np.float32), offset=1 << 40)
    assert names(findings(tmp_path, build_gguf({}, {"in": inside, "out": outside}))) == [
        "tensor-past-end", "non-finite-value",
    ]  # fmt: skip


def test_findings_stay_few_and_say_how_many_there_are(tmp_path: Path) -> None:
    data = header(0, 100) + (text(b"k") + u32(0) + b"\x00") * 100
    found = findings(tmp_path, data)
    assert names(found) == ["duplicate-key"] * (MAX_PER_RULE + 1)
    assert found[-1].message == f"and {99 - MAX_PER_RULE} more of this kind"


def test_a_name_that_occurs_twice_is_found_among_any_number(tmp_path: Path) -> None:
    names_ = ",".join(f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in (*range(200_000), 199_999))
    (finding,) = findings(tmp_path, safetensors({}, text=f"{{{names_}}}".encode()))
    assert (finding.rule.name, finding.message) == ("safetensors-header", "the name '199999' occurs twice")


def test_a_header_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    data = safetensors({}, text=b'{"a":[' + b"[]," * (MAX_SAFETENSORS_HEADER // 3) + b"[]]}")
    (finding,) = findings(tmp_path, data)
    assert finding.rule.name == "safetensors-length"
    assert "expected a header of at most 16777216 bytes" in finding.message


def test_other_files_are_told_as_what_they_are(tmp_path: Path) -> None:
    for data, rule in ((b"just a text", "not-gguf"), (b"", "empty-file"), (b"<html>", "html-page")):
        assert names(findings(tmp_path, data)) == [rule]
    with pytest.raises(TqggufError, match="cannot be opened"):
        tqgguf.validate(tmp_path / "nothing")
    with pytest.raises(TqggufError, match="found a folder"):
        tqgguf.validate(tmp_path)


def test_a_file_belongs_to_the_model_that_it_was_made_with(tmp_path: Path) -> None:
    from tqgguf.formats.models.belonging import ModelIdentity

    (tmp_path / "model.gguf").write_bytes(tiny_gguf(TINY))
    identity = ModelIdentity.of(tmp_path / "model.gguf")
    path = tmp_path / "c.gguf"
    path.write_bytes(calibration(tmp_path, identity.fingerprint))
    assert tqgguf.validate(path, identity) == tqgguf.validate(path, tmp_path / "model.gguf") == []
    path.write_bytes(carrier_bytes(make_snapshot(3, fingerprint=identity.fingerprint)))
    assert tqgguf.validate(path, identity) == []
    assert tqgguf.validate(tmp_path / "model.gguf", identity) == []


def test_kinds_are_told_by_what_files_say_of_themselves() -> None:
    from tqgguf.formats.models import calibration as calibrations
    from tqgguf.formats.snapshots import format as snapshot_format

    assert GENERAL_TYPES[calibrations.GENERAL_TYPE] is FileKind.CALIBRATION
    assert GENERAL_TYPES[snapshot_format.GENERAL_TYPE] is FileKind.SNAPSHOT


def test_the_offset_of_a_text_in_an_array_is_its_own(tmp_path: Path) -> None:
    data = entry(array(8, 3, text(b"ok") + text("ä".encode()) + text(b"\xe4")))
    (finding,) = findings(tmp_path, data)
    assert (finding.rule.name, finding.offset) == ("text-utf8", 49 + 10 + 10)
    assert value_at(data, "k") == 37
