"""From snapshots to mlx-lm's prompt caches, which its load_prompt_cache and `--prompt-cache-file` take.

Layers without a window become KVCache, or QuantizedKVCache where that is asked for; those with one, RotatingKVCache.
Rows of whole pages that are blocks would be decoded, which is refused unless it is asked for. One side of one layer is
in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.mlx.affine import BITS, GROUP_SIZES, quantise
from tqgguf.formats.mlx.cache import FLOATS, KV, LAYOUTS, NUMBERS, QUANTIZED, ROTATING, Layout
from tqgguf.formats.mlx.to_snapshot import CARRIER, ORDER_KEY, ROPE_ORDERS, TOKENS_KEY
from tqgguf.formats.models.outline import original_layout
from tqgguf.formats.safetensors_write import TensorToWrite, write_safetensors
from tqgguf.formats.snapshots.recoded_rows import RecodedRows, must_requantise
from tqgguf.formats.snapshots.rope_order import channel_order
from tqgguf.formats.snapshots.snapshot import SLICE_BYTES, UNKNOWN_TOKEN, LayerSnapshot, Snapshot

_DTYPES = {cache_type: dtype for dtype, cache_type in FLOATS.items()}
_DEFAULT_METADATA = {"model": "", "tokenizer_config": "{}"}  # what mlx_lm.generate looks for


@dataclass(frozen=True)
class MlxExportOptions:
    """None: what the snapshot's origin says, else the default.

    layout: "current" (default) or "before" (mlx-lm up to 0.31). bits: quantise to so many, in groups of group_size (0:
    keep floats; also of a cache that came quantised, for it would be quantised twice). cache_type: of floats, f16, bf16
    or f32 (the snapshot's where it has one of these, else f16). traditional: whether RoPE shall turn neighbouring
    channels (as with the model's original weights). metadata: beside the cache; mlx_lm.generate wants `model`, as it
    will be named there, and `tokenizer_config`, JSON. requantise: decode blocks.
    """

    layout: Layout | None = None
    bits: int = 0
    group_size: int = 64
    cache_type: str | None = None
    traditional: bool | None = None
    metadata: Mapping[str, str] | None = None
    requantise: bool = False


def write_mlx_cache(path: str | os.PathLike[str], snapshot: Snapshot, options: MlxExportOptions | None = None) -> None:
    """Write a prompt cache of mlx-lm for its owner alone, or replace a file; errors as `atomic.replacing`.

    RequestError: options that cannot be, heads that cannot be quantised so, blocks that would be decoded, rows that a
    layer of mlx-lm needs and the snapshot lacks.
    """
    export = _Export(snapshot, options or MlxExportOptions())
    tensors = export.tensors()
    write_safetensors(path, tensors, export.metadata(), private=True)


class _Export:
    def __init__(self, snapshot: Snapshot, options: MlxExportOptions) -> None:
        self.snapshot, self.options = snapshot, options
        origin = snapshot.origin if snapshot.origin.get("carrier") == CARRIER else {}
        self.origin = origin
        self.layout: Layout = options.layout or origin.get("layout", "current")
        self.bits, self.group_size = options.bits, options.group_size
        for name, value, allowed in (
            ("layout", self.layout, LAYOUTS),
            ("bits", self.bits, (0, *BITS)),
            ("group size", self.group_size, GROUP_SIZES),
            ("type of floats", options.cache_type, (None, *_DTYPES)),
        ):
            if value not in allowed:
                known = ", ".join(str(choice) for choice in allowed if choice is not None)
                raise RequestError(f"{name}: expected one of {known}, found {value!r}")
        self.numbers: list[dict[str, int]] = []

    def tensors(self) -> list[TensorToWrite]:
        """Arrays of all layers, then their numbers; `numbers` are known afterwards."""
        arrays: list[TensorToWrite] = []
        for i, layer in enumerate(self.snapshot.layers):
            arrays += self._layer(i, layer)
        if self.layout == "before":
            return arrays
        numbers = []
        for i, (layer, values) in enumerate(zip(self.snapshot.layers, self.numbers, strict=True)):
            for j, name in enumerate(NUMBERS[self._kind(layer)]["current"]):
                word = np.array(values[name], "<i4").tobytes()
                numbers.append(TensorToWrite(f"{i}.{j + 2}", "I32", (), partial(_once, word)))
        return arrays + numbers

    def metadata(self) -> dict[str, str]:
        """The metadata of the layout; `tensors` has been called."""
        said = {
            name.removeprefix("metadata_"): value for name, value in self.origin.items() if name.startswith("metadata_")
        }
        own = {"model": self.snapshot.model} if self.snapshot.model else {}
        user = {**_DEFAULT_METADATA, **own, **said, **(self.options.metadata or {})}
        known = np.flatnonzero(self.snapshot.tokens == UNKNOWN_TOKEN)
        if len(self.snapshot.tokens) and not len(known):
            user[TOKENS_KEY] = " ".join(map(str, self.snapshot.tokens.tolist()))
        if self.snapshot.layers and (not self.origin or ORDER_KEY in said):
            traditional = self._is_traditional(self.snapshot.layers[0])
            user[ORDER_KEY] = next(order for order, turns in ROPE_ORDERS.items() if turns is traditional)
        kinds = [self._kind(layer) for layer in self.snapshot.layers]
        user_key, class_key = ("0", "1") if self.layout == "current" else ("1", "2")
        made = {f"{user_key}.{name}": value for name, value in user.items()}
        made |= {f"{class_key}.{i}": kind for i, kind in enumerate(kinds)}
        if self.layout == "current":
            made["2.0"] = ""
            names = [f"{i}.{j + 2}" for i, kind in enumerate(kinds) for j in range(len(NUMBERS[kind]["current"]))]
            for n, name in enumerate(names, 1):
                made |= {f"2.{n}.0": name, f"2.{n}.1": "scalar"}
        else:
            for i, (kind, values) in enumerate(zip(kinds, self.numbers, strict=True)):
                numbers = [str(values[name]) for name in NUMBERS[kind]["before"]]
                made |= {f"0.{i}.{j}": text for j, text in enumerate(numbers)} if numbers else {f"0.{i}": ""}
        return made

    def _is_traditional(self, layer: LayerSnapshot) -> bool:
        """Whether RoPE shall turn neighbouring channels of the layer's keys in the file."""
        if self.options.traditional is not None:
            return self.options.traditional
        wanted = original_layout(self.snapshot.architecture, layer.rope)
        return bool(self.origin.get("traditional", wanted.traditional))

    def _kind(self, layer: LayerSnapshot) -> str:
        if layer.window is not None:
            return ROTATING
        return QUANTIZED if self.bits else KV

    def _layer(self, index: int, layer: LayerSnapshot) -> Iterator[TensorToWrite]:
        n_cells, window = self.snapshot.n_cells, layer.window
        needed = 0 if window is None else max(0, n_cells - window + 1)
        if layer.start > needed:
            raise RequestError(
                f"layer {layer.layer}: mlx-lm needs the tokens from {needed} on, the prompt cache begins at "
                f"{layer.start}"
            )
        first = 0 if window is None else max(layer.start, n_cells - window)
        n_held = n_cells - first
        numbers = {"offset": n_cells, "group_size": self.group_size, "bits": self.bits}
        self.numbers.append(numbers | {"keep": 0, "max_size": window or 0, "index": n_held})
        for part, side in enumerate(SIDES):
            rows = self._floats(layer, side)
            name, shape = f"{index}.{part}", (1, layer.n_kv_heads, n_held)
            values = partial(_values, rows, first - layer.start)
            head_dim = rows.codec.head_dim
            dtype = _DTYPES[rows.codec.cache_type]
            if self._kind(layer) != QUANTIZED:
                yield TensorToWrite(name, dtype, (*shape, head_dim), partial(_whole, values))
                continue
            if head_dim % self.group_size or head_dim * self.bits % 32:
                raise RequestError(
                    f"layer {layer.layer}: heads of {head_dim} values cannot be quantised to {self.bits} bits in "
                    f"groups of {self.group_size}"
                )
            widths = (head_dim * self.bits // 32, head_dim // self.group_size, head_dim // self.group_size)
            quantised = _Quantised(values, rows.codec, self.bits, self.group_size)
            for j, (kind, width) in enumerate(zip(("U32", dtype, dtype), widths, strict=True)):
                yield TensorToWrite(f"{name}.{j}", kind, (*shape, width), partial(quantised.part, j))

    def _floats(self, layer: LayerSnapshot, side: Side) -> RecodedRows:
        """A side's rows in a float type, their channels in the order that mlx-lm has."""
        held = layer.side(side)
        cache_type = self.options.cache_type or (held.codec.cache_type if held.codec.is_float else "f16")
        head_dim = held.codec.head_dim
        codec = StoredCodec(cache_type, head_dim, head_dim)
        if must_requantise(held, codec) and not self.options.requantise:
            raise RequestError(
                f"layer {layer.layer}: {side.upper()} holds blocks of {held.codec.cache_type} that would be decoded to "
                f"{cache_type}, and could not be had back; --requantise allows it"
            )
        order = None
        if side == "k":
            order = channel_order(head_dim, layer.rope, RopeLayout(layer.rope.dims, self._is_traditional(layer)))
        return RecodedRows(held, codec, layer.start, order)


def _once(data: bytes) -> Iterable[bytes]:
    yield data


def _values(rows: RecodedRows, first: int) -> NDArray[np.uint8]:
    """All rows from one on, head by head: uint8 [n_kv_heads, tokens, row_bytes]."""
    n_tokens, n_heads, row_bytes = rows.shape
    out = np.empty((n_heads, n_tokens - first, row_bytes), np.uint8)
    step = max(1, SLICE_BYTES // max(1, n_heads * row_bytes))
    for start in range(first, n_tokens, step):
        stop = min(start + step, n_tokens)
        out[:, start - first : stop - first] = rows[start:stop].swapaxes(0, 1)
    return out


def _whole(values: Callable[[], NDArray[np.uint8]]) -> Iterable[memoryview]:
    yield values().data


class _Quantised:
    """Codes, scales and biases of one side of a layer: made when the first is asked for, gone after the last."""

    def __init__(self, values: Callable[[], NDArray[np.uint8]], codec: StoredCodec, bits: int, group_size: int) -> None:
        self.values, self.codec, self.bits, self.group_size = values, codec, bits, group_size
        self.made: list[NDArray] = []

    def part(self, index: int) -> Iterable[memoryview]:
        if index == 0:
            words, scales, biases = quantise(self.codec.decode(self.values()), self.bits, self.group_size)
            one = StoredCodec(self.codec.cache_type, 1, 1)
            self.made = [words, *(one.encode(numbers[..., None]) for numbers in (scales, biases))]
        data = np.ascontiguousarray(self.made[index])
        if index == 2:
            self.made = []
        yield data.data
