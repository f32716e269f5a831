"""The metadata of a snapshot in our GGUF carrier, as records: what its codecs and layers say they are.

Each problem goes to `report`, which raises in a reader and collects in a validator; where nothing can be said any more
the answer is None. Tensors are not looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import BALANCE_MODES, BalanceMode
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.file_kind import FileKind, gguf_kind
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.fingerprint import KEYS as FINGERPRINT
from tqgguf.formats.models.fingerprint import Fingerprint, read_fingerprint
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.snapshots.format import (
    CODEC_VERSION,
    CODECS,
    GENERAL_TYPE,
    KEYS,
    LAYERS,
    MAX_CHUNK,
    MAX_CODECS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_TOKENS,
    ORIGIN,
    VERSION,
)
from tqgguf.formats.wording import shown

Report = Callable[[DefectError], None]
T = TypeVar("T")

Getter = Callable[[str], Any]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class LayerRow:
    """What the metadata says of one layer; see `LayerSnapshot`."""

    layer: int
    n_kv_heads: int
    start: int
    window: int | None
    codec_k: int
    codec_v: int
    balance: BalanceMode
    n_prefix: int
    rope: RopeLayout
    scale_is_given: bool


@dataclass(frozen=True)
class SnapshotTable:
    """What the metadata says of the whole; see `Snapshot`."""

    codecs: tuple[StoredCodec, ...]
    layers: tuple[LayerRow, ...]
    n_cells: int
    chunk: int
    prompt_ranges: tuple[tuple[int, int], ...]
    n_vocab: int
    architecture: str
    model: str
    fingerprint: Fingerprint | None
    origin: Mapping[str, Any]


def is_snapshot(file: GGUFFile) -> bool:
    """Whether a GGUF holds a snapshot, by its keys, or says so."""
    return gguf_kind(file.metadata, ()) is FileKind.SNAPSHOT


def read_table(file: GGUFFile, report: Report) -> SnapshotTable | None:
    """The metadata of a file of which `is_snapshot` is true."""
    return _Table(file, report).read()


def _entries(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One dictionary for each entry that all columns have."""
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


class _Table:
    def __init__(self, file: GGUFFile, report: Report) -> None:
        self.file, self.report = file, report
        self.broken = False
        """Whether something is missing without which there is no table."""

    def read(self) -> SnapshotTable | None:
        file = self.file
        said = file.metadata.get("general.type")
        if said is None:
            message = f"general.type is missing: expected {GENERAL_TYPE}, as the file's keys are"
            self.report(GgufError("general-type", file.path, message, expected=GENERAL_TYPE))
        elif said != GENERAL_TYPE:
            self._bad("general-type", "general.type", GENERAL_TYPE, shown(said))
        version = self._get(lambda: file.uint(f"{KEYS}version"), 0)
        if self.broken or version != VERSION:
            if not self.broken:
                self._bad("snapshot-version", f"{KEYS}version", VERSION, version)
            return None
        codecs, layers = self._codecs(), self._layers()
        n_cells = self._get(lambda: file.uint(f"{KEYS}cells"), 0)
        chunk = self._get(lambda: file.uint(f"{KEYS}chunk", 0), 0)
        n_vocab = self._get(lambda: file.uint(f"{KEYS}vocabulary", 0), 0)
        architecture = self._get(lambda: file.text("general.architecture", ""), "")
        model = self._get(lambda: file.text("general.name", ""), "")
        edges = self._get(lambda: file.uints(f"{KEYS}prompt_ranges", _NONE), _NONE).tolist()
        has_fingerprint = any(key.startswith(FINGERPRINT) for key in file.metadata)
        fingerprint = self._get(lambda: read_fingerprint(file), None) if has_fingerprint else None
        if self.broken or not self._codecs_exist(layers, codecs):
            return None
        if chunk % PAGE_TOKENS or chunk > MAX_CHUNK:
            self._bad("token-count", f"{KEYS}chunk", f"a multiple of {PAGE_TOKENS} up to {MAX_CHUNK}", chunk)
        for key, count in ((f"{KEYS}cells", n_cells), (f"{KEYS}vocabulary", n_vocab)):
            if count > MAX_TOKENS:
                self._bad("token-count", key, f"at most {MAX_TOKENS}", count)
        if len(edges) % 2:
            self._bad("snapshot-columns", f"{KEYS}prompt_ranges", "pairs of first and end", f"{len(edges)} numbers")
        return SnapshotTable(
            codecs=codecs,
            layers=layers,
            n_cells=n_cells,
            chunk=chunk,
            prompt_ranges=tuple(zip(edges[::2], edges[1::2], strict=False)),
            n_vocab=n_vocab,
            architecture=architecture,
            model=model,
            fingerprint=fingerprint,
            origin=self._origin(),
        )

    def _get(self, getter: Callable[[], T], instead: T) -> T:
        try:
            return getter()
        except DefectError as error:
            self.report(error)
            self.broken = True
            return instead

    def _bad(self, rule: str, key: str, expected: object, found: object, where: str = "") -> None:
        entry = self.file._entries.get(key)
        self.report(
            GgufError(
                rule,
                self.file.path,
                f"{key}{where}: expected {expected}, found {found}",
                offset=None if entry is None else entry.value_offset,
                expected=expected,
                found=found,
            )
        )

    def _columns(self, prefix: str, count: int, getters: Mapping[str, Getter]) -> dict[str, Any]:
        """Arrays of `count` entries each, by the last part of their keys; none if one of them is missing or wrong."""
        columns: dict[str, Any] = {}
        for name, getter in getters.items():
            key = prefix + name
            values: Any = self._get(lambda get=getter, key=key: get(key), _NONE)  # type: ignore[misc]
            if values is not _NONE and len(values) != count:
                self._bad("snapshot-columns", key, f"{count} entries", len(values))
                self.broken = True
            columns[name] = values
        return {} if self.broken else columns

    def _codecs(self) -> tuple[StoredCodec, ...]:
        versions = self._get(lambda: self.file.uints(f"{CODECS}version", _NONE), _NONE).tolist()
        wrong = next((i for i, version in enumerate(versions) if version != CODEC_VERSION), None)
        if len(versions) > MAX_CODECS:
            self._bad("over-limit", f"{CODECS}version", f"at most {MAX_CODECS} codecs", len(versions))
        elif wrong is not None:
            self._bad("codec-version", f"{CODECS}version", CODEC_VERSION, versions[wrong], f" of codec {wrong}")
        if not versions or len(versions) > MAX_CODECS or wrong is not None:
            self.broken = self.broken or bool(versions)
            return ()
        numbers = ("head_dim", "stored_dim", "block_size", "block_bytes", "rotation_size", "generation")
        getters: dict[str, Getter] = {"type": self.file.texts, "rotation": self.file.texts}
        columns = self._columns(CODECS, len(versions), getters | dict.fromkeys(numbers, self.file.uints))
        codecs = [self._codec(i, said) for i, said in enumerate(_entries(columns))]
        whole = tuple(codec for codec in codecs if codec is not None)
        self.broken = self.broken or len(whole) < len(versions)
        return whole

    def _codec(self, i: int, said: Mapping[str, Any]) -> StoredCodec | None:
        sizes = {name: int(value) for name, value in said.items() if not isinstance(value, str)}
        codec = StoredCodec(
            said["type"],
            sizes["head_dim"],
            sizes["stored_dim"],
            said["rotation"],
            sizes["rotation_size"],
            sizes["generation"],
        )
        problem = codec.problem()
        if problem is not None:
            entry = self.file._entries[f"{CODECS}type"]
            self.report(GgufError("codec", self.file.path, f"codec {i}: {problem}", offset=entry.value_offset))
            return None
        for name in ("block_size", "block_bytes"):
            expected = getattr(codec.codec, name)
            if sizes[name] != expected:
                self._bad("codec-size", CODECS + name, expected, sizes[name], f" of codec {i} ({codec.cache_type})")
                return None
        return codec

    def _layers(self) -> tuple[LayerRow, ...]:
        count = self._get(lambda: self.file.uint(f"{KEYS}layers"), 0)
        if count > MAX_LAYERS:
            self._bad("over-limit", f"{KEYS}layers", f"at most {MAX_LAYERS} layers", count)
            self.broken = True
        if self.broken or not count:
            return ()
        numbers = ("number", "kv_heads", "start", "window", "codec_k", "codec_v", "prefix", "rope_dims")
        getters: dict[str, Getter] = {"balance": self.file.texts} | dict.fromkeys(numbers, self.file.uints)
        getters |= dict.fromkeys(("rope_traditional", "scale_is_given"), self.file.flags)
        rows = [self._layer(i, said) for i, said in enumerate(_entries(self._columns(LAYERS, count, getters)))]
        for i, (before, row) in enumerate(pairwise(rows), 1):
            if row.layer <= before.layer:
                self._bad("layer-number", f"{LAYERS}number", f"more than {before.layer}", row.layer, f" in entry {i}")
        return tuple(rows)

    def _layer(self, i: int, said: Mapping[str, Any]) -> LayerRow:
        limits = {"kv_heads": (1, MAX_HEADS), "number": (0, MAX_LAYERS), "prefix": (0, PAGE_TOKENS)}
        limits |= {"start": (0, MAX_TOKENS), "window": (0, MAX_TOKENS)}
        for name, (low, high) in limits.items():
            if not low <= said[name] <= high:
                self._bad("layer-value", LAYERS + name, f"{low} to {high}", int(said[name]), f" in entry {i}")
        if said["balance"] not in BALANCE_MODES:
            expected = f"one of {', '.join(BALANCE_MODES)}"
            self._bad("layer-value", f"{LAYERS}balance", expected, shown(said["balance"]), f" in entry {i}")
        if said["rope_dims"] % 2:
            self._bad("layer-value", f"{LAYERS}rope_dims", "an even number", int(said["rope_dims"]), f" in entry {i}")
        return LayerRow(
            layer=int(said["number"]),
            n_kv_heads=int(said["kv_heads"]),
            start=int(said["start"]),
            window=int(said["window"]) or None,
            codec_k=int(said["codec_k"]),
            codec_v=int(said["codec_v"]),
            balance=said["balance"],
            n_prefix=int(said["prefix"]),
            rope=RopeLayout(int(said["rope_dims"]), bool(said["rope_traditional"])),
            scale_is_given=bool(said["scale_is_given"]),
        )

    def _codecs_exist(self, layers: tuple[LayerRow, ...], codecs: tuple[StoredCodec, ...]) -> bool:
        known = True
        for i, row in enumerate(layers):
            for name in ("codec_k", "codec_v"):
                if getattr(row, name) >= len(codecs):
                    found = getattr(row, name)
                    self._bad("layer-value", LAYERS + name, f"below {len(codecs)}", found, f" in entry {i}")
                    known = False
        return known

    def _origin(self) -> Mapping[str, Any]:
        named = {key.removeprefix(ORIGIN): value for key, value in self.file.metadata.items() if key.startswith(ORIGIN)}
        return {name: value for name, value in named.items() if not isinstance(value, list)}
