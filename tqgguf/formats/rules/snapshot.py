"""Rows of the table of rules: snapshots in our GGUF carrier (TQ3xx). spec/container.md says what they are about."""

from __future__ import annotations

from typing import Final

from tqgguf.formats.rules.rule import ERROR, WARNING, Rule

_WRITER: Final = "a defect of the program that wrote it, or damage: copy the file again, or make the prompt cache again"
_AGAIN: Final = "copy the file again, or make the prompt cache again: damaged blocks would give wrong text"
_NEWER: Final = "use a newer tqgguf, or make the prompt cache again"

SNAPSHOT_RULES: Final[tuple[Rule, ...]] = (
    Rule("TQ301", "snapshot-version", ERROR, "the carrier is of a version that is not known here", _NEWER),
    Rule("TQ302", "codec-version", ERROR, "the blocks are of a version that is not known here", _NEWER),
    Rule("TQ303", "snapshot-columns", ERROR,
         "arrays that describe the same layers or codecs have different lengths, or stated counts differ", _WRITER),
    Rule("TQ304", "codec", ERROR, "a codec cannot be: unknown type, impossible head size, rotation or generation",
         _NEWER),
    Rule("TQ305", "codec-size", ERROR, "a codec's stated block size or bytes are not those of its type", _WRITER),
    Rule("TQ306", "codebook", ERROR, "a codebook or its boundaries differ from those of its type and generation",
         "a fork's file or damage: only codebooks that spec/tables.json knows can be read"),
    Rule("TQ307", "rotation-signs", ERROR, "the signs of a rotation differ from those of its type",
         "a fork's file or damage: only the sign tables of spec/tables.json can be read"),
    Rule("TQ308", "layer-number", ERROR, "layers are not in order, each once", _WRITER),
    Rule("TQ309", "layer-value", ERROR, "a layer's number of heads, start, window, balance or the like cannot be",
         _WRITER),
    Rule("TQ310", "row-size", ERROR, "rows of blocks have another type or size than their codec says", _WRITER),
    Rule("TQ311", "part-shape", ERROR,
         "a tail, exact prefix, page mean or scale is missing, or of another type or shape than it must be", _WRITER),
    Rule("TQ312", "token-count", ERROR, "counts of tokens, rows and ranges contradict each other", _WRITER),
    Rule("TQ313", "token-range", ERROR, "a token's id is outside the vocabulary", _AGAIN),
    Rule("TQ314", "stray-tensor", WARNING, "a tensor belongs to no layer and no codec", "nothing: it is not read"),
    Rule("TQ315", "snapshot-split", ERROR, "a prompt cache is split into files, of which checksums know the first",
         "make the prompt cache again: it is one file"),
    Rule("TQ320", "block-scale", ERROR, "a block's scale is infinite, NaN or, for turbo types, negative", _AGAIN),
    Rule("TQ321", "unused-bits", ERROR, "bits that are never read are set: rows of the exact prefix are zero blocks",
         _WRITER),
    Rule("TQ322", "part-value", ERROR, "a tail, exact prefix, page mean or scale holds infinities, NaN or values out "
         "of its limits", _AGAIN),
    Rule("TQ330", "checksum-missing", ERROR, "the checksums are missing, too few or too many", _AGAIN),
    Rule("TQ331", "checksum-kind", ERROR, "the checksums are of a kind that is not known here", _NEWER),
    Rule("TQ332", "checksum", ERROR, "bytes differ from their checksum", _AGAIN),
)  # fmt: skip
