"""Every kind of damage to a GGUF file is named: which defect, at which byte. Files are literal bytes."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import (
    ARRAY,
    BOOL,
    STRING,
    U8,
    U32,
    U64,
    Payload,
    Tensor,
    Typed,
    build_gguf,
    quantised,
    sections,
    tensor_of,
)

from tqgguf.formats.errors import FormatError, TqggufError
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.rules.gguf import GGUF_RULES

HUGE = 1 << 63
FEW_MB = 4_000_000


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def header(n_tensors: int = 0, n_entries: int = 0) -> bytes:
    return b"GGUF\x03\x00\x00\x00" + u64(n_tensors) + u64(n_entries)


def entry(value: bytes, key: bytes = b"k") -> bytes:
    """One entry with a key of one byte: the value's type is at byte 33, the value (an array's element type) at 37."""
    return header(0, 1) + text(key) + value


def array(element: int, count: int, data: bytes = b"") -> bytes:
    """As an entry's value: the element type is at byte 37, the count at 41, the elements at 49."""
    return u32(9) + u32(element) + u64(count) + data


def one_tensor(
    name: bytes = b"t", dims: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0, n_data: int = 32
) -> bytes:
    """No metadata, a name of one byte: n_dims at byte 33, dims at 37; if there is one, type at 45, offset at 49."""
    dims_bytes = b"".join(map(u64, dims))
    record = text(name) + u32(len(dims)) + dims_bytes + u32(type_id) + u64(offset)
    return header(1) + record + bytes(-(24 + len(record)) % 32) + bytes(n_data)


def two_tensors(second_name: bytes = b"u", second_offset: int = 32) -> bytes:
    """Two tensors of 8 float32 each, records at bytes 24 and 57, data at 96: the offset of the second at byte 82."""
    record = text(b"t") + u32(1) + u64(8) + u32(0) + u64(0)
    second = text(second_name) + u32(1) + u64(8) + u32(0) + u64(second_offset)
    return header(2) + record + second + bytes(-(24 + len(record) + len(second)) % 32) + bytes(64)


NESTED_5 = array(9, 1, (u32(9) + u64(1)) * 3 + u32(0) + u64(0))
NESTED_2000 = array(9, 1, (u32(9) + u64(1)) * 2000)
MANY_INNER = array(9, 65_537, (u32(0) + u64(0)) * 65_537)

# name of the case: (the file, code, byte offset, what the message says beside the offset)
DAMAGED: dict[str, tuple[bytes, str, int, str]] = {
    # something else
    "empty file": (b"", "empty-file", 0, "an empty file (0 bytes)"),
    "HTML page": (b"<!DOCTYPE html>\n<html><head>", "html-page", 0, "an HTML page"),
    "HTML page after blanks": (b"\xef\xbb\xbf\n\n  <HTML lang=en>", "html-page", 0, "an HTML page"),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "lfs-pointer", 0, "git lfs pull",
    ),
    "safetensors": (u64(0x7B) + b'{"__metadata__":{}}', "other-format", 0, "safetensors"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00", "other-format", 0, "zip archive"),
    "gzip": (b"\x1f\x8b\x08\x00", "other-format", 0, "gzip"),
    "old GGML": (b"tjgg\x03\x00\x00\x00", "other-format", 0, "old GGML"),
    "llama.cpp session": (b"nsgg\x09\x00\x00\x00", "other-format", 0, "session file"),
    "llama.cpp sequence": (b"qsgg\x02\x00\x00\x00", "other-format", 0, "sequence file"),
    "JSON error": (b'{"error":"Repository not found"}', "other-format", 0, "JSON"),
    "XML error": (b"<?xml version='1.0'?><Error>", "html-page", 0, "XML"),
    "other bytes": (b"ABCDEFGH", "not-gguf", 0, "with GGUF, found a file that begins with ABCD"),
    # header
    "magic cut": (b"GG", "truncated-header", 0, "at least 4 bytes, found 2"),
    "version cut": (b"GGUF\x03\x00", "truncated-header", 4, "the header (version)"),
    "tensor count cut": (b"GGUF\x03\x00\x00\x00" + bytes(7), "truncated-header", 8, "at least 16 bytes, found 15"),
    "metadata count cut": (header()[:-1], "truncated-header", 16, "at least 24 bytes, found 23"),
    "version 0": (b"GGUF" + u32(0) + bytes(16), "version", 4, "found version 0"),
    "version 1": (b"GGUF" + u32(1) + bytes(16), "version-old", 4, "convert the model again"),
    "version 4": (b"GGUF" + u32(4) + bytes(16), "version-new", 4, "newer software"),
    "big-endian": (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian", 4, "big-endian (version 3)"),
    "2^63 tensors": (header(HUGE), "over-limit", 8, f"the tensor count is {HUGE}"),
    "2^63 entries": (header(0, HUGE), "over-limit", 16, f"the metadata count is {HUGE}"),
    "1000 tensors, no bytes": (header(1000), "truncated-tensors", 24, "the tensor list (1000 tensors)"),
    "1000 entries, no bytes": (header(0, 1000), "truncated-metadata", 16, "the metadata (1000 entries)"),
    # metadata
    "key of 2^63 bytes": (header(0, 1) + u64(HUGE) + bytes(9), "key-length", 24, f"is {HUGE}, expected at most 65535"),
    "key of 65,536 bytes": (entry(u32(0) + b"\0", b"k" * 65_536), "key-length", 24, "expected at most 65535"),
    "key cut": (header(0, 1) + u64(60_000) + b"key.key", "truncated-metadata", 24, "metadata key 0"),
    "key empty": (entry(u32(0) + b"\0", b""), "key-empty", 24, "key 0 is empty"),
    "key not UTF-8": (entry(u32(0) + b"\0", b"caf\xe9"), "key-utf8", 24, "not UTF-8"),
    "key twice": (
        header(0, 2) + (text(b"k") + u32(0) + b"\0") * 2, "duplicate-key", 38, "'k' occurs twice, first at byte 24",
    ),
    "value type 13": (entry(u32(13) + b"\0"), "value-type", 33, "value type 13, expected 0 to 12"),
    "value cut": (entry(u32(4) + b"\0\0\0"), "truncated-metadata", 37, "it needs 4 bytes and 3 are left"),
    "boolean 7": (entry(u32(7) + b"\x07"), "bool", 37, "expected 0 or 1, found 7"),
    "string of 2^63 bytes": (entry(u32(8) + u64(HUGE)), "over-limit", 37, f"is {HUGE}"),
    "string cut": (entry(u32(8) + u64(1000) + b"abc"), "truncated-metadata", 37, "it needs 1000 bytes and 3 are left"),
    "array header cut": (entry(u32(9) + u32(0) + bytes(7)), "truncated-metadata", 41, "key 'k'"),
    "array of 2^63": (entry(array(0, HUGE)), "over-limit", 41, f"is {HUGE}"),
    "array of 2^24 without data": (entry(array(0, 1 << 24)), "truncated-metadata", 41, "an array of 16777216 U8"),
    "array of F32 one byte short": (entry(array(6, 3, bytes(11))), "truncated-metadata", 41, "12 bytes and 11 are"),
    "array of 2^24 strings without data": (entry(array(8, 1 << 24)), "truncated-metadata", 41, "16777216 STRING"),
    "array of 2^25 strings": (entry(array(8, 1 << 25)), "over-limit", 41, "expected at most 16777216"),
    "array element type 99": (entry(array(99, 1)), "value-type", 37, "value type 99"),
    "second string cut": (
        entry(array(8, 2, text(b"ab") + u64(9) + b"ab")), "truncated-metadata", 59, "string 1 of 2: it needs 9 bytes",
    ),
    "second string's length cut": (entry(array(8, 2, text(b"12345678"))), "truncated-metadata", 65, "of string 1"),
    "string of 2^64-1 bytes in an array": (entry(array(8, 1, u64((1 << 64) - 1))), "truncated-metadata", 49, "string"),
    "boolean 2 in an array": (entry(array(7, 4, b"\0\1\2\1")), "bool", 51, "found 2 in element 2"),
    "arrays 5 deep": (entry(NESTED_5), "array-depth", 73, "more than 4 deep"),
    "arrays 2000 deep": (entry(NESTED_2000), "array-depth", 73, "more than 4 deep"),
    "65,537 inner arrays": (entry(MANY_INNER), "over-limit", 49 + 12 * 65_536, "number of nested arrays"),
    "inner array cut": (entry(array(9, 1, u32(0) + u64(5) + bytes(4))), "truncated-metadata", 53, "an array of 5 U8"),
    # alignment: the key has 17 bytes, so its value is at byte 24 + 8 + 17 + 4
    "alignment 0": (entry(u32(4) + u32(0), b"general.alignment"), "alignment", 53, "is 0, expected a power of two"),
    "alignment 3": (entry(u32(4) + u32(3), b"general.alignment"), "alignment", 53, "is 3, expected a power of two"),
    "alignment 48": (entry(u32(4) + u32(48), b"general.alignment"), "alignment", 53, "is 48"),
    "alignment 2^31": (entry(u32(4) + u32(1 << 31), b"general.alignment"), "alignment", 53, "up to 2097152"),
    "alignment as U64": (entry(u32(10) + u64(32), b"general.alignment"), "alignment-type", 53, "is U64, expected U32"),
    "alignment as text": (entry(u32(8) + text(b"32"), b"general.alignment"), "alignment-type", 53, "is STRING"),
    # tensor list
    "tensor name of 64 bytes": (one_tensor(b"n" * 64), "tensor-name-length", 24, "is 64, expected at most 63"),
    "tensor name of 2^63 bytes": (header(1) + u64(HUGE) + bytes(16), "tensor-name-length", 24, f"is {HUGE}"),
    "tensor name empty": (one_tensor(b""), "tensor-name-empty", 24, "name of tensor 0 is empty"),
    "tensor name not UTF-8": (one_tensor(b"\xff"), "tensor-name-utf8", 24, "not UTF-8"),
    "tensor name twice": (two_tensors(b"t"), "duplicate-tensor", 57, "'t' occurs twice"),
    "tensor list cut in a name": (header(1) + u64(20) + bytes(16), "truncated-tensors", 24, "the tensor list (name 0)"),
    "tensor list cut in dims": (one_tensor(dims=(8, 8))[:53], "truncated-tensors", 37, "tensor 't'"),
    "tensor list cut in an offset": (one_tensor()[:56], "truncated-tensors", 24 + 13, "needs 20 bytes and 19 are left"),
    "5 dimensions": (one_tensor(dims=(8, 1, 1, 1, 1)), "dimensions", 33, "has 5 dimensions, expected at most 4"),
    "2^32-1 dimensions": (header(1) + text(b"t") + b"\xff" * 20, "dimensions", 33, "4294967295 dimensions"),
    "dimension of 2^63": (one_tensor(dims=(HUGE,)), "dimension-size", 37, "expected less than 2^63"),
    "second dimension of 2^64-1": (one_tensor(dims=(0, (1 << 64) - 1)), "dimension-size", 45, "less than 2^63"),
    "product that wraps to 2^22": (one_tensor(dims=((1 << 42) + 1, 1 << 22)), "overflow", 37, "less than 2^63"),
    "product that wraps to 0": (one_tensor(dims=(1 << 32, 1 << 32)), "overflow", 37, "overflows"),
    "product that wraps beside a zero": (one_tensor(dims=(0, 1 << 62, 4)), "overflow", 37, "overflows"),
    "bytes that wrap to 0": (one_tensor(dims=(1 << 62,)), "byte-overflow", 37, "2^63 bytes or more"),
    "rows of 33 in Q4_0": (one_tensor(dims=(33,), type_id=2), "block", 37, "rows of 33 values, expected a multiple"),
    "scalar in Q4_0": (one_tensor(dims=(), type_id=2), "block", 37, "rows of 1 values"),
    # data section, at byte 64
    "offset 4": (one_tensor(offset=4, n_data=64), "offset-unaligned", 49, "expected a multiple of the alignment 32"),
    "offset past the end": (one_tensor(offset=1 << 20), "tensor-past-end", 49, "bytes 1048640 to 1048672"),
    "offset that wraps": (one_tensor(offset=(1 << 64) - 32), "offset-overflow", 49, "does not fit in 63 bits"),
    "unknown type, offset past the end": (one_tensor(type_id=99, offset=1 << 20), "tensor-past-end", 49, "type 99"),
    "data one byte short": (one_tensor(n_data=31), "truncated-data", 49, "at least 96 bytes, found 95"),
    "no data": (one_tensor(n_data=0), "truncated-data", 49, "at least 96 bytes, found 64"),
    "tensors overlap": (two_tensors(second_offset=0), "tensor-overlap", 82, "'t' and 'u' overlap"),
}  # fmt: skip


def opened_with_error(path: Path, data: bytes) -> FormatError:
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    return caught.value


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_with_its_place(case: str, tmp_path: Path) -> None:
    data, code, offset, fragment = DAMAGED[case]
    error = opened_with_error(tmp_path / "bad.gguf", data)
    assert isinstance(error, GgufError)
    message = str(error)
    assert (error.code, error.offset) == (code, offset), message
    assert message.endswith(f"(at byte {offset})")
    assert fragment in message
    assert message.startswith(str(tmp_path / "bad.gguf"))
    assert "\n" not in message


def test_every_defect_of_a_single_file_has_a_case() -> None:
    elsewhere = ("split-", "joined-", "unknown-type", "removed-type")  # sets, and what is asked of a sound file
    errors = {rule.name for rule in GGUF_RULES if rule.severity == "error" and not rule.name.startswith(elsewhere)}
    assert {code for _, code, _, _ in DAMAGED.values()} == errors


def test_version_2_is_read_as_version_3(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(build_gguf({"a": 1}, {"t": np.ones(2, np.float32)}, version=2))
    with open_gguf(path) as file:
        assert (file.version, file.uint("a"), file.array("t").tolist()) == (2, 1, [1, 1])


def test_big_endian_file_is_recognised_whole(tmp_path: Path) -> None:
    data = build_gguf({"general.architecture": "llama"}, {"t": np.zeros(8, np.float32)}, order=">")
    assert "big-endian" in str(opened_with_error(tmp_path / "big.gguf", data))


def test_long_names_are_cut_in_messages(tmp_path: Path) -> None:
    data = entry(u32(7) + b"\x07", b"k\n" * 30_000)
    message = str(opened_with_error(tmp_path / "long.gguf", data))
    assert len(message) < 400 + len(str(tmp_path))
    assert "\n" not in message


def test_partial_overlap_of_large_tensors_is_found(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(100, np.float32), "b": tensor_of(np.zeros(8, np.float32), offset=384)}
    error = opened_with_error(tmp_path / "overlap.gguf", build_gguf({}, tensors))
    assert "'a' and 'b' overlap" in str(error)


def test_a_tensor_inside_one_of_unknown_type_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "fork.gguf"
    inside = tensor_of(np.zeros(4, np.float32), offset=32)
    path.write_bytes(build_gguf({}, {"a": Tensor((64,), 43, bytes(64)), "b": inside}))
    with open_gguf(path) as file:
        assert file.array("b").tolist() == [0, 0, 0, 0]


def small_model() -> dict[str, bytes]:
    """The parts of a small sound file with every kind of value; its last tensor is not padded."""
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "a.u8": Typed(U8, 3),
        "a.u64": Typed(U64, 1 << 40),
        "a.flag": True,
        "a.real": 1.5,
        "a.texts": ["a", "", "münze"],
        "a.flags": Typed(BOOL, [True, False]),
        "a.ints": [1, 2, 3],
        "a.nested": [[1, 2], [], ["x"]],
    }
    tensors = {
        "t.f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "t.q4_1": quantised(np.ones((2, 32), np.float32), "Q4_1"),
        "t.f16": np.arange(5, dtype=np.float16),
    }
    return sections(metadata, tensors, pad_end=False)


def read_all(path: Path) -> None:
    """What a command that lists and reads a model would touch."""
    with open_gguf(path) as file:
        for key in file.metadata:
            assert str(file.metadata_type(key))
        for name in file.tensors:
            file.array(name).tobytes()


def test_truncation_at_every_byte_is_reported_with_its_section(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    parts = small_model()
    data = b"".join(parts.values())
    ends = np.cumsum([len(part) for part in parts.values()])
    for length in range(len(data)):
        error = opened_with_error(path, data[:length])
        assert isinstance(error, GgufError)
        assert error.code.startswith("truncated-" if length else "empty-file"), (length, error)
        if length:
            name = list(parts)[int(np.searchsorted(ends, length, side="right"))]
            section = {"padding": "tensor data", "data": "tensor data", "header": "the "}.get(name, name)
            assert section in str(error), (length, error)
            assert f"found {length})" in str(error) or f"found {length};" in str(error), (length, error)
    path.write_bytes(data)
    read_all(path)


def test_flipped_bytes_never_raise_another_error_nor_allocate_much(tmp_path: Path) -> None:
    path = tmp_path / "flipped.gguf"
    parts = small_model()
    data = b"".join(parts.values())
    n_structure = len(data) - len(parts["data"])
    random_bytes = random.Random(0)
    cases = [{i: data[i] ^ flip} for i in range(n_structure) for flip in (0x01, 0xFF)]
    for _ in range(500):
        n_flips = random_bytes.randint(2, 6)
        cases.append({random_bytes.randrange(n_structure): random_bytes.randrange(256) for _ in range(n_flips)})
    refused = 0
    tracemalloc.start()
    try:
        for case in cases:
            damaged = bytearray(data)
            for i, value in case.items():
                damaged[i] = value
            path.write_bytes(damaged)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                read_all(path)
            except TqggufError:
                refused += 1
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < FEW_MB, case
    finally:
        tracemalloc.stop()
    assert refused > len(cases) // 4


@pytest.mark.parametrize(
    "value",
    [
        Payload(ARRAY, u32(STRING) + u64((1 << 24) - 1)),
        Payload(ARRAY, u32(U32) + u64((1 << 30) - 1)),
        Payload(STRING, u64((1 << 30) - 1)),
        Payload(ARRAY, u32(ARRAY) + u64(1 << 16)),
    ],
    ids=["strings", "numbers", "text", "arrays"],
)
def test_a_length_without_bytes_allocates_nothing(value: Payload, tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(build_gguf({"k": value}))
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match="truncated"):
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < FEW_MB
    finally:
        tracemalloc.stop()
