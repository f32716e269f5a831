"""Numbers of llama.cpp's state files: session files (`--prompt-cache`) and sequence files (slots).

Source: llama.cpp of mid and late 2026 (llama-context.cpp, llama-kv-cache.cpp, server-common.cpp). What fork profiles
call their types is known in `llama.profiles`.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, get_args

Kind = Literal["session", "sequence"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

# As bytes at the beginning of a file: the u32 0x6767736e and 0x67677371, little-endian.
MAGICS: Final[dict[bytes, Kind]] = {b"nsgg": "session", b"qsgg": "sequence"}
MAGIC_NAMES: Final[dict[Kind, str]] = {"session": "ggsn", "sequence": "ggsq"}
VERSIONS: Final[dict[Kind, tuple[int, ...]]] = {"session": (9, 10), "sequence": (2, 3)}
"""Known versions, the current one last."""

CELL_FIELDS: Final[dict[int, tuple[int, ...]]] = {9: (0, 2), 2: (0, 2), 10: (0, 3), 3: (0, 3)}
"""By version: how many i32 may stand between a cell's count of sequences and their ids. None for most models; where
positions have more than one dimension (M-RoPE) their x and y, in current versions also the token's id."""

TOKEN_NONE: Final = -1
"""llama.cpp's LLAMA_TOKEN_NULL: a position whose token is no text. First in a packed list of tokens."""
PACKED_VERSION: Final = 1
"""Of the server's packed list of tokens."""

# Limits: a count above its limit is refused before anything is allocated, whatever the size of the file.
MAX_ARCHITECTURE_BYTES: Final = 128  # real names have up to 20
MAX_CELLS: Final = 1 << 24  # of a stream, and of tokens: beyond any context, and their lists stay below a gigabyte
MAX_STREAMS: Final = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_SEQUENCES: Final = 256  # the same
MAX_LAYERS: Final = 1024  # llama.cpp's LLAMA_MAX_LAYERS is 512
MAX_ROW_BYTES: Final = 1 << 24  # 128 heads of 512 values in f32 are 2^18
MAX_TYPE_ID: Final = 255  # turbo-tan's fork goes up to 203

U32: Final = struct.Struct("<I")
ROW_HEADER: Final = struct.Struct("<iQ")  # type id, bytes of a row
COLUMN_HEADER: Final = struct.Struct("<iII")  # type id, bytes of an element, elements of a row
CELL_BYTES: Final = 8  # position and count of sequences; then the fields above and the ids
