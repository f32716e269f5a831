"""Names and numbers of our GGUF carrier, once: metadata keys and tensors of a snapshot. spec/container.md has them in
words.
"""

from __future__ import annotations

from typing import Final

from tqgguf.formats.blocks.codec import Side

GENERAL_TYPE: Final = "kv-snapshot"
VERSION: Final = 1
"""Of the carrier: a reader refuses any other."""

CODEC_VERSION: Final = 1
"""Of the block layouts and of the arithmetic between values and blocks, as spec/blocks.md has them."""

KEYS: Final = "tqgguf.snapshot."
CODECS: Final = "tqgguf.codec."
LAYERS: Final = "tqgguf.layer."
ORIGIN: Final = "tqgguf.origin."
CHECKSUM: Final = "tqgguf.checksum."

CHECKSUM_ALGORITHM: Final = "crc32"
CHUNK_BYTES: Final = 1 << 20
"""Bytes of the data section that one checksum covers."""

TOKENS: Final = "tokens"
CHECKSUMS: Final = "checksums"

MAX_LAYERS: Final = 1 << 12
MAX_CODECS: Final = 1 << 10
MAX_HEADS: Final = 1 << 16
MAX_TOKENS: Final = (1 << 31) - 1
"""Of positions, windows and ids of tokens: what engines count in 32 bits with a sign."""
MAX_CHUNK: Final = 1 << 20  # tokens evaluated at once; real ones are 128 to 8,192

F32: Final = 0
F16: Final = 1
I8: Final = 24
I32: Final = 26


def side_tensor(layer: int, side: Side, part: str) -> str:
    """Name of a tensor of one side of a layer: `blk.3.attn_k.rows`, and so on with each field of SideSnapshot."""
    return f"blk.{layer}.attn_{side}.{part}"


def codec_tensor(codec: int, part: str) -> str:
    """Name of a table of a codec: its codebook, boundaries or signs."""
    return f"codec.{codec}.{part}"
