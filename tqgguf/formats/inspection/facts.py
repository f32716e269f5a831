"""What an inspection tells of any file: sizes, tensors by type, metadata, what a KV cache of the model costs.

Records only; their neighbours fill them. Nothing is judged: a validator's business is elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape, kv_bytes
from tqgguf.formats.errors import RequestError

DEFAULT_CONTEXT = 4096
"""Tokens that a KV cache is stated for where a model names no context."""
KV_STEP = 1024
"""Tokens that a cache's growth is stated for."""
DIMS_FASTEST_FIRST = "fastest first"
DIMS_SLOWEST_FIRST = "slowest first"


@dataclass(frozen=True)
class FileSize:
    """One file, and its length in bytes."""

    path: str
    n_bytes: int


@dataclass(frozen=True)
class TensorLine:
    """One tensor. dims: in the file's own order. n_bytes: without padding, None where the type is unknown. offset: in
    its file, of number `file`.
    """

    name: str
    type: str
    dims: tuple[int, ...]
    n_values: int
    n_bytes: int | None
    offset: int
    file: int = 0


@dataclass(frozen=True)
class TypeTotal:
    """All tensors of one type. n_bytes: None where the type is unknown."""

    type: str
    n_tensors: int
    n_values: int
    n_bytes: int | None


@dataclass(frozen=True)
class MetadataValue:
    """type: in the container's words. value: a number, text, truth value, or an array or list of such."""

    type: str
    value: Any


@dataclass(frozen=True)
class KvCost:
    """K and V of one cache type, balance and exact prefix as that type has them by default; bytes of all layers.

    growth: for KV_STEP tokens more, far beyond any window. total: at the model's context. Both None where some
    layer's heads cannot have the type.
    """

    cache_type: str
    growth: int | None
    total: int | None


@dataclass(frozen=True)
class Inspection:
    """kind: see `file_kind.FileKind`, or "mlx folder". container: the file format and its version. about: what is
    particular to the kind, a dataclass. costs: of a model's KV cache, at n_context tokens. notes: what a reader of
    these figures should know.
    """

    path: str
    kind: str
    container: str
    files: tuple[FileSize, ...]
    about: Any = None
    tensors: tuple[TensorLine, ...] = ()
    dims_order: str = DIMS_FASTEST_FIRST
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    costs: tuple[KvCost, ...] = ()
    n_context: int = 0
    notes: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    def types(self) -> tuple[TypeTotal, ...]:
        """The tensors by type, most bytes first; unknown types last."""
        groups: dict[str, list[TensorLine]] = {}
        for tensor in self.tensors:
            groups.setdefault(tensor.type, []).append(tensor)
        totals = [_total(name, lines) for name, lines in groups.items()]
        return tuple(sorted(totals, key=lambda total: -1 if total.n_bytes is None else total.n_bytes, reverse=True))


def _total(name: str, lines: Sequence[TensorLine]) -> TypeTotal:
    sizes = [line.n_bytes for line in lines if line.n_bytes is not None]
    n_bytes = sum(sizes) if len(sizes) == len(lines) else None
    return TypeTotal(name, len(lines), sum(line.n_values for line in lines), n_bytes)


def kv_costs(shapes: Sequence[LayerShape], n_context: int) -> tuple[KvCost, ...]:
    """Of every cache type, K and V alike; nothing for a model without KV caches."""
    if not shapes:
        return ()
    widest = max(shape.window or 0 for shape in shapes)
    start = -(-widest // KV_STEP) * KV_STEP + KV_STEP  # past every window and the exact prefix
    heads: Counter[LayerShape] = Counter()  # bytes are proportional to heads: layers of one kind count as one
    for shape in shapes:
        heads[replace(shape, n_kv_heads=1)] += shape.n_kv_heads
    layers = [replace(shape, n_kv_heads=n) for shape, n in heads.items()]
    return tuple(_cost(name, layers, start, n_context) for name in CACHE_TYPE_NAMES)


def _cost(cache_type: str, layers: Sequence[LayerShape], start: int, n_context: int) -> KvCost:
    types = CacheSpec(cache_type, cache_type).resolve(len(layers))
    try:
        growth = kv_bytes(layers, types, start + KV_STEP) - kv_bytes(layers, types, start)
        return KvCost(cache_type, growth, kv_bytes(layers, types, n_context))
    except RequestError:
        return KvCost(cache_type, None, None)
