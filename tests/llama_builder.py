"""Builds llama.cpp session and sequence files in memory, sound ones and ones with any defect, by plain struct packing.

Independent of tqgguf. `build_state` gives the bytes and where each field stands, so that a test can overwrite one:

    built = build_state("session", memories=[Memory(n_cells=3)])
    damaged = built.patched("base.n_cells", pack("<I", 4))

Fields: magic, version, n_tokens, tokens, arch_length, arch; per memory `base` or `window` (with several streams
`base.0` ...): .n_stream, .n_cells, .cells, .v_trans, .n_layers; per layer .k0 .k0.row_bytes .k0.rows and .v0 likewise
(transposed: .v0.element_bytes, .v0.n_channels); end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MAGICS = {"session": 0x6767736E, "sequence": 0x67677371}
F16, Q8_0 = 1, 8


@dataclass(frozen=True)
class Side:
    """A layer's K or V: type id and bytes of a row; of transposed values also bytes of an element."""

    type_id: int = F16
    row_bytes: int = 256
    element_bytes: int = 2


@dataclass(frozen=True)
class Memory:
    """cells: (position, sequence ids) or (position, sequence ids, more fields); None: n_cells of sequence 0."""

    n_cells: int = 3
    cells: Sequence[tuple] | None = None
    layers: Sequence[tuple[Side, Side]] = ((Side(), Side()), (Side(), Side()))
    v_trans: int = 0
    n_streams: int = 1
    """All hold the same cells."""
    first: int = 0
    """Position of the first cell."""


@dataclass
class Built:
    data: bytes
    fields: dict[str, int] = field(default_factory=dict)

    def patched(self, name: str, value: bytes, at: int = 0) -> bytes:
        """The bytes with others at a field, `at` bytes behind its beginning."""
        start = self.fields[name] + at
        return self.data[:start] + value + self.data[start + len(value) :]

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data)
        return path


def random_rows(seed: int, n_bytes: int) -> bytes:
    """Rows of any type: no f16, bf16, f32, scale or norm in them is negative or not finite."""
    data = np.frombuffer(np.random.Generator(np.random.PCG64(seed)).bytes(n_bytes), np.uint8).copy()
    data[1::2] &= 0x3F
    return data.tobytes()


def pack_words(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}i", *words)


def build_state(
    kind: str = "session",
    version: int | None = None,
    tokens: Sequence[int] | bytes = (5, 6, 7),
    architecture: str = "llama",
    memories: Sequence[Memory] = (Memory(),),
    trailing: bytes = b"",
) -> Built:
    """tokens as bytes: a packed list, whole words."""
    built = Built(b"")
    out = bytearray()

    def put(name: str, data: bytes) -> None:
        built.fields[name] = len(out)
        out.extend(data)

    put("magic", struct.pack("<I", MAGICS[kind]))
    put("version", struct.pack("<I", version or {"session": 10, "sequence": 3}[kind]))
    words = tokens if isinstance(tokens, bytes) else pack_words(tokens)
    put("n_tokens", struct.pack("<I", len(words) // 4))
    put("tokens", words)
    if kind == "session":
        put("arch_length", struct.pack("<I", len(architecture)))
        put("arch", architecture.encode())
    for name, memory in zip(("base", "window"), memories, strict=False):
        put(f"{name}.n_stream", struct.pack("<I", memory.n_streams))
        for stream in range(memory.n_streams):
            _stream(put, name if memory.n_streams == 1 else f"{name}.{stream}", memory, 1000 * stream)
    put("end", trailing)
    built.data = bytes(out)
    return built


def _stream(put, where: str, memory: Memory, seed: int) -> None:
    cells = memory.cells
    if cells is None:
        cells = [(memory.first + i, [0]) for i in range(memory.n_cells)]
    n = len(cells)
    put(f"{where}.n_cells", struct.pack("<I", n))
    if not n:
        return
    put(f"{where}.cells", b"".join(_cell(*cell) for cell in cells))
    put(f"{where}.v_trans", struct.pack("<I", memory.v_trans))
    put(f"{where}.n_layers", struct.pack("<I", len(memory.layers)))
    for letter, index in (("k", 0), ("v", 1)):
        for i, layer in enumerate(memory.layers):
            side, name = layer[index], f"{where}.{letter}{i}"
            seed += 1
            put(name, struct.pack("<i", side.type_id))
            if letter == "v" and memory.v_trans:
                put(f"{name}.element_bytes", struct.pack("<I", side.element_bytes))
                put(f"{name}.n_channels", struct.pack("<I", side.row_bytes // side.element_bytes))
            else:
                put(f"{name}.row_bytes", struct.pack("<Q", side.row_bytes))
            put(f"{name}.rows", random_rows(seed, n * side.row_bytes))


def _cell(position: int, sequences: Sequence[int], more: Sequence[int] = ()) -> bytes:
    return struct.pack("<iI", position, len(sequences)) + pack_words([*more, *sequences])


def packed_tokens(tokens: Sequence[int], media: Sequence[tuple[int, bytes]] = (), version: int = 1) -> bytes:
    """A list of tokens as llama.cpp's server packs it. media: where each begins, and its bytes."""
    data = struct.pack("<iII", -1, version, len(tokens)) + pack_words(tokens)
    data += struct.pack("<I", len(media)) + b"".join(struct.pack("<I", at) for at, _ in media)
    data += b"".join(struct.pack("<I", len(medium)) + medium for _, medium in media)
    return data + bytes(-len(data) % 4)


def recurrent_memory(n_cells: int = 1, n_sequences: int = 1, n_layers: int = 2) -> bytes:
    """The memory of recurrent layers, as Mamba has it."""
    cells = b"".join(struct.pack("<iI", 7, n_sequences) + pack_words([0] * n_sequences) for _ in range(n_cells))
    rows = b"".join(struct.pack("<iQ", 0, 64) + bytes(64 * n_cells) for _ in range(2 * n_layers))
    return struct.pack("<I", n_cells) + cells + struct.pack("<II", 0, n_layers) + rows
