"""Snapshots: tokens, the KV rows that they became, and the model they belong to, apart from any file format.

Rows can be arrays, views of a mapped file or made while they are read; whoever needs them takes slices of tokens, so
that no second copy of a cache is in memory. Files are the carriers' business (`snapshots.write`, `snapshots.read`,
`llama.state`), caches the runtime's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import NOT_ROTATED, RopeLayout
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import BalanceMode, LayerTypes
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.blocks.turbo import F16_MAX
from tqgguf.formats.errors import FormatError, naming
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.formats.snapshots.parts import PARTS, Part

UNKNOWN_TOKEN = -1
"""Stands for a position whose token a foreign file does not know."""
SLICE_BYTES = 1 << 22  # of rows that are read at a time: they stay in a core's cache on their way through


class Rows(Protocol):
    """Rows of blocks uint8 [n_tokens, n_kv_heads, row_bytes], interleaved as files hold them; numpy arrays are some."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        """A run of tokens (start and stop given, step 1): a view, or made for this call."""
        ...


@dataclass(frozen=True)
class SideSnapshot:
    """K or V of one layer.

    rows: of the tokens from the layer's `start` on. tail: f16 [tokens, n_kv_heads, head_dim] of the tokens after them,
    less than a page; rows that came in another type stay in `rows` instead, past the last page edge. prefix: f16
    [tokens, n_kv_heads, head_dim] of the exact prefix, whose rows are zero blocks. page_means: f16 [n_pages,
    n_kv_heads, head_dim] of whole pages. channel_scale: f32 [n_kv_heads, head_dim] once it is fixed, query_squares: f32
    [n_kv_heads, tokens, head_dim] until then (see `runtime.kv.balance`). None: there is nothing.
    """

    codec: StoredCodec
    rows: Rows
    tail: NDArray[np.float16] | None = None
    prefix: NDArray[np.float16] | None = None
    page_means: NDArray[np.float16] | None = None
    channel_scale: NDArray[np.float32] | None = None
    query_squares: NDArray[np.float32] | None = None

    @property
    def n_tokens(self) -> int:
        return self.rows.shape[0] + (0 if self.tail is None else len(self.tail))

    def parts(self) -> Iterator[tuple[Part, NDArray[Any]]]:
        """What it holds beside its rows, in the order of the table."""
        for part in PARTS:
            array = getattr(self, part.name)
            if array is not None:
                yield part, array

    def open_page(self, start: int) -> NDArray[np.float16] | None:
        """Values of the rows past the last page edge, which a cache holds as its f16 tail; None where there are none.
        start: position of the first row. FormatError: f16 does not hold them.
        """
        end = start + self.rows.shape[0]
        first = max(end - end % PAGE_TOKENS, start) - start
        if self.codec.is_float or first >= self.rows.shape[0]:
            return None
        values = self.codec.decode(self.rows[first : self.rows.shape[0]])
        too_large = np.abs(values) > F16_MAX
        if too_large.any():
            token, head, channel = (int(i) for i in np.argwhere(too_large)[0])
            raise FormatError(
                f"token {start + first + token}, head {head}: expected values that f16 holds, as of all tokens of an "
                f"open page, found {values[token, head, channel]}"
            )
        return values.astype(np.float16)

    def slices(self) -> Iterator[NDArray[np.uint8]]:
        """All rows in slices of about SLICE_BYTES."""
        n_tokens, n_kv_heads, row_bytes = self.rows.shape
        step = max(1, SLICE_BYTES // max(1, n_kv_heads * row_bytes) // PAGE_TOKENS) * PAGE_TOKENS
        for start in range(0, n_tokens, step):
            yield self.rows[start : min(start + step, n_tokens)]


@dataclass(frozen=True)
class LayerSnapshot:
    """One layer that has keys and values. layer: its number in the model. start: position of the first token held.

    window: keys that a query sees (None: all). n_prefix: tokens of the exact prefix that were asked for.
    scale_is_given: the channel scale came from a calibration, not from page 0.
    """

    layer: int
    k: SideSnapshot
    v: SideSnapshot
    start: int = 0
    window: int | None = None
    balance: BalanceMode = "off"
    n_prefix: int = 0
    rope: RopeLayout = NOT_ROTATED
    scale_is_given: bool = False

    def side(self, side: Side) -> SideSnapshot:
        return self.k if side == "k" else self.v

    @property
    def types(self) -> LayerTypes:
        return LayerTypes(self.k.codec.cache_type, self.v.codec.cache_type, self.balance, self.n_prefix)

    @property
    def n_kv_heads(self) -> int:
        return self.k.rows.shape[1]


@dataclass(frozen=True)
class Snapshot:
    """tokens: int32 [n]. n_cells: how many of them have rows (the first ones; the others are yet to be evaluated).

    prompt_ranges: [start, end) of tokens that were evaluated as prompt, in order. chunk: the grid of positions on which
    prompts were evaluated, in tokens. n_vocab: tokens that the model knows (0: unknown). fingerprint: of the model
    (None: a foreign file does not say). origin: what a foreign file said beyond this, by name (strings, whole numbers,
    truth values, or arrays of numbers).
    """

    tokens: NDArray[np.int32]
    layers: tuple[LayerSnapshot, ...]
    n_cells: int
    architecture: str
    chunk: int = 0
    prompt_ranges: tuple[tuple[int, int], ...] = ()
    n_vocab: int = 0
    model: str = ""
    fingerprint: Fingerprint | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Of tokens and everything that layers hold."""
        return self.tokens.nbytes + sum(array_bytes(layer.side(side)) for layer in self.layers for side in SIDES)

    def check(self) -> None:
        """FormatError for parts that do not fit together: what a carrier would not read back."""
        for layer in self.layers:
            for side in SIDES:
                for part, problem in side_problems(layer, side, self.n_cells):
                    raise FormatError(f"layer {layer.layer}, {side.upper()}, {part}: {problem}")
                with naming(f"layer {layer.layer}, {side.upper()}"):
                    layer.side(side).open_page(layer.start)
        if not 0 <= self.n_cells <= len(self.tokens):
            raise FormatError(f"expected rows of at most {len(self.tokens)} tokens, found {self.n_cells}")
        end = 0
        for first, last in self.prompt_ranges:
            if not end <= first < last <= len(self.tokens):
                raise FormatError(
                    f"expected ranges of prompt in order, up to token {len(self.tokens)}, found {first} to {last}"
                )
            end = last
        bad = bad_token(self.tokens, self.n_vocab)
        if bad is not None:
            raise FormatError(bad.message)
        for before, layer in pairwise(self.layers):
            if layer.layer <= before.layer:
                raise FormatError(f"expected layers in order, each once, found {layer.layer} behind {before.layer}")


class BadToken(NamedTuple):
    """A token that cannot be: where it stands, what was expected in its place, and the whole of it in words."""

    place: int
    expected: str
    message: str


def bad_token(tokens: NDArray[np.int32], n_vocab: int) -> BadToken | None:
    """The first token of which no vocabulary of that size (0: any) has the id; None if there is none."""
    wrong = tokens < UNKNOWN_TOKEN
    if n_vocab:
        wrong |= tokens >= n_vocab
    if not wrong.any():
        return None
    i, n = int(np.argmax(wrong)), int(np.count_nonzero(wrong))
    expected = f"0 to {n_vocab - 1}" if n_vocab else "0 or above"
    return BadToken(i, expected, f"token {i}: expected an id of {expected}, found {tokens[i]}; {n} in all")


def array_bytes(side: SideSnapshot) -> int:
    """Bytes of everything that a side holds."""
    n_tokens, n_kv_heads, row_bytes = side.rows.shape
    return n_tokens * n_kv_heads * row_bytes + sum(array.nbytes for _, array in side.parts())


def side_problems(layer: LayerSnapshot, side: Side, n_cells: int) -> Iterator[tuple[str, str]]:
    """What does not fit together about one side: the part (a field of SideSnapshot, or "tokens"), and in words what."""
    held = layer.side(side)
    codec, n_tokens = held.codec, held.n_tokens
    problem = codec.problem()
    if problem is not None:
        yield "rows", problem
        return
    heads, start = layer.n_kv_heads, layer.start
    if held.rows.shape[1:] != (heads, codec.row_bytes):
        yield "rows", f"expected rows of {heads} heads of {codec.row_bytes} bytes, found {held.rows.shape[1:]}"
    if start + n_tokens != n_cells:
        yield "tokens", f"expected rows of the tokens from {start} up to {n_cells}, found {n_tokens}"
    needed = 0 if layer.window is None else max(0, n_cells - layer.window + 1)
    if start > needed:
        yield "tokens", f"expected rows from token {needed} on, which the next query sees, found them from {start} on"
    if side == "k" and layer.rope.dims > codec.head_dim:
        yield "rope", f"expected RoPE over at most the {codec.head_dim} channels of a head, found {layer.rope.dims}"
    end = start + held.rows.shape[0]
    if held.tail is not None and (codec.is_float or end % PAGE_TOKENS or len(held.tail) >= PAGE_TOKENS):
        found = f"{len(held.tail)} tokens after token {end}"
        yield "tail", f"expected a tail shorter than a page behind whole pages, found {found}"
    balanced = side == "k" and layer.balance != "off"
    if end % PAGE_TOKENS and not codec.is_float and (balanced or (layer.n_prefix and not start)):
        yield "rows", f"expected rows of whole pages beside a balance or an exact prefix, found them up to token {end}"
    shapes = _expected_shapes(layer, side, n_cells)
    for part in PARTS:
        array, shape = getattr(held, part.name), shapes[part.name]
        if array is None and 0 in shape:
            continue
        if array is None or 0 in shape or array.shape != shape or array.dtype != part.dtype:
            found = "none" if array is None else f"{array.dtype} {list(array.shape)}"
            wanted = "none" if 0 in shape else f"{np.dtype(part.dtype)} {list(shape)}"
            yield part.name, f"expected {wanted}, found {found}"


def _expected_shapes(layer: LayerSnapshot, side: Side, n_cells: int) -> dict[str, tuple[int, ...]]:
    """Shapes that the parts of a side must have; with a 0 in its shape, a part is better not there."""
    held = layer.side(side)
    heads, dim, start = layer.n_kv_heads, held.codec.head_dim, layer.start
    end = start + held.rows.shape[0]
    is_float = held.codec.is_float
    balanced = side == "k" and layer.balance != "off" and not is_float
    scaled = balanced and layer.balance == "full"
    n_pages = end // PAGE_TOKENS - -(-start // PAGE_TOKENS)
    n_prefix = min(layer.n_prefix, n_cells) if not is_float and start == 0 else 0
    has_scale = held.channel_scale is not None or n_pages > 0 or layer.scale_is_given
    squares = held.query_squares
    n_squares = squares.shape[1] if squares is not None and squares.ndim == 3 and held.channel_scale is None else 0
    return {
        "tail": (0 if held.tail is None else len(held.tail), heads, dim),
        "prefix": (n_prefix, heads, dim),
        "page_means": (max(n_pages, 0) if balanced else 0, heads, dim),
        "channel_scale": (heads, dim) if scaled and has_scale else (0,),
        "query_squares": (heads, min(n_squares, n_cells), dim) if scaled else (0,),
    }
