"""Rows of the table of rules: what a file is at all (TQ0xx), and the structure of GGUF files and sets (TQ1xx)."""

from __future__ import annotations

from typing import Final

from tqgguf.formats.rules.rule import ERROR, WARNING, Rule

_AGAIN: Final = "download the file again, or copy it again from where it is whole"
_WRITER: Final = "a defect of the program that wrote the file, or damage: write or download it again"

GGUF_RULES: Final[tuple[Rule, ...]] = (
    # what the file is
    Rule("TQ001", "not-gguf", ERROR, "the file does not begin as one of the formats known here does", _AGAIN),
    Rule("TQ002", "empty-file", ERROR, "the file has no bytes", _AGAIN),
    Rule("TQ003", "html-page", ERROR, "the file is an HTML or XML page that was saved instead of a model",
         "log in to the site or accept its licence, then download the file itself"),
    Rule("TQ004", "lfs-pointer", ERROR, "the file is a Git LFS pointer: a few lines that stand for a model",
         "run `git lfs pull` in the repository"),
    Rule("TQ005", "other-format", ERROR, "the file is of another format than the one needed here",
         "unpack it, convert it, or name the right file"),
    Rule("TQ006", "big-endian", ERROR, "the file is in big-endian byte order",
         "convert it with `gguf-convert-endian FILE little`"),
    Rule("TQ007", "version", ERROR, "the GGUF version is no version at all", _AGAIN),
    Rule("TQ008", "version-old", ERROR, "the GGUF version is 1, whose counts have 32 bits",
         "rewrite it with a llama.cpp of 2023, or convert the model again"),
    Rule("TQ009", "version-new", ERROR, "the GGUF version is above 3", "use a newer tqgguf"),
    Rule("TQ010", "version-2", WARNING, "the GGUF version is 2, the same as 3 but for big-endian files; it is read",
         "rewrite it with a current llama.cpp (`llama-quantize IN OUT COPY`)"),
    # structure: the tensors' places
    Rule("TQ101", "tensor-overlap", ERROR, "two tensors share bytes", _WRITER),
    Rule("TQ102", "truncated-header", ERROR, "the file ends within its first 24 bytes", _AGAIN),
    Rule("TQ103", "truncated-metadata", ERROR,
         "the metadata goes on beyond the end of the file: an entry, a string, an array, or as many as are stated",
         _AGAIN),
    Rule("TQ104", "truncated-tensors", ERROR, "the list of tensors goes on beyond the end of the file", _AGAIN),
    Rule("TQ105", "truncated-data", ERROR, "a tensor in its due place goes on beyond the end of the file", _AGAIN),
    Rule("TQ106", "tensor-past-end", ERROR, "a tensor's offset leads beyond the end of the file", _WRITER),
    Rule("TQ107", "offset-overflow", ERROR, "a tensor's offset is so large that its end wraps around", _WRITER),
    Rule("TQ108", "offset-unaligned", ERROR, "a tensor's offset is not a multiple of the alignment", _WRITER),
    Rule("TQ109", "tensor-order", WARNING,
         "tensors do not lie in the order in which they are listed, which llama.cpp demands",
         "nothing to do for tqgguf; for llama.cpp, write the file again, for instance with gguf-py"),
    Rule("TQ110", "tensor-gap", WARNING,
         "there are bytes between two tensors, or before the first, that are more than padding; llama.cpp refuses them",
         "nothing to do for tqgguf; for llama.cpp, write the file again, for instance with gguf-py"),
    Rule("TQ111", "trailing-data", WARNING, "the file goes on behind the last tensor and its padding",
         "compare its size with the original's"),
    # structure: counts, types and values
    Rule("TQ120", "over-limit", ERROR, "a count or length is above the limit that this reader sets", _WRITER),
    Rule("TQ121", "value-type", ERROR, "a metadata value or array element has a type id that GGUF does not define",
         _WRITER),
    Rule("TQ122", "array-depth", ERROR, "arrays are nested more than 4 deep", _WRITER),
    Rule("TQ123", "bool", ERROR, "a boolean is neither 0 nor 1", _WRITER),
    Rule("TQ124", "key-empty", ERROR, "a metadata key has no characters", _WRITER),
    Rule("TQ125", "key-utf8", ERROR, "a metadata key is not UTF-8", _WRITER),
    Rule("TQ126", "key-length", ERROR, "a metadata key has more than 65,535 bytes", _WRITER),
    Rule("TQ127", "duplicate-key", ERROR, "a metadata key occurs twice", _WRITER),
    Rule("TQ128", "alignment", ERROR, "general.alignment is not a power of two, or above 2 MiB", _WRITER),
    Rule("TQ129", "alignment-type", ERROR, "general.alignment is not a U32", _WRITER),
    Rule("TQ130", "text-utf8", WARNING, "a metadata text is not UTF-8",
         "harmless where the key is not used; convert the model again if it is"),
    # structure: the list of tensors
    Rule("TQ140", "tensor-name-empty", ERROR, "a tensor's name has no characters", _WRITER),
    Rule("TQ141", "tensor-name-utf8", ERROR, "a tensor's name is not UTF-8", _WRITER),
    Rule("TQ142", "tensor-name-length", ERROR, "a tensor's name has more than 63 bytes", _WRITER),
    Rule("TQ143", "duplicate-tensor", ERROR, "a tensor's name occurs twice, in one file or in two shards", _WRITER),
    Rule("TQ144", "dimensions", ERROR, "a tensor has more than 4 dimensions", _WRITER),
    Rule("TQ145", "dimension-size", ERROR, "a dimension of a tensor is 2^63 or more", _WRITER),
    Rule("TQ146", "overflow", ERROR, "the product of a tensor's dimensions does not fit in 63 bits", _WRITER),
    Rule("TQ147", "byte-overflow", ERROR, "a tensor's bytes do not fit in 63 bits", _WRITER),
    Rule("TQ148", "block", ERROR, "a tensor's rows are not whole blocks of its type", _WRITER),
    Rule("TQ149", "unknown-type", ERROR,
         "a tensor's type is not known here, newer or a fork's: its data can neither be bounded nor read",
         "use a newer tqgguf, or the program that the file was made for"),
    Rule("TQ150", "removed-type", ERROR, "a tensor's type was removed from ggml",
         "quantise the original model again with a current llama.cpp"),
    # sets of shards
    Rule("TQ160", "split-name", ERROR, "a shard's file name does not say what its metadata says",
         "give the files their original names, NAME-00001-of-0000N.gguf"),
    Rule("TQ161", "split-missing", ERROR, "a shard of the set is not there", "download all files of the set"),
    Rule("TQ162", "split-number", ERROR, "two shards are copies of one, or have changed their names",
         "download the files of the set again"),
    Rule("TQ163", "split-disagrees", ERROR, "shards disagree with each other or with the set's own counts",
         "download all files of one set"),
    Rule("TQ166", "split-types", WARNING,
         "all matrices of a shard's layers are of other types than those of the other shards: another model's, perhaps",
         "download all files of one set"),
    Rule("TQ165", "joined-files", ERROR, "another GGUF begins where the file should end: several were joined into one",
         "keep the files of a split model as they are, in one folder, and name the first"),
    Rule("TQ164", "split-key", ERROR, "a shard's split.no, split.count or split.tensors.count is missing or no count",
         _WRITER),
)  # fmt: skip
