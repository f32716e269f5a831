"""From a snapshot to a llama.cpp state file: sessions (`--prompt-cache`) and sequence files (slots).

Rows of whole pages are copied; the f16 tail and exact prefix are encoded into the type of their layer, a first
quantisation. Rows that would be quantised again, because they are balanced or wanted in another codec, are refused
unless that is asked for. A snapshot that came from such a file makes the same bytes again, as far as its `origin` says
how (see `llama.to_snapshot`) and nothing else is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.llama.blocks import group_bytes
from tqgguf.formats.llama.format import KINDS, Kind
from tqgguf.formats.llama.profiles import MAINLINE, TURBO_FORMS, BlockForm, by_rotation
from tqgguf.formats.llama.reading import resolve_reading, same_heads
from tqgguf.formats.llama.state import NO_BYTES, Cells, LayerRows, LlamaState, Memory, Stream
from tqgguf.formats.llama.state_rows import CellColumns, CellRows
from tqgguf.formats.llama.to_snapshot import ASSUMED_KEY, CARRIER, REWRITTEN_KEY
from tqgguf.formats.models.outline import rope_layout
from tqgguf.formats.snapshots.recoded_rows import RecodedRows, must_requantise
from tqgguf.formats.snapshots.rope_order import channel_order
from tqgguf.formats.snapshots.snapshot import UNKNOWN_TOKEN, LayerSnapshot, Snapshot

Codecs = dict[tuple[int, Side], StoredCodec]


@dataclass(frozen=True)
class ExportOptions:
    """None: what the snapshot's origin says, else the default.

    profile: whose file it is to be (mainline). kind: session (default) or sequence. v_trans: values transposed, as
    llama.cpp without flash attention wants them (False). type_k, type_v: of layers, as -ctk and -ctv take them (the
    snapshot's own). rotated, generation: as ImportOptions. requantise: quantise again what has to be.
    """

    profile: str | None = None
    kind: Kind | None = None
    v_trans: bool | None = None
    type_k: str | None = None
    type_v: str | None = None
    rotated: bool | None = None
    generation: int | None = None
    requantise: bool = False


def export_llama_state(snapshot: Snapshot, options: ExportOptions | None = None) -> LlamaState:
    """The record to be written by `llama.write`. Its rows are read from the snapshot while it is written.

    RequestError: the profile has no such type, heads cannot have it, rows would have to be quantised again, or the
    snapshot lacks what llama.cpp needs.
    """
    if snapshot.n_cells and not snapshot.layers:
        raise RequestError("llama.cpp needs rows of a layer at least; the prompt cache holds tokens, and no layers")
    return _Export(snapshot, options or ExportOptions()).state()


class _Export:
    def __init__(self, snapshot: Snapshot, options: ExportOptions) -> None:
        self.snapshot, self.options = snapshot, options
        self.origin = snapshot.origin if snapshot.origin.get("carrier") == CARRIER else {}
        profile = options.profile or str(self.origin.get("profile", MAINLINE))
        self.same_profile = self.origin.get("profile") == profile
        told = self.origin if self.same_profile else {}
        self.reading = resolve_reading(
            profile,
            told.get("rotated") if options.rotated is None else options.rotated,
            told.get("generation") if options.generation is None else options.generation,
        )
        kind = options.kind or self.origin.get("kind", "session")
        if kind not in KINDS:
            raise RequestError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
        self.kind: Kind = kind
        self.architecture = str(self.origin.get("architecture", snapshot.architecture))
        self.as_was = self.same_profile and self.origin.get("kind") == kind

    def state(self) -> LlamaState:
        architecture = self.architecture
        if self.kind == "session" and not architecture:
            raise RequestError("a session file names its architecture, which this prompt cache does not know")
        keeps_version = self.as_was and self.options.profile is None
        version = self.origin["version"] if keeps_version else self.reading.profile.versions[self.kind]
        codecs = self._codecs()
        self._refuse_requantising(codecs)
        has_packed = self.kind == "sequence" and "packed" in self.origin
        return LlamaState(
            path="",
            kind=self.kind,
            version=int(version),
            tokens=self._tokens(),
            architecture=architecture if self.kind == "session" else None,
            memories=tuple(self._memories(codecs)),
            packed=np.asarray(self.origin["packed"], np.uint8) if has_packed else None,
            trailing=np.asarray(self.origin.get("trailing", NO_BYTES), np.uint8) if self.as_was else NO_BYTES,
        )

    def _tokens(self) -> NDArray[np.int32]:
        """The tokens up to the first that is not known. Those without rows are left out, unless they came from such a
        file: llama.cpp takes it that it has evaluated all tokens that a file names.
        """
        tokens = self.snapshot.tokens
        if self.snapshot.n_cells and not self.origin:
            tokens = tokens[: self.snapshot.n_cells]
        unknown = np.flatnonzero(tokens == UNKNOWN_TOKEN)
        return tokens[: unknown[0]] if len(unknown) else tokens

    def _memories(self, codecs: Codecs) -> list[Memory]:
        """The base memory, and one of the layers that have a window."""
        layers = self.snapshot.layers
        windows = [layer for layer in layers if layer.window is not None]
        if not windows or self.origin.get("memories") == 1:
            return [self._memory(list(layers), "base", codecs)]
        base = [layer for layer in layers if layer.window is None]
        return [self._memory(base, "base", codecs), self._memory(windows, "window", codecs)]

    def _memory(self, layers: list[LayerSnapshot], name: str, codecs: Codecs) -> Memory:
        positions = self._positions(layers, name)
        n_streams, index = int(self.origin.get(f"streams_{name}", 1)), int(self.origin.get(f"stream_{name}", 0))
        transposed = self.options.v_trans
        if transposed is None:
            transposed = bool(self.origin.get(f"v_trans_{name}", False))
        empty = Stream(Cells.of_sequence(np.empty(0, np.int32)))
        held = empty
        if len(positions):
            k = tuple(self._rows(layer, "k", codecs, positions, False) for layer in layers)
            v = tuple(self._rows(layer, "v", codecs, positions, transposed) for layer in layers)
            cells = Cells.of_sequence(positions, int(self.origin.get("sequence", 0)))
            held = Stream(cells, int(transposed), k, v)
        return Memory(tuple(held if i == index else empty for i in range(n_streams)))

    def _positions(self, layers: list[LayerSnapshot], name: str) -> NDArray[np.int32]:
        """The position of each cell. Window layers keep what the next query sees, as llama.cpp's sequence files do,
        and other rows only where they came with the snapshot.
        """
        n_cells = self.snapshot.n_cells
        first = max((layer.start for layer in layers), default=0)
        window = max((layer.window or 0 for layer in layers), default=0) if name == "window" else None
        if window is None and first:
            raise RequestError(
                f"llama.cpp needs all tokens of layers without a window; the prompt cache begins at {first}"
            )
        if window is not None and first > max(0, n_cells - window + 1):
            raise RequestError(
                f"llama.cpp needs {window} tokens of layers with such a window; the prompt cache begins at {first} of "
                f"{n_cells}"
            )
        order = self.origin.get(f"order_{name}")
        if order is not None and len(order) == n_cells - first:
            return np.asarray(order, np.int32)
        if window is not None and ("kind" not in self.origin or self.origin.get(REWRITTEN_KEY)):
            first = max(first, n_cells - window)
        return np.arange(first, n_cells, dtype=np.int32)

    def _rows(
        self, layer: LayerSnapshot, side: Side, codecs: Codecs, positions: NDArray[np.int32], transposed: bool
    ) -> LayerRows:
        codec = codecs[layer.layer, side]
        type_id = self.reading.profile.type_id(codec.cache_type)
        assert type_id is not None
        rows = RecodedRows(layer.side(side), codec, layer.start, self._order(layer, side))
        cells = CellRows(rows, positions.astype(np.intp) - layer.start, codec.cache_type, self._form(codec.cache_type))
        if not transposed:
            return LayerRows(type_id, cells)
        if not codec.is_float:
            raise RequestError(
                f"layer {layer.layer}: V is of type {codec.cache_type}; llama.cpp transposes float types only"
            )
        element_bytes = BLOCK_TYPES[codec.cache_type].block_bytes
        return LayerRows(type_id, CellColumns(cells, element_bytes), element_bytes)

    def _order(self, layer: LayerSnapshot, side: Side) -> NDArray[np.intp] | None:
        """The channels of keys in the order of the architecture's GGUFs, None where that is what they have."""
        if side == "v" or not self.architecture:
            return None
        return channel_order(layer.k.codec.head_dim, layer.rope, rope_layout(self.architecture, layer.rope.dims))

    def _form(self, cache_type: str) -> BlockForm | None:
        """The layout of turbo blocks in the file, None for other types."""
        if cache_type not in TURBO_FORMS:
            return None
        n_bytes = self.reading.profile.block_bytes(cache_type)
        if self.same_profile:
            n_bytes = int(self.origin.get(f"block_bytes_{cache_type}", n_bytes))
        return next(form for form in TURBO_FORMS[cache_type] if group_bytes(form) == n_bytes)

    def _codecs(self) -> Codecs:
        """The codec of each side of each layer in the file."""
        layers, options = self.snapshot.layers, self.options
        asked = {"k": _asked(options.type_k, len(layers)), "v": _asked(options.type_v, len(layers))}
        shapes = {layer.layer: _shape(layer) for layer in layers}
        codecs: Codecs = {}
        is_assumed = options.profile is None and options.rotated is None and ASSUMED_KEY in self.origin
        for i, layer in enumerate(layers):
            together = [shapes[other.layer] for other in layers if (other.window is None) == (layer.window is None)]
            for side in SIDES:
                types = asked[side]
                cache_type = layer.side(side).codec.cache_type if types is None else types[i]
                if self.reading.profile.type_id(cache_type) is None:
                    raise RequestError(
                        f"layer {layer.layer}: {side.upper()} is of type {cache_type}, which profile "
                        f"{self.reading.profile.name} does not have: ask for another type (-ctk, -ctv), or name a "
                        "fork (--profile)"
                    )
                even = same_heads(together, side)
                codec = self.reading.codec(cache_type, shapes[layer.layer], side, even)
                if is_assumed and codec != self.reading.turned().codec(cache_type, shapes[layer.layer], side, even):
                    raise RequestError(
                        f"layer {layer.layer}: {side.upper()} of type {cache_type} is stored rotated by some builds of "
                        f"llama.cpp and not by others, and it is not known which one the file is for: name it with "
                        f"--profile: {by_rotation()}"
                    )
                codecs[layer.layer, side] = codec
        return codecs

    def _refuse_requantising(self, codecs: Codecs) -> None:
        if self.options.requantise:
            return
        for layer in self.snapshot.layers:
            for side in SIDES:
                held, codec = layer.side(side), codecs[layer.layer, side]
                order = self._order(layer, side)
                if must_requantise(held, codec, order):
                    balanced = ", balanced" if held.page_means is not None else ""
                    balanced += ", with RoPE's channels in another order" if order is not None else ""
                    raise RequestError(
                        f"layer {layer.layer}: {side.upper()} holds blocks ({_words(held.codec)}{balanced}) that would "
                        f"be quantised again to become {_words(codec)}; --requantise allows it"
                    )


def _asked(text: str | None, n_layers: int) -> list[str] | None:
    """The type of each layer, None where nothing is asked for."""
    return None if text is None else [types.type_k for types in CacheSpec(text, text).resolve(n_layers)]


def _shape(layer: LayerSnapshot) -> LayerShape:
    return LayerShape(layer.n_kv_heads, layer.k.codec.head_dim, layer.v.codec.head_dim, layer.window)


def _words(codec: StoredCodec) -> str:
    """A codec in a few words."""
    rotation = f", rotated by {codec.rotation_size}" if codec.rotation_size else ""
    padded = f" padded to {codec.stored_dim}" if codec.stored_dim != codec.head_dim else ""
    generation = f", codebook {codec.generation}" if codec.generation else ""
    return f"{codec.cache_type} of {codec.head_dim}{padded}{rotation}{generation}"
