"""What can be wrong with a GGUF file: one code and one line for each kind of defect.

The code says which defect it is, for tests and reports; the message of a single error says where and by how much.
"""

from __future__ import annotations

import os
from typing import Final

from tqgguf.formats.errors import FormatError

DEFECTS: Final[dict[str, str]] = {
    "not-gguf": "the file does not begin with GGUF; where it is recognised as something else, the message says as what",
    "version": "the version is not 3",
    "big-endian": "the file is in big-endian byte order",
    "truncated": "a section, a string, an array or a tensor's data goes on beyond the end of the file",
    "over-limit": "a count or length is above the limit that this reader sets (gguf_types, MAX_...)",
    "value-type": "a metadata value or array element has a type id that GGUF does not define",
    "array-depth": "arrays are nested too deeply",
    "bool": "a boolean is neither 0 nor 1",
    "key": "a metadata key is empty or not UTF-8",
    "duplicate-key": "a metadata key occurs twice",
    "metadata-missing": "a metadata key that the caller needs is absent",
    "metadata-type": "a metadata value has another type than the one needed",
    "metadata-value": "a metadata value is of the right type, but cannot be used",
    "alignment": "general.alignment is not a U32 that is a power of two up to the limit",
    "tensor-missing": "a tensor that the caller needs is absent",
    "tensor-name": "a tensor name is empty, too long or not UTF-8",
    "duplicate-tensor": "a tensor name occurs twice, in one file or in two shards",
    "dimensions": "a tensor has more than 4 dimensions, or one of 2^63 or more",
    "overflow": "a tensor's number of values or bytes does not fit in 63 bits",
    "block": "a tensor's rows are not whole blocks of its type",
    "unknown-type": "a tensor's data is asked for, but its type is unknown",
    "offset": "a tensor's offset is not a multiple of the alignment, or so large that it would wrap around",
    "overlap": "two tensors share bytes",
    "split-name": "a shard's file name does not say what its metadata says",
    "split-missing": "a shard of the set is not there",
    "split-disagrees": "shards disagree with each other or with the set's own counts",
}


SHOWN_CHARACTERS: Final = 80  # of a name or value in a message: a damaged file's may have thousands


def shown(value: object) -> str:
    """A name or value from a file as it stands in a message: on one line, printable, not endless."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def readable(name: str | os.PathLike[str]) -> str:
    """A file's name as text that is UTF-8, for JSON, pages and metadata: other bytes become \\xHH."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class GgufError(FormatError):
    """A GGUF file breaks its format. `code` is a key of `DEFECTS`, `offset` the byte offset in the file `path`."""

    def __init__(self, code: str, path: str, message: str, *, offset: int | None = None) -> None:
        assert code in DEFECTS, code
        super().__init__(f"{path}: {message}", offset=offset)
        self.code = code
        self.path = path
