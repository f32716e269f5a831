"""Byte-level BPE (`tokenizer.ggml.model` = gpt2): plain text to token ids and one token to its bytes.

Builds a `tokenizers.Tokenizer` from token strings and merges. Knows nothing of special tokens, BOS or EOS:
`tokenizer.Tokenizer` hands it the text between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.runtime.pretokenizers import DEFAULT_PRETOKENIZER, PRETOKENIZERS, Pretokenizer
from tqgguf.runtime.vocabulary import PREFIX, Vocabulary, read_strings, utf8


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


class BpeModel:
    """Byte-level BPE over a vocabulary. `backend` is the `tokenizers.Tokenizer` that merges plain text."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        self.pretokenizer = choose_pretokenizer(metadata, vocabulary.warnings)
        self._vocabulary = vocabulary
        self.add_bos = self.pretokenizer.add_bos
        merges = _read_merges(metadata, vocabulary)
        # A letter without a token must stand in the way of merges, and then vanish: it gets an id past the end.
        missing = not vocabulary.ids.keys() >= BYTE_LETTERS.keys()
        self._unknown = "\0unknown" if missing else None
        ids = vocabulary.ids if self._unknown is None else {**vocabulary.ids, self._unknown: len(vocabulary)}
        self._merger = Backend(BPE(ids, merges, unk_token=self._unknown, ignore_merges=self.pretokenizer.ignore_merges))
        self.backend: Backend | None = self._merger
        self._merger.pre_tokenizer = build_pre_tokenizer(self.pretokenizer)

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Token ids of plain text; `after_special` makes no difference here."""
        ids: list[int] = self._merger.encode(text, add_special_tokens=False).ids
        return ids if self._unknown is None else [i for i in ids if i < len(self._vocabulary)]

    def normal_bytes(self, text: str) -> bytes:
        """The bytes that a normal token, spelt `text` in the vocabulary, stands for."""
        # A character that is no byte letter stands for itself; llama.cpp prints a diagnostic in its place.
        return b"".join(bytes((BYTE_LETTERS[c],)) if c in BYTE_LETTERS else utf8(c) for c in text)


def choose_pretokenizer(metadata: Mapping[str, Any], warnings: list[str]) -> Pretokenizer:
    """The row for the metadata's `tokenizer.ggml.pre`; UnsupportedModelError when the name is unknown."""
    name = metadata.get(PREFIX + "pre")
    if name is None or name in ("", DEFAULT_PRETOKENIZER):
        warnings.append(f"{PREFIX}pre: no pre-tokenizer is named; using the default, words may be cut wrong")
        return PRETOKENIZERS[DEFAULT_PRETOKENIZER]
    if name not in PRETOKENIZERS:
        raise UnsupportedModelError(f"{PREFIX}pre: expected a pre-tokenizer known to llama.cpp, found {name!r}")
    return PRETOKENIZERS[name]


def build_pre_tokenizer(row: Pretokenizer) -> Sequence:
    """The `tokenizers` pre-tokenizer of a row: its regexes in order, then byte letters."""
    splits = [Split(Regex(regex), "isolated") for regex in row.regexes]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _read_merges(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    lines = read_strings(metadata, "merges")
    if lines is None:
        raise FormatError(f"{PREFIX}merges: expected the merges of a gpt2 tokenizer, found none")
    merges: dict[tuple[str, str], None] = {}  # the first of equal merges decides the rank
    ids = vocabulary.ids
    for index, line in enumerate(lines):
        at = line.find(" ", 1)  # a space may itself be the left part
        left, right = line[:at], line[at + 1 :]
        if at < 0 or not right:
            raise FormatError(f"{PREFIX}merges: expected two tokens and a space between, found {line!r} at {index}")
        # A merge is of no use when its result is no token; llama.cpp merges and then takes the result apart.
        if left + right in ids and left in ids and right in ids:
            merges[left, right] = None
    return list(merges)
