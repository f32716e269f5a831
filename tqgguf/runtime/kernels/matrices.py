"""Products with a GGUF's matrices straight from their blocks, and rows of them decoded.

A matrix lies on the device as in its file, bit for bit, but in another order (`matrix_fields.metal`): made once, when
it is loaded. Matrices of one type with equally long rows can lie behind each other and be multiplied as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.runtime.kernels.geometry import FAMILIES, ProductWalk, product_walk
from tqgguf.runtime.kernels.launch import Kernel, Launcher, Threads, sizes_of
from tqgguf.runtime.kernels.types import given, nothing

MATRIX_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""ggml types that the kernels read, whose numbers are those in matrix_fields.metal."""

MOST_PRODUCT_ROWS = 16
"""Rows of x up to which `multiply` is called."""

TILE_ROWS, STEP_COLUMNS = 16, 64  # of a matrix: what matrix_fields.metal calls a tile and a step

_FIELDS = "matrix_fields.metal"
ARRANGE = Kernel(
    "arrange_matrix", (_FIELDS, "file_blocks.metal"), ("blocks", "sizes"), ("planes",), ("n_rows", "n_tiles", "n_steps")
)
MULTIPLY = Kernel(
    "multiply_matrix",
    (_FIELDS, "matrix_values.metal", "columns.metal"),
    ("x", "weight", "added", "norm", "sizes"),
    ("out",),
    ("n_rows", "n_out", "added_stride"),
)
DECODE_MATRIX = Kernel(
    "decode_matrix",
    (_FIELDS, "matrix_values.metal"),
    ("weight", "ids", "sizes"),
    ("out",),
    ("n_rows", "n_tiles", "n_steps", "first_row"),
)
_GATES = {None: 0, "silu": 1, "gelu": 2}
_COLUMN_ROWS = 8  # rows of x that a tile of columns takes
_ARRANGE_SIMDGROUPS = 4


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix [n_rows, n_columns] on the device. type: ggml's number. planes: uint32, as matrix_fields.metal says."""

    type: int
    n_rows: int
    n_columns: int
    planes: mx.array

    @property
    def n_tiles(self) -> int:
        return -(-self.n_rows // TILE_ROWS)

    @property
    def n_steps(self) -> int:
        return self.n_columns // STEP_COLUMNS

    @property
    def steps_of_block(self) -> int:
        """Steps that have their scales in common."""
        return max(1, GGML_TYPES[self.type].block_size // STEP_COLUMNS)

    @property
    def steps_at_once(self) -> int:
        """Steps whose blocks a simdgroup takes at a time: a block's, two of types that have several in a step."""
        return max(self.steps_of_block, 2 if self.n_steps % 2 == 0 else 1)

    @property
    def sizes(self) -> dict[str, int]:
        return {"n_tiles": self.n_tiles, "n_steps": self.n_steps}


def is_multiplied(type_name: str, shape: Sequence[int]) -> bool:
    """Whether the kernels read a matrix of this ggml type and shape [n_rows, n_columns]."""
    return type_name in MATRIX_TYPES and len(shape) == 2 and shape[0] > 0 and shape[1] % STEP_COLUMNS == 0 < shape[1]


def arrange(launcher: Launcher, ggml_type: int, n_columns: int, blocks: mx.array) -> BlockMatrix:
    """A matrix of a file's blocks, uint8 [n_rows, bytes of a row], on the device. `is_multiplied` holds for it."""
    made = BlockMatrix(ggml_type, blocks.shape[0], n_columns, blocks)
    n_steps = made.n_tiles * made.n_steps
    (planes,) = launcher.launch(
        ARRANGE,
        {"blocks": blocks, "sizes": sizes_of(ARRANGE, n_rows=made.n_rows, **made.sizes)},
        (("TYPE", ggml_type),),
        Threads((-(-n_steps // _ARRANGE_SIMDGROUPS), 1, 1), _ARRANGE_SIMDGROUPS),
        [((n_steps * _step_words(ggml_type),), mx.uint32)],
    )
    return replace(made, planes=planes)


def _step_words(ggml_type: int) -> int:
    """uint32 words of 16 rows by 64 columns: what they take in a file."""
    of_type = GGML_TYPES[ggml_type]
    return TILE_ROWS * STEP_COLUMNS // of_type.block_size * of_type.block_bytes // 4


def multiply(
    launcher: Launcher,
    x: mx.array,
    matrix: BlockMatrix,
    *,
    added: mx.array | None = None,
    gate: str | None = None,
    norm: mx.array | None = None,
    dtype: mx.Dtype | None = None,
    walk: ProductWalk | None = None,
) -> mx.array:
    """x @ matrix.T: f16 or bf16 [n, n_columns] to [n, n_rows] of dtype (x's if none is given) for up to
    MOST_PRODUCT_ROWS rows, sums in float32.

    added: what is added to the result before it is rounded, of any float type [n, n_rows] or [n_rows].
    gate: 'silu' or 'gelu'; the matrix's tiles of 16 rows then come in pairs, and the result, [n, n_rows / 2], is that
    of the first's products times the second's.
    norm: for one row, float32 [n_columns + 1]: weights and, last, epsilon of an RMS norm of x, which is taken first.
    walk: instead of what `geometry` says.
    """
    n, of_gate = x.shape[0], 2 if gate else 1
    walk = walk or product_walk(
        FAMILIES[launcher.family], (matrix.n_tiles, matrix.n_steps), matrix.steps_at_once, bool(gate)
    )
    n_out, columns = matrix.n_rows // of_gate, -(-n // _COLUMN_ROWS)
    (out,) = launcher.launch(
        MULTIPLY,
        {
            "x": x,
            "weight": matrix.planes,
            "added": given(added, x.dtype),
            "norm": given(norm, mx.float32),
            "sizes": sizes_of(
                MULTIPLY,
                n_rows=n,
                n_out=n_out,
                added_stride=n_out if added is not None and added.ndim > 1 else 0,
            ),
        },
        (
            *(
                ("T", x.dtype),
                ("OUT", dtype or x.dtype),
                ("TYPE", matrix.type),
                ("STEPS", walk.steps),
                ("TILES", walk.tiles),
            ),
            *(("MATRIX_TILES", matrix.n_tiles), ("MATRIX_STEPS", matrix.n_steps)),
            *(("COLUMNS", columns), ("ADDED", added is not None), ("GATE", _GATES[gate])),
            ("NORM", norm is not None),
        ),
        Threads((-(-matrix.n_tiles // walk.tiles), 1, 1), walk.simdgroups, walk.resident),
        [((n, n_out), dtype or x.dtype)],
    )
    return out


def decode_matrix(
    launcher: Launcher, matrix: BlockMatrix, dtype: mx.Dtype, first_row: int = 0, n_rows: int | None = None
) -> mx.array:
    """Rows from first_row on, a multiple of 16, as f16 or bf16 [n_rows, n_columns], each value rounded once."""
    wanted = matrix.n_rows - first_row if n_rows is None else n_rows
    return _decoded(launcher, matrix, dtype, nothing(mx.int32), False, first_row, wanted, -(-wanted // TILE_ROWS))


def lookup_rows(launcher: Launcher, matrix: BlockMatrix, ids: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows by number: int32 [n], within the matrix, to f16 or bf16 [n, n_columns]."""
    n = ids.shape[0]
    padded = ids if n >= 8 else mx.concatenate([ids, mx.zeros((8 - n,), dtype=mx.int32)])
    return _decoded(launcher, matrix, dtype, padded, True, 0, n, n)


def _decoded(
    launcher: Launcher,
    matrix: BlockMatrix,
    dtype: mx.Dtype,
    ids: mx.array,
    by_id: bool,
    first_row: int,
    n_rows: int,
    n_groups: int,
) -> mx.array:
    sizes = sizes_of(DECODE_MATRIX, n_rows=n_rows, first_row=first_row, **matrix.sizes)
    (out,) = launcher.launch(
        DECODE_MATRIX,
        {"weight": matrix.planes, "ids": ids, "sizes": sizes},
        (("T", dtype), ("TYPE", matrix.type), ("IDS", by_id)),
        Threads((n_groups, 1, 1), FAMILIES[launcher.family].matrix_simdgroups),
        [((n_rows, matrix.n_columns), dtype)],
    )
    return out


def stacked(blocks: Sequence[mx.array], *, in_turns: bool = False) -> mx.array:
    """Matrices' blocks, uint8 [n_rows, bytes of a row] each, as those of one matrix, a whole number of tiles each:
    behind each other, or a tile of each in turns, as `multiply` wants it for a gate."""
    if not in_turns:
        return mx.concatenate(list(blocks))
    row_bytes = blocks[0].shape[1]
    return mx.stack([b.reshape(-1, TILE_ROWS * row_bytes) for b in blocks], axis=1).reshape(-1, row_bytes)
