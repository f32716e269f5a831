"""BPE (`tokenizer.ggml.model` = gpt2 or gemma4): plain text to token ids and one token to its bytes.

Builds a `tokenizers.Tokenizer` from token strings and merges. Knows nothing of special tokens, BOS or EOS:
`tokenizer.Tokenizer` hands it the text between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.models.vocabulary import PREFIX, SPACE, SURROGATE, Vocabulary, read_merges, read_name, utf8
from tqgguf.formats.wording import shown
from tqgguf.text.pretokenizers import DEFAULT_PRETOKENIZER, PRETOKENIZERS, Pretokenizer


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()
GEMMA = "gemma4"  # a tokenizer model that implies its pre-tokenizer
_LINES = re.compile(r"[^\n]+|\n+")


class BpeModel:
    """BPE over a vocabulary. `backend` is the `tokenizers.Tokenizer` that merges plain text."""

    space_prefix = False

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        row = choose_pretokenizer(metadata, vocabulary.warnings)
        self._vocabulary = vocabulary
        self._row = row
        self.add_bos, self.requires_bos = row.add_bos, row.requires_bos
        ids = _spellable(vocabulary.ids)
        merges = read_merges(metadata)
        # Merges may go through strings that are no tokens, and a letter without a token stands in the way of merges:
        # such strings get ids past the end, which `encode` takes apart.
        letters = () if row.spelt_out else BYTE_LETTERS
        pieces = {piece for left, right in merges for piece in (left, right, left + right)}.union(letters)
        strays = sorted(pieces - ids.keys())
        self.strays: Sequence[str] = strays
        self._parts = {len(vocabulary) + n: self._take_apart(stray) for n, stray in enumerate(strays)}
        lost = "".join(stray for stray, parts in zip(strays, self._parts.values(), strict=True) if not parts)
        if row.spelt_out:
            self.lossy_bytes = bytes(byte for byte in range(256) if f"<0x{byte:02X}>" not in ids) + lost.encode()
        else:
            self.lossy_bytes = bytes({BYTE_LETTERS[letter] for letter in lost if letter in BYTE_LETTERS})
        if strays:
            ids = ids | dict(zip(strays, self._parts, strict=True))
        self._merger = Backend(BPE(ids, merges, ignore_merges=row.ignore_merges, byte_fallback=row.spelt_out))
        if not row.spelt_out:
            self._merger.pre_tokenizer = build_pre_tokenizer(row)
        self.backend: Backend | None = self._merger

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Token ids of plain text; `after_special` makes no difference here."""
        if self._row.spelt_out:
            ids = [i for line in _LINES.findall(text.replace(" ", SPACE)) for i in self._encode_line(line)]
        else:
            ids = self._merger.encode(text, add_special_tokens=False).ids
        if not self._parts:
            return ids
        return [part for i in ids for part in self._parts.get(i, (i,))]

    def _encode_line(self, line: str) -> list[int]:
        if self._row.whole_newlines and line[0] == "\n" and line in self._vocabulary.ids:
            return [self._vocabulary.ids[line]]
        return self._merger.encode(line, add_special_tokens=False).ids

    def _take_apart(self, stray: str) -> tuple[int, ...]:
        """Ids that stand for a string that is no token: those of its bytes, as far as llama.cpp finds any."""
        if self._row.spelt_out:
            names = [f"<0x{byte:02X}>" for byte in stray.encode()]
        else:
            names = [letter for letter in stray if letter.isascii()]
        return tuple(self._vocabulary.ids[name] for name in names if name in self._vocabulary.ids)

    def normal_bytes(self, text: str) -> bytes:
        """The bytes that a normal token, spelt `text` in the vocabulary, stands for."""
        if self._row.spelt_out:
            return utf8(text.replace(SPACE, " "))
        # A character that is no byte letter stands for itself; llama.cpp prints a diagnostic in its place.
        return b"".join(bytes((BYTE_LETTERS[c],)) if c in BYTE_LETTERS else utf8(c) for c in text)


def choose_pretokenizer(metadata: Mapping[str, Any], warnings: list[str]) -> Pretokenizer:
    """The row for the metadata's `tokenizer.ggml.pre`; UnsupportedModelError when the name is unknown."""
    name = GEMMA if read_name(metadata, "model") == GEMMA else read_name(metadata, "pre")
    if name in (None, "", DEFAULT_PRETOKENIZER):
        warnings.append(f"{PREFIX}pre: no pre-tokenizer is named; using the default, words may be cut wrong")
        return PRETOKENIZERS[DEFAULT_PRETOKENIZER]
    if name not in PRETOKENIZERS:
        raise UnsupportedModelError(
            f"{PREFIX}pre: expected a pre-tokenizer that is known, found {shown(name)}, which is not supported"
        )
    return PRETOKENIZERS[name]


def build_pre_tokenizer(row: Pretokenizer) -> Steps:
    """The `tokenizers` pre-tokenizer of a row: its regexes in order, then byte letters."""
    splits = [Split(Regex(regex), "isolated") for regex in row.regexes]
    return Steps([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _spellable(ids: dict[str, int]) -> dict[str, int]:
    """`ids` less the tokens that are not UTF-8: no text has them, and the `tokenizers` library cannot hold them."""
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        return {text: i for text, i in ids.items() if not SURROGATE.search(text)}
    return ids
