"""From a llama.cpp state file to a snapshot. Rows are not copied: they stay in the file until somebody reads them.

What a snapshot has no place for goes to its `origin`, so that `llama.from_snapshot` can write the same file again,
byte by byte. What the file cannot tell is asked for: the model's layers, and how rows are coded (`llama.reading`).

Origin: carrier "llama.cpp", profile, rotated, generation, assumed where these were not told; and where the file holds
one sequence alone: kind, version, architecture, memories, streams and stream (base and window), sequence, v_trans,
`order_base` and `order_window` (the position of each cell where they are not in order), `block_bytes_<type>` of turbo
blocks (of 128 values), packed, trailing; rewritten, where a session went on from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import FormatError, RequestError, UnsupportedModelError
from tqgguf.formats.gguf.types import ggml_type_name
from tqgguf.formats.llama.blocks import form_of, group_bytes
from tqgguf.formats.llama.file_rows import FileRows, file_rows
from tqgguf.formats.llama.profiles import (
    EXCHANGED,
    TURBO_FORMS,
    TURBO_GROUP,
    BlockForm,
    by_rotation,
    fork_readings,
    names_its_profile,
)
from tqgguf.formats.llama.reading import LlamaReading, resolve_reading, same_heads
from tqgguf.formats.llama.row_rules import bad_norm
from tqgguf.formats.llama.rules import sequences
from tqgguf.formats.llama.state import LayerRows, LlamaState, Memory, Stream
from tqgguf.formats.models.outline import CachedLayer, ModelOutline, outline_of_widths, rope_layout
from tqgguf.formats.snapshots.rope_order import ReorderedRows, channel_order
from tqgguf.formats.snapshots.snapshot import UNKNOWN_TOKEN, LayerSnapshot, SideSnapshot, Snapshot, bad_token
from tqgguf.formats.wording import shown

CARRIER = "llama.cpp"
MEMORIES = ("base", "window")
CONTENT_KEYS = ("order_base", "order_window", "packed", "trailing")
"""Of an origin: what is true of the file's cells and tokens, and not of others that are written in its place."""
ASSUMED_KEY = "assumed"
"""Of an origin: set where nobody said whose file it is, and its version does not either."""
REWRITTEN_KEY = "rewritten"
"""Of an origin: set where the snapshot holds other cells than the file that the origin tells of."""


@dataclass(frozen=True)
class ImportOptions:
    """profile: whose file it is (None: mainline's, if its version says so or nothing depends on it). rotated: whether
    ggml's quantised types are rotated; generation: of the codebooks of turbo types (None: the profile's default).
    sequence: which one is wanted of a file that holds several.
    """

    profile: str | None = None
    rotated: bool | None = None
    generation: int | None = None
    sequence: int | None = None


@dataclass(frozen=True)
class _Run:
    """The cells of one sequence in a memory. order: their indices by position, None where they are all cells in order.
    first: the lowest position, with no gap behind it.
    """

    stream: Stream
    index: int
    n_streams: int
    order: NDArray[np.intp] | None
    first: int
    n_cells: int

    @property
    def is_whole(self) -> bool:
        """Whether the memory holds nothing else."""
        return self.n_cells == len(self.stream.cells)


def outline_of_state(state: LlamaState, options: ImportOptions, head_dim: int) -> ModelOutline:
    """The outline of a file's model from the widths of its rows, if all heads have `head_dim` values.

    RequestError: rows are not heads of that size, or the model has windows, whose layers only the model itself tells.
    """
    if state.has_window_memory:
        raise RequestError(
            f"{state.path}: it has a memory for layers with windows; which layers these are only the model can tell: "
            "name its file"
        )
    reading = resolve_reading(options.profile, options.rotated, options.generation)
    stream = _run(state, state.memories[0], "base", options.sequence).stream
    shapes = []
    for i, rows in enumerate(stream.k):
        cache_type = cache_type_of(state.path, rows, reading, f"K of layer {i}")
        one_head = LayerShape(1, head_dim, head_dim)
        codec = reading.codec(cache_type, one_head, "k", True)
        forms = TURBO_FORMS.get(cache_type)
        widths = (
            [codec.row_bytes] if forms is None else [group_bytes(f) * codec.stored_dim // TURBO_GROUP for f in forms]
        )
        n_heads = next((rows.row_bytes // width for width in widths if rows.row_bytes % width == 0), 0)
        if not n_heads:
            raise RequestError(
                f"{state.path}: K of layer {i}: rows of {rows.row_bytes} bytes of {cache_type} are not heads of "
                f"{head_dim} values"
            )
        shapes.append(replace(one_head, n_kv_heads=n_heads))
    return outline_of_widths(state.architecture or "", shapes)


def import_llama_state(state: LlamaState, model: ModelOutline, options: ImportOptions | None = None) -> Snapshot:
    """The snapshot in a state file that `open_llama_state` has checked.

    FormatError: the file's layers are not the model's, or hold what a snapshot cannot; RequestError: flags do not fit
    the file, or one is needed, as where nothing says whether rows are rotated; UnsupportedModelError: positions of
    several dimensions.
    """
    options = options or ImportOptions()
    reading = resolve_reading(options.profile, options.rotated, options.generation)
    if state.architecture is not None and model.architecture and state.architecture != model.architecture:
        raise FormatError(
            f"{state.path}: it is of a model of architecture {shown(state.architecture)}, the model named is of "
            f"{shown(model.architecture)}"
        )
    runs = [_run(state, memory, name, options.sequence) for name, memory in zip(MEMORIES, state.memories, strict=False)]
    n_cells = runs[0].first + runs[0].n_cells
    _check_runs(state, runs, n_cells)
    architecture = state.architecture or model.architecture
    is_told = options.profile is not None or options.rotated is not None
    layers = _Layers(state, architecture, reading, is_told or names_its_profile(state.kind, state.version))
    made = [
        layer
        for run, cached, name in zip(runs, _share(state, model), MEMORIES, strict=False)
        for layer in layers.of_memory(run, cached, name)
    ]
    tokens = np.full(max(len(state.tokens), n_cells), UNKNOWN_TOKEN, np.int32)
    tokens[: len(state.tokens)] = state.tokens
    bad = bad_token(tokens, model.n_vocab)
    if bad is not None:
        raise FormatError(f"{state.path}: {bad.message}; it is another model's")
    return Snapshot(
        tokens=tokens,
        layers=tuple(sorted(made, key=lambda layer: layer.layer)),
        n_cells=n_cells,
        architecture=architecture,
        n_vocab=model.n_vocab,
        model=model.name,
        fingerprint=model.fingerprint,
        origin=_origin(state, runs, reading, layers.is_told, layers.forms),
    )


def _run(state: LlamaState, memory: Memory, name: str, sequence: int | None) -> _Run:
    held = {i: sequences(stream.cells) for i, stream in enumerate(memory.streams) if len(stream.cells)}
    found = sorted({number for numbers in held.values() for number in numbers})
    if not found:
        raise FormatError(f"{state.path}: its {name} memory holds no cells: there is nothing to convert")
    if sequence is None and len(found) > 1:
        shown = ", ".join(map(str, found[:8]))
        raise RequestError(f"{state.path}: it holds {len(found)} sequences ({shown}); say which one is wanted")
    wanted = found[0] if sequence is None else sequence
    index = next((i for i, numbers in held.items() if wanted in numbers), None)
    if index is None:
        raise RequestError(f"{state.path}: expected a sequence of {', '.join(map(str, found[:8]))}, found {wanted}")
    stream = memory.streams[index]
    cells = stream.cells
    if cells.extra.shape[1]:
        raise UnsupportedModelError(
            f"{state.path}: its cells have positions of several dimensions (M-RoPE), which our prompt caches lack"
        )
    members = cells.of(wanted)
    order = members[np.argsort(cells.positions[members], kind="stable")]
    positions = cells.positions[order].astype(np.int64)
    first = int(positions[0])
    gaps = np.flatnonzero(np.diff(positions) != 1)
    if len(gaps):
        after, before = positions[gaps[0]], positions[gaps[0] + 1]
        raise FormatError(f"{state.path}: {name} memory: no cell between positions {after} and {before}")
    in_order = len(order) == len(cells) and bool((order == np.arange(len(cells))).all())
    return _Run(stream, index, len(memory.streams), None if in_order else order, first, len(order))


def _check_runs(state: LlamaState, runs: list[_Run], n_cells: int) -> None:
    if runs[0].first:
        raise FormatError(
            f"{state.path}: base memory: expected cells from position 0 on, found {runs[0].first} the lowest: "
            "the beginning of the prompt is not there"
        )
    for run in runs[1:]:
        end = run.first + run.n_cells
        if end != n_cells:
            raise FormatError(
                f"{state.path}: window memory: expected cells up to position {n_cells - 1}, found {end - 1} the last"
            )


def _share(state: LlamaState, model: ModelOutline) -> list[list[CachedLayer]]:
    """The model's layers by the memory that holds them."""
    if not state.has_window_memory:
        return [list(model.layers)]
    windows = [layer for layer in model.layers if layer.shape.window is not None]
    if not windows:
        raise FormatError(f"{state.path}: it has a memory for layers with windows, and the model named has none")
    return [[layer for layer in model.layers if layer.shape.window is None], windows]


class _Layers:
    """Makes the layers of a snapshot. is_told: whether somebody, or the file's version, says whose file it is. forms:
    the layout of each turbo type's blocks that was found in the file.
    """

    def __init__(self, state: LlamaState, architecture: str, reading: LlamaReading, is_told: bool) -> None:
        self.path, self.version, self.architecture, self.reading = state.path, state.version, architecture, reading
        self.is_told = is_told
        self.forms: dict[str, BlockForm] = {}

    def of_memory(self, run: _Run, cached: list[CachedLayer], name: str) -> list[LayerSnapshot]:
        """The layers of one memory, which are these of the model."""
        if len(run.stream.k) != len(cached):
            raise FormatError(
                f"{self.path}: {name} memory: expected the model's {len(cached)} layers, found {len(run.stream.k)}; "
                "it is another model's"
            )
        even = {side: same_heads((layer.shape for layer in cached), side) for side in SIDES}
        layers = []
        for i, (layer, *both) in enumerate(zip(cached, run.stream.k, run.stream.v, strict=True)):
            k, v = (
                self._side(rows, run, layer.shape, side, even[side], f"{name} memory, {side.upper()} of layer {i}")
                for side, rows in zip(SIDES, both, strict=True)
            )
            rope = rope_layout(self.architecture, layer.rope.dims) if self.architecture else layer.rope
            order = channel_order(layer.shape.head_dim_k, rope, layer.rope)
            if order is not None and k.codec.is_float:  # the model's own order; blocks stay as they are
                k = SideSnapshot(k.codec, ReorderedRows(k.rows, order, k.codec.codec.block_bytes))
                rope = layer.rope
            layers.append(LayerSnapshot(layer.layer, k, v, run.first, layer.shape.window, rope=rope))
        return layers

    def _side(self, rows: LayerRows, run: _Run, shape: LayerShape, side: Side, even: bool, what: str) -> SideSnapshot:
        cache_type = cache_type_of(self.path, rows, self.reading, what)
        codec = self.reading.codec(cache_type, shape, side, even)
        form = self._form(rows, codec, shape.n_kv_heads, what)
        if not self.is_told and codec != self.reading.turned().codec(cache_type, shape, side, even):
            raise RequestError(
                f"{self.path}: {what} is of type {cache_type}, which some builds of llama.cpp store rotated and others "
                f"do not, and a file of version {self.version} does not say which: name the build with --profile of "
                f"convert, or --prompt-cache-profile of run: {by_rotation()}"
            )
        problem = None if form is None else bad_norm(self.path, rows, what, form)
        if problem is not None:
            raise problem
        held = file_rows(rows, run.order, shape.n_kv_heads, cache_type, form)
        if isinstance(held, FileRows):
            try:
                held.check()
            except FormatError as error:
                raise FormatError(f"{self.path}: {what}: {error}", offset=rows.offset) from error
        return SideSnapshot(codec, held)

    def _form(self, rows: LayerRows, codec: StoredCodec, n_kv_heads: int, what: str) -> BlockForm | None:
        """The layout of turbo blocks, None for other types. FormatError: rows are not the model's heads."""
        cache_type = codec.cache_type
        if cache_type in TURBO_FORMS:
            form = form_of(cache_type, rows.row_bytes, n_kv_heads * codec.stored_dim // TURBO_GROUP)
            if form is not None and self.forms.setdefault(cache_type, form) == form:
                return form
        elif rows.row_bytes == n_kv_heads * codec.row_bytes:
            return None
        raise FormatError(
            f"{self.path}: {what}: expected rows of {n_kv_heads} heads of {codec.head_dim} values ({cache_type}), "
            f"{n_kv_heads * codec.row_bytes} bytes, found {rows.row_bytes}; it is another model's",
            offset=rows.offset,
        )


def cache_type_of(path: str, rows: LayerRows, reading: LlamaReading, what: str) -> str:
    """The cache type of a layer's rows. RequestError: the profile has none of that id."""
    cache_type = reading.profile.cache_type(rows.type_id)
    if cache_type is not None:
        return cache_type
    forks = [
        f"it is {found} of profile {name}, if that is where the file comes from"
        for name, found in fork_readings(rows.type_id, rows.row_bytes).items()
        if name in EXCHANGED
    ]
    unknown = f"profile {reading.profile.name} has no type {rows.type_id} ({ggml_type_name(rows.type_id)})"
    raise RequestError(f"{path}: {what}: " + "; ".join([unknown, *forks]))


def lasting_origin(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What of a file's origin holds for other cells that are written in its place: version, profile, layout."""
    lasting = {key: value for key, value in origin.items() if key not in CONTENT_KEYS}
    return lasting | {REWRITTEN_KEY: True} if lasting.get("carrier") == CARRIER else lasting


def _origin(
    state: LlamaState, runs: list[_Run], reading: LlamaReading, is_told: bool, forms: dict[str, BlockForm]
) -> dict[str, Any]:
    origin: dict[str, Any] = {
        "carrier": CARRIER,
        "profile": reading.profile.name,
        "rotated": reading.rotated,
        "generation": reading.generation,
    }
    if not is_told:
        origin[ASSUMED_KEY] = True
    others = sum(memory.n_cells for memory in state.memories) - sum(run.n_cells for run in runs)
    if others or not all(run.is_whole for run in runs) or not (runs[0].stream.cells.n_sequences == 1).all():
        return origin
    origin |= {"kind": state.kind, "version": state.version, "memories": len(runs)}
    if state.architecture is not None:
        origin["architecture"] = state.architecture
    origin["sequence"] = int(runs[0].stream.cells.sequence_ids[0])
    for run, name in zip(runs, MEMORIES, strict=False):
        origin |= {f"streams_{name}": run.n_streams, f"stream_{name}": run.index, f"v_trans_{name}": run.stream.v_trans}
        if run.order is not None:
            origin[f"order_{name}"] = run.stream.cells.positions.astype(np.int32)
    origin |= {f"block_bytes_{cache_type}": group_bytes(form) for cache_type, form in forms.items()}
    if state.packed is not None:
        origin["packed"] = state.packed
    if len(state.trailing):
        origin["trailing"] = state.trailing
    return origin
