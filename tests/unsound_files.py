"""The smallest file that breaks each rule, with the place that is to be named: `UNSOUND`, by the rule's name.

Offsets are found by searching the bytes for keys and names, or counted by hand: independent of tqgguf's parser. Rules
about snapshots and llama.cpp's files take the cases of their own tests.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf_builder import I32, U16, Tensor, Typed, build_gguf, quantised, write_split
from llama_builder import build_state, recurrent_memory
from mlx_cache_files import DAMAGED as MLX_CASES
from mlx_cache_files import cache_bytes, non_finite_cache
from snapshots import carrier_bytes
from test_gguf_defects import DAMAGED, entry, header, one_tensor, text, two_tensors, u32, u64
from test_llama_defects import PATCHED, ROWS, SEQUENCE, SESSION
from test_snapshot_defects import CASES, SMALL
from tiny_models import TinyModel, tiny_gguf

from tqgguf.formats.models.calibration import Calibration, write_calibration
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.formats.rules.table import RULES

TINY = TinyModel(n_layers=1, hidden_size=64, n_heads=2, n_kv_heads=1, head_dim=32, intermediate_size=64)
OTHER = TinyModel(n_layers=1, hidden_size=32, n_heads=2, n_kv_heads=1, head_dim=32, intermediate_size=64)
PARTS = ("weights", "hyperparameters", "rope", "tokenizer")


@dataclass(frozen=True)
class Unsound:
    """files: by name; the first one is to be validated. offset, tensor: what the finding names. file: at fault, if it
    is another one. model: of --model, a file's name.
    """

    files: dict[str, bytes]
    offset: int | None
    tensor: str | None = None
    file: str | None = None
    model: str | None = None
    more: frozenset[str] = field(default=frozenset())
    """Names of other rules that such a file breaks as well."""

    def write(self, folder: Path) -> Path:
        """Write all files and return the path of the one to validate."""
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder / next(iter(self.files))


def gguf(data: bytes, offset: int | None, tensor: str | None = None, *more: str) -> Unsound:
    return Unsound({"file.gguf": data}, offset, tensor, more=frozenset(more))


def value_at(data: bytes, key: str) -> int:
    """Offset of the value of a metadata key; of an array, of its element type."""
    return data.index(text(key.encode())) + 8 + len(key) + 4


def record_at(data: bytes, tensor: str) -> int:
    """Offset of a tensor's record."""
    return data.index(text(tensor.encode()))


def tiny(changed: str, value: Any, behind: int = 0, *more: str) -> Unsound:
    """The tiny model with another value (None: no value) of a key, which the finding names."""
    data = tiny_gguf(TINY, {changed: value})
    return gguf(data, None if value is None else value_at(data, changed) + behind, None, *more)


def bad_value(tensor: Tensor, at: int, value: bytes) -> bytes:
    damaged = tensor.data[:at] + value + tensor.data[at + len(value) :]
    return build_gguf({"general.architecture": "llama"}, {"t": Tensor(tensor.shape, tensor.type_id, damaged)})


def model_cases() -> Iterator[tuple[str, Unsound]]:
    yield "metadata-missing", tiny("llama.context_length", None)
    yield "metadata-type", tiny("llama.context_length", "2048")
    yield "metadata-value", tiny("llama.rope.freq_base", float("inf"))
    yield "element-type", tiny("tokenizer.ggml.token_type", Typed(U16, [1] * 288))
    yield "block-count", tiny("llama.block_count", 0)
    yield "head-count", tiny("llama.attention.head_count_kv", 3)
    yield "vocabulary-size", tiny("tokenizer.ggml.token_type", Typed(I32, [1] * 287), 4)
    yield "special-token", tiny("tokenizer.ggml.eos_token_id", 288)
    yield "pretokenizer", tiny("tokenizer.ggml.pre", "default")
    without = tiny_gguf(TINY, None, {"blk.0.ffn_norm.weight": None})
    yield "tensor-missing", gguf(without, None, "blk.0.ffn_norm.weight")
    yield "vocabulary", tiny("tokenizer.ggml.merges", ["Ġt", "t h"])
    yield "chat-template", tiny("tokenizer.chat_template", "{% if messages %}")
    factors = tiny_gguf(TINY, None, {"rope_freqs.weight": np.zeros(16, np.float32)})
    yield "tensor-value", gguf(factors, len(factors) - 64, "rope_freqs.weight")
    name = "blk.0.ffn_up.weight"
    turned = tiny_gguf(TINY, None, {name: np.zeros((32, 128), np.float32)})
    yield "tensor-shape", gguf(turned, record_at(turned, name) + 8 + len(name) + 4, name)
    keys = {"general.architecture": "llama", "llama.block_count": 1}
    yield "model-fragment", gguf(build_gguf(keys, {"blk.0.attn_q.weight": np.zeros(8, np.float32)}), None)
    blocks = quantised(np.ones((2, 64), np.float32), "Q4_1")
    data = bad_value(blocks, 3 * 20 + 2, b"\x00\x7c")
    yield "non-finite-scale", gguf(data, len(data) - 96 + 62, "t")
    floats = Tensor((8,), 0, np.ones(8, np.float32).tobytes())
    data = bad_value(floats, 4 * 5, b"\x00\x00\xc0\x7f")
    yield "non-finite-value", gguf(data, len(data) - 32 + 20, "t")


def changed_type(data: bytes, said: bytes, other: bytes) -> tuple[int, bytes]:
    """Where general.type stands in a file, and the file with another text of that length there."""
    at = value_at(data, "general.type")
    assert data[at + 8 : at + 8 + len(said)] == said and len(said) == len(other)
    return at, data[: at + 8] + other + data[at + 8 + len(said) :]


def layout_cases() -> Iterator[tuple[str, Unsound]]:
    yield "other-format", gguf(b"PK\x03\x04\x14\x00\x00\x00", 0)
    yield "version-2", gguf(header()[:4] + u32(2) + header()[8:], 4)
    swapped = two_tensors(second_offset=0)
    swapped = swapped[:49] + u64(32) + swapped[57:]
    yield "tensor-order", gguf(swapped, 82, "u")
    data = two_tensors(second_offset=64) + bytes(32)
    yield "tensor-gap", gguf(data, 82, "u")
    yield "trailing-data", gguf(one_tensor() + b"end", 96)
    yield "text-utf8", gguf(entry(u32(8) + text(b"caf\xe9")), 37)
    at, damaged = changed_type(carrier_bytes(SMALL), b"kv-snapshot", b"kv-snapshOt")
    yield "general-type", gguf(damaged, at)
    yield "unknown-type", gguf(one_tensor(type_id=99), 45, "t")
    yield "removed-type", gguf(one_tensor(type_id=4), 45, "t")


def split_cases(folder: Path) -> Iterator[tuple[str, Unsound]]:
    shards = [{"a": np.zeros(8, np.float32)}, {"b": np.zeros(8, np.float32)}]
    paths = write_split(folder, "m", {"general.architecture": "llama"}, shards)
    (one, first), (two, second) = ((path.name, path.read_bytes()) for path in paths)
    number_at, count_at = value_at(second, "split.no"), value_at(second, "split.count")
    changed = second[:count_at] + b"\x03" + second[count_at + 1 :]
    keyless = build_gguf({"split.count": Typed(U16, 2), "split.no": Typed(U16, 1)}, shards[1])
    yield "split-name", Unsound({"other.gguf": second, one: first}, number_at)
    yield "split-missing", Unsound({one: first}, None)
    yield "split-number", Unsound({one: first, two: first}, value_at(first, "split.no"), file=two)
    yield "split-disagrees", Unsound({one: first, two: changed}, count_at, file=two)
    yield "split-key", Unsound({one: first, two: keyless}, None, file=two)
    parts = [f"blk.{{}}.{name}.weight" for name in ("attn_q", "attn_k", "ffn_up")]
    mixed = [
        {part.format(i): np.zeros((1, 32), kind) for part in parts} for i, kind in enumerate((np.float32, np.float16))
    ]
    paths = write_split(folder, "t", {"general.architecture": "x"}, mixed)
    yield "split-types", Unsound({path.name: path.read_bytes() for path in paths}, None)
    yield "joined-files", Unsound({"joined.gguf": first + second}, len(first))
    yield "snapshot-split", split_snapshot(folder)


def split_snapshot(folder: Path) -> Unsound:
    """A snapshot whose last tensors are in a second file, which has no checksums."""
    held: dict[str, dict[str, Any]] = {}
    carrier_bytes(SMALL, lambda metadata, tensors: held.update(metadata=metadata, tensors=tensors))
    moved = {name: held["tensors"].pop(name) for name in list(held["tensors"]) if name.startswith("blk.2.")}
    paths = write_split(folder, "s", held["metadata"], [held["tensors"], moved])
    files = {path.name: path.read_bytes() for path in paths}
    return Unsound(files, value_at(files[paths[0].name], "split.count"))


def safetensors(tensors: dict[str, Any], data: bytes = b"", text: bytes | None = None) -> bytes:
    header = json.dumps(tensors).encode() if text is None else text
    return struct.pack("<Q", len(header)) + header + data


def safetensors_cases() -> Iterator[tuple[str, Unsound]]:
    def f32(start: int, end: int, **other: Any) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | other

    def case(tensors: dict[str, Any], data: bytes, tensor: str | None, **at: int) -> Unsound:
        whole = safetensors(tensors, data)
        place = at.get("offset", whole.index(b'"t"'))
        return Unsound({"model.safetensors": whole}, place, tensor)

    good = safetensors({"t": f32(0, 4)}, bytes(4))
    yield "safetensors-length", Unsound({"model.safetensors": u64(1 << 31) + good[8:]}, 0)
    broken = safetensors({}, text=b'{"t": {"dtype": F32}}')
    yield "safetensors-header", Unsound({"model.safetensors": broken}, 8 + 16)
    yield "safetensors-entry", case({"t": {"dtype": "F32", "shape": [1]}}, b"", "t")
    yield "safetensors-dtype", case({"t": f32(0, 4, dtype="F33")}, bytes(4), "t")
    yield "safetensors-size", case({"t": f32(0, 4, shape=[2])}, bytes(4), "t")
    yield "safetensors-end", case({"t": f32(0, 4)}, bytes(3), "t", offset=9)
    yield "safetensors-overlap", case({"a": f32(0, 8), "t": f32(4, 8)}, bytes(8), "t")
    yield "safetensors-gap", case({"a": f32(0, 4), "t": f32(8, 12)}, bytes(12), "t")


def calibration(folder: Path, fingerprint: Fingerprint | None = None) -> bytes:
    scales = {0: np.ones((1, 4), np.float32)}
    mark = fingerprint or Fingerprint(*("0" * 64 for _ in PARTS))
    made = Calibration(scales, mark, "llama", "tiny", 5, "text", "0" * 64)
    write_calibration(folder / "made.gguf", made, replace_anything=True)
    return (folder / "made.gguf").read_bytes()


def calibration_cases(folder: Path) -> Iterator[tuple[str, Unsound]]:
    data = calibration(folder)
    at = value_at(data, "tqgguf.calibration.version")
    yield "calibration-version", gguf(data[:at] + b"\x02" + data[at + 1 :], at)
    name = b"blk.0.attn_k.channel_scale"
    yield "calibration-tensor", gguf(data.replace(name, name.replace(b"attn_k", b"attn_v")), None)
    scale_at = len(data) - 32 + 8
    broken = data[:scale_at] + b"\x00\x00\xc0\x7f" + data[scale_at + 4 :]
    yield "calibration-scale", gguf(broken, scale_at, "blk.0.attn_k.channel_scale")


def belonging_cases(folder: Path) -> Iterator[tuple[str, Unsound]]:
    model = tiny_gguf(TINY)
    snapshot, sidecar = carrier_bytes(SMALL), calibration(folder)
    others = frozenset({"other-weights", "other-hyperparameters", "other-rope", "other-tokenizer", "calibration-rope"})
    for part in PARTS:
        at = value_at(snapshot, f"tqgguf.fingerprint.{part}")
        files = {"cache.gguf": snapshot, "model.gguf": model}
        yield f"other-{part}", Unsound(files, at, model="model.gguf", more=others)
    at = value_at(sidecar, "tqgguf.fingerprint.rope")
    yield "calibration-rope", Unsound({"c.gguf": sidecar, "model.gguf": model}, at, model="model.gguf", more=others)
    nameless = carrier_bytes(SMALL, lambda metadata, tensors: _forget(metadata, "tqgguf.fingerprint."))
    yield "no-fingerprint", Unsound({"cache.gguf": nameless, "model.gguf": model}, None, model="model.gguf")


def _forget(metadata: dict[str, Any], prefix: str) -> None:
    for key in [key for key in metadata if key.startswith(prefix)]:
        del metadata[key]


def other_kinds() -> Iterator[tuple[str, Unsound]]:
    """Of the tests of snapshots, llama.cpp's files and mlx-lm's caches; -1 stands for offsets that are tested there."""
    names = {rule.id: rule.name for rule in RULES.values()}
    flipped = bytearray(carrier_bytes(SMALL))
    flipped[-1200] ^= 1
    yield "checksum", gguf(bytes(flipped), -1)
    yield "state-trailing", Unsound({"state": SESSION.data + b"end"}, len(SESSION.data))
    yield "state-trailing-sequence", Unsound({"state": SEQUENCE.data + b"end"}, len(SEQUENCE.data))
    yield "state-values", Unsound({"state": SESSION.data[: SESSION.fields["base.v0"]]}, SESSION.fields["base.v0"])
    hybrid = SEQUENCE.data + recurrent_memory()
    yield "state-recurrent", Unsound({"state": hybrid}, len(SEQUENCE.data))
    built, name, value, behind = ROWS["an infinite scale"]
    yield "state-non-finite", Unsound({"state": built.patched(name, value, behind)}, built.fields[name] + behind)
    whole = non_finite_cache()
    yield "mlx-cache-non-finite", Unsound({"cache.safetensors": whole}, len(whole) - 6, "0.0.1")
    few = build_state(tokens=[5])
    yield "state-token-count", Unsound({"state": few.data}, few.fields["n_tokens"])
    for metadata, arrays, rule in MLX_CASES.values():
        yield names[rule], Unsound({"cache.safetensors": cache_bytes(metadata, arrays)}, -1)
    for rule, change, _, _ in reversed(CASES):
        yield names[rule], gguf(carrier_bytes(SMALL, change), -1)
    for built, place, value, behind, rule, at, more in PATCHED.values():
        yield names[rule], Unsound({"state": built.patched(place, value, behind)}, built.fields[at] + more)


def unsound_files(folder: Path) -> dict[str, Unsound]:
    """Every rule that has a case here. folder: to build in."""
    cases = {code: gguf(data, at) for data, code, at, _ in reversed(DAMAGED.values())}
    for more in (
        layout_cases(), model_cases(), split_cases(folder), safetensors_cases(), calibration_cases(folder),
        belonging_cases(folder),
    ):  # fmt: skip
        cases.update(more)
    for name, case in other_kinds():
        cases.setdefault(name, case)
    return cases
