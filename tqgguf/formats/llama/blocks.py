"""Foreign layouts of turbo blocks, and the canonical ones that snapshots hold: converted without loss, both ways.

turbo4 of 68 bytes has a second norm after the first, which is always zero. turbo3 and turbo2 of 32 values come in fours
that share one norm; each has its own part of the code fields.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.errors import FormatError
from tqgguf.formats.llama.profiles import TURBO_FORMS, TURBO_GROUP, BlockForm

_NORM_BYTES = 2


def group_bytes(form: BlockForm) -> int:
    """Bytes of 128 values in a layout."""
    return form.n_bytes * (TURBO_GROUP // form.n_values)


def canonical_form(cache_type: str) -> BlockForm:
    """The layout of a turbo type that snapshots hold."""
    return TURBO_FORMS[cache_type][0]


def form_of(cache_type: str, row_bytes: int, n_groups: int) -> BlockForm | None:
    """The layout whose blocks fill rows of `n_groups` groups of 128 values, None if there is none."""
    return next((form for form in TURBO_FORMS[cache_type] if group_bytes(form) * n_groups == row_bytes), None)


def to_canonical(cache_type: str, form: BlockForm, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows uint8 [..., n] of a foreign layout in the canonical one.

    FormatError: a second norm is not zero, or norms that are shared differ: no canonical block says the same.
    """
    canonical = canonical_form(cache_type)
    if form == canonical:
        return rows
    lead = rows.shape[:-1]
    if form.n_values == TURBO_GROUP:
        blocks = rows.reshape(*lead, -1, form.n_bytes)
        if blocks[..., _NORM_BYTES : 2 * _NORM_BYTES].any():
            raise FormatError(f"{cache_type} blocks of {form.n_bytes} bytes: expected second norms of 0, found others")
        made = np.concatenate([blocks[..., :_NORM_BYTES], blocks[..., 2 * _NORM_BYTES :]], axis=-1)
        return made.reshape(*lead, -1)
    parts = rows.reshape(*lead, -1, TURBO_GROUP // form.n_values, form.n_bytes)
    norms = parts[..., :_NORM_BYTES]
    if (norms != norms[..., :1, :]).any():
        raise FormatError(f"{cache_type} blocks of {form.n_values} values: expected fours of one norm, found others")
    fields = [norms[..., 0, :], *(part.reshape(*part.shape[:-2], -1) for part in _fields(cache_type, form, parts))]
    return np.concatenate(fields, axis=-1).reshape(*lead, -1)


def from_canonical(cache_type: str, form: BlockForm, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The way back of `to_canonical`."""
    canonical = canonical_form(cache_type)
    if form == canonical:
        return rows
    lead = rows.shape[:-1]
    blocks = rows.reshape(*lead, -1, canonical.n_bytes)
    norms = blocks[..., :_NORM_BYTES]
    if form.n_values == TURBO_GROUP:
        return np.concatenate([norms, np.zeros_like(norms), blocks[..., _NORM_BYTES:]], axis=-1).reshape(*lead, -1)
    n_parts = TURBO_GROUP // form.n_values
    fields = [np.repeat(norms[..., None, :], n_parts, axis=-2)]
    for field in _fields(cache_type, canonical, blocks):
        fields.append(field.reshape(*field.shape[:-1], n_parts, -1))
    return np.concatenate(fields, axis=-1).reshape(*lead, -1)


def _fields(cache_type: str, form: BlockForm, blocks: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The code fields of blocks uint8 [..., n_bytes], each [..., its bytes]."""
    fields, at = [], _NORM_BYTES
    for _, bits in BLOCK_TYPES[cache_type].code_fields:
        end = at + form.n_values * bits // 8
        fields.append(blocks[..., at:end])
        at = end
    return fields
