"""The numbers of the GGUF file format: metadata value types, tensor types, limits.

Source: the GGUF specification (ggml, docs/gguf.md) and ggml's type list of mid 2026. The tests hold the tensor types
against gguf-py's table. What a tensor's blocks mean is not known here: that belongs to the codecs and to the weight
loader.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

MAGIC: Final = b"GGUF"
VERSION: Final = 3
DEFAULT_ALIGNMENT: Final = 32

# Limits. A count or length above its limit is refused before anything is allocated, whatever the size of the file: a
# file of a few GB could otherwise turn into many times its size in Python objects.
MAX_METADATA_ENTRIES: Final = 1 << 14  # real models have under 200
MAX_TENSORS: Final = 1 << 18  # 61 layers x 256 experts x 3 unfused matrices are 46,848
MAX_KEY_BYTES: Final = (1 << 16) - 1  # the specification's limit
MAX_TENSOR_NAME_BYTES: Final = 63  # ggml's GGML_MAX_NAME of 64 includes the final zero
MAX_STRING_BYTES: Final = 1 << 30  # as llama.cpp; of a single value, in arrays the file is the bound
MAX_ARRAY_ELEMENTS: Final = 1 << 30  # as llama.cpp
MAX_ARRAY_STRINGS: Final = 1 << 24  # 64 times the largest vocabulary; a string object costs 50 bytes and more
MAX_ARRAY_DEPTH: Final = 4  # no known file nests deeper than 2, llama.cpp refuses nesting altogether
MAX_INNER_ARRAYS: Final = 1 << 16  # per file: 12 bytes in the file become 150 in memory
MAX_DIMS: Final = 4  # ggml's GGML_MAX_DIMS
MAX_ALIGNMENT: Final = 1 << 21  # a 2 MiB page; real files use 32 to 65,536
MAX_SIZE: Final = (1 << 63) - 1  # ggml and numpy count values and bytes in signed 64 bit
MAX_SHARDS: Final = 99_999  # five digits in the file name


class ValueType(IntEnum):
    """Type ids of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


VALUE_TYPES: Final[dict[int, ValueType]] = {int(t): t for t in ValueType}

# Little-endian numpy dtypes of the fixed-size value types; a BOOL is a byte that must be 0 or 1.
VALUE_DTYPES: Final[dict[ValueType, np.dtype]] = {
    ValueType.U8: np.dtype("u1"),
    ValueType.I8: np.dtype("i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("u1"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}

INTEGER_TYPES: Final = frozenset(
    t for t, dtype in VALUE_DTYPES.items() if dtype.kind in "iu" and t is not ValueType.BOOL
)
FLOAT_TYPES: Final = frozenset({ValueType.F32, ValueType.F64})


class MetadataType(NamedTuple):
    """Type of one metadata value; `element` is the element type of an array (ARRAY where arrays are nested)."""

    value: ValueType
    element: ValueType | None = None

    @property
    def scalar(self) -> ValueType:
        """Of the value, or of an array's elements."""
        return self.value if self.element is None else self.element

    def __str__(self) -> str:
        return self.value.name if self.element is None else f"ARRAY of {self.element.name}"


class GgmlType(NamedTuple):
    """Storage of one tensor type: `block_bytes` bytes hold `block_size` neighbouring values of a row.

    `dtype` is the numpy dtype of a plain type, None for block types. BF16 is read as its bits: numpy has no bfloat16.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None


# Ids from 42 on are left out on purpose. Mainline's Q2_0 is 42, but several forks gave 42 to 47 to other types before
# that, of other sizes, so a file's id alone does not say which one it is.
GGML_TYPES: Final[dict[int, GgmlType]] = {
    0: GgmlType("F32", 1, 4, np.dtype("<f4")),
    1: GgmlType("F16", 1, 2, np.dtype("<f2")),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1, np.dtype("i1")),
    25: GgmlType("I16", 1, 2, np.dtype("<i2")),
    26: GgmlType("I32", 1, 4, np.dtype("<i4")),
    27: GgmlType("I64", 1, 8, np.dtype("<i8")),
    28: GgmlType("F64", 1, 8, np.dtype("<f8")),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, np.dtype("<u2")),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

REMOVED_GGML_TYPES: Final[dict[int, str]] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def ggml_type_name(type_id: int) -> str:
    """Name of a tensor type for people: 'Q4_1', 'type 4 (Q4_2, removed from ggml)', 'type 42 (newer or fork type)'."""
    if type_id in GGML_TYPES:
        return GGML_TYPES[type_id].name
    if type_id in REMOVED_GGML_TYPES:
        return f"type {type_id} ({REMOVED_GGML_TYPES[type_id]}, removed from ggml)"
    return f"type {type_id} (newer or fork type)"
