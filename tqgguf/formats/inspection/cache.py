"""What files that belong to a model's KV cache hold: snapshots, calibrations, llama.cpp's session and sequence files,
mlx-lm's prompt caches.

Their structure is checked as their readers do, which is where errors come from; the bytes of blocks are not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import F16_BYTES, SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.llama.reader import StateSummary, examine_llama_state, summarise
from tqgguf.formats.mlx.cache import FLOATS, NUMBERS, QUANTIZED, ROTATING, MlxLayer, outline_mlx_cache
from tqgguf.formats.mlx.to_snapshot import OWN_PREFIX, TOKENS_KEY, head_dim
from tqgguf.formats.models.calibration import read_calibration
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.safetensors import SafetensorsFile
from tqgguf.formats.snapshots.parts import PART_NAMES
from tqgguf.formats.snapshots.read import read_snapshot
from tqgguf.formats.snapshots.snapshot import SideSnapshot, Snapshot, array_bytes


@dataclass(frozen=True)
class CodecUse:
    """A codec, and how many layers have it as K or V."""

    side: Side
    codec: StoredCodec
    n_layers: int


@dataclass(frozen=True)
class SnapshotFacts:
    """n_tokens: all; n_cells: those that have rows. prompt_tokens: those that were evaluated as prompt. n_bytes: of all
    that the layers hold and the tokens; parts: by field of SideSnapshot, both sides together. f16_bytes: of the same
    rows in f16. balance: modes of K with their layers. n_prefix: tokens of the exact prefix, of any layer.
    fingerprint: hash by part of the model.
    """

    architecture: str
    model: str
    n_tokens: int
    n_cells: int
    chunk: int
    prompt_tokens: int
    n_layers: int
    n_kv_heads: tuple[int, ...]
    n_window_layers: int
    codecs: tuple[CodecUse, ...]
    balance: Mapping[str, int]
    n_calibrated: int
    n_prefix: int
    n_bytes: int
    f16_bytes: int
    parts: Mapping[str, int]
    fingerprint: Mapping[str, Any] | None
    origin: Mapping[str, Any]


@dataclass(frozen=True)
class CalibrationFacts:
    """scale: the least and the greatest of all channels."""

    architecture: str
    model: str
    n_tokens: int
    text: str
    text_sha256: str
    measured_with: str
    n_layers: int
    shapes: tuple[tuple[int, int], ...]
    scale: tuple[float, float]
    fingerprint: Mapping[str, Any]


MLX_CACHE_KIND: Final = "mlx-lm prompt cache"
"""The kind of a safetensors file that holds one."""


@dataclass(frozen=True)
class MlxCacheFacts:
    """classes: layers by mlx-lm's class. n_tokens: that the layers have seen (one number, but for a damaged file).
    n_held: the most that a layer holds, fewer where it keeps a window. types: dtypes of values, of a quantised cache
    with its bits. window: of the layers that keep one. n_bytes: of all arrays, with their spare room. model,
    tokenizer_config: what the file says beside the cache. has_tokens: whether their ids are in the file.
    """

    layout: str
    n_layers: int
    classes: Mapping[str, int]
    n_tokens: tuple[int, ...]
    n_held: int
    n_kv_heads: tuple[int, ...]
    head_dims_k: tuple[int, ...]
    head_dims_v: tuple[int, ...]
    types: Mapping[str, int]
    windows: tuple[int, ...]
    n_bytes: int
    metadata: Mapping[str, str]
    has_tokens: bool


_PARTS = ("rows", *PART_NAMES)


def snapshot_facts(file: GGUFFile) -> tuple[SnapshotFacts, tuple[str, ...]]:
    """The facts, and warnings. DefectError: the first error of the snapshot's structure."""
    warnings: list[str] = []

    def report(defect: DefectError) -> None:
        if defect.is_error:
            raise defect
        warnings.append(defect.bare)

    snapshot = read_snapshot(file, report)
    assert snapshot is not None  # every reason for None is an error
    return _of_snapshot(snapshot), tuple(warnings)


def _of_snapshot(snapshot: Snapshot) -> SnapshotFacts:
    layers = snapshot.layers
    sides = [layer.side(side) for layer in layers for side in SIDES]
    uses = Counter((side, layer.side(side).codec) for side in SIDES for layer in layers)
    parts = {part: sum(_part_bytes(side, part) for side in sides) for part in _PARTS}
    return SnapshotFacts(
        architecture=snapshot.architecture,
        model=snapshot.model,
        n_tokens=len(snapshot.tokens),
        n_cells=snapshot.n_cells,
        chunk=snapshot.chunk,
        prompt_tokens=sum(end - start for start, end in snapshot.prompt_ranges),
        n_layers=len(layers),
        n_kv_heads=tuple(sorted({layer.n_kv_heads for layer in layers})),
        n_window_layers=sum(layer.window is not None for layer in layers),
        codecs=tuple(CodecUse(side, codec, n) for (side, codec), n in uses.items()),
        balance=dict(Counter(layer.balance for layer in layers)),
        n_calibrated=sum(layer.scale_is_given for layer in layers),
        n_prefix=max((layer.n_prefix for layer in layers), default=0),
        n_bytes=snapshot.tokens.nbytes + sum(map(array_bytes, sides)),
        f16_bytes=sum(side.n_tokens * side.rows.shape[1] * side.codec.head_dim * F16_BYTES for side in sides),
        parts={part: n_bytes for part, n_bytes in parts.items() if n_bytes},
        fingerprint=None if snapshot.fingerprint is None else asdict(snapshot.fingerprint),
        origin=snapshot.origin,
    )


def _part_bytes(side: SideSnapshot, part: str) -> int:
    if part == "rows":
        return int(np.prod(side.rows.shape))
    array = getattr(side, part)
    return 0 if array is None else array.nbytes


def calibration_facts(path: str) -> CalibrationFacts:
    """Errors as `read_calibration`."""
    found = read_calibration(path)
    scales = list(found.scales.values())
    return CalibrationFacts(
        architecture=found.architecture,
        model=found.model,
        n_tokens=found.n_tokens,
        text=found.text,
        text_sha256=found.text_sha256,
        measured_with=found.measured_with,
        n_layers=len(scales),
        shapes=tuple(sorted({(scale.shape[0], scale.shape[1]) for scale in scales})),
        scale=(min(float(scale.min()) for scale in scales), max(float(scale.max()) for scale in scales)),
        fingerprint=asdict(found.fingerprint),
    )


def state_facts(path: str) -> tuple[StateSummary, tuple[str, ...]]:
    """What a llama.cpp state file holds, and warnings. DefectError: its first error."""
    state, findings = examine_llama_state(path)
    for finding in findings:
        if finding.is_error:
            raise finding
    if state is None:
        raise FormatError(f"{path}: expected a llama.cpp session or sequence file, found none")
    return summarise(state), tuple(finding.bare for finding in findings)


_LAYOUTS: Final = {"current": "mlx-lm 0.32 and later", "before": "mlx-lm before 0.32"}


def mlx_cache_facts(file: SafetensorsFile) -> tuple[MlxCacheFacts, tuple[str, ...]]:
    """What a prompt cache of mlx-lm holds, and notes. DefectError: as `outline_mlx_cache`."""
    cache = outline_mlx_cache(file)
    layers = [layer for layer in cache.layers if layer.kind in NUMBERS]
    filled = [layer for layer in layers if layer.keys]
    own = {key: value for key, value in cache.metadata.items() if key.startswith(OWN_PREFIX)}
    facts = MlxCacheFacts(
        layout=_LAYOUTS[cache.layout],
        n_layers=len(cache.layers),
        classes=dict(Counter(layer.kind for layer in cache.layers)),
        n_tokens=tuple(sorted({layer.offset for layer in layers})),
        n_held=max((layer.n_held for layer in filled), default=0),
        n_kv_heads=tuple(sorted({layer.keys[0].data.shape[1] for layer in filled})),
        head_dims_k=tuple(sorted({head_dim(layer, layer.keys) for layer in filled})),
        head_dims_v=tuple(sorted({head_dim(layer, layer.values) for layer in filled})),
        types=dict(Counter(map(_type_of, filled))),
        windows=tuple(sorted({layer.numbers["max_size"] for layer in layers if layer.kind == ROTATING})),
        n_bytes=sum(tensor.data.nbytes for tensor in file.values()),
        metadata={key: value for key, value in cache.metadata.items() if key not in own},
        has_tokens=TOKENS_KEY in own,
    )
    others = sorted({layer.kind for layer in cache.layers} - set(NUMBERS))
    return facts, tuple(
        f"layers of class {kind} can be used by mlx-lm alone: they are not looked into" for kind in others
    )


def _type_of(layer: MlxLayer) -> str:
    """The type of a layer's values."""
    if layer.kind == QUANTIZED:
        return f"{layer.numbers['bits']} bits in groups of {layer.numbers['group_size']}"
    return FLOATS[layer.keys[0].dtype]
