"""SentencePiece vocabularies (`tokenizer.ggml.model` = llama): plain text to token ids and one token to its bytes.

Merges as llama.cpp does: of all neighbours whose union is a token, the union of the highest score is joined first,
of equal scores the leftmost. No list of merges is derived: pairs are looked up in the vocabulary, so that a
vocabulary of 262,144 tokens costs nothing to load, and equal scores need no order among pairs.
Knows nothing of special tokens, BOS or EOS: `tokenizer.Tokenizer` hands it the text between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from tokenizers import Tokenizer as Backend

from tqgguf.formats.models.vocabulary import PREFIX, SPACE, Vocabulary, read_flag, utf8

KNOWN_WORDS = 65536
KNOWN_WORD_LENGTH = 32


class SpmModel:
    """A SentencePiece vocabulary: encodes plain text, tells the bytes of tokens.

    `space_prefix`: text gets a space in front at its beginning and after special tokens.
    """

    backend: Backend | None = None
    strays: Sequence[str] = ()
    add_bos = True
    requires_bos = False

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self.space_prefix = read_flag(metadata, "add_space_prefix", True)
        if vocabulary.scores is None:
            vocabulary.warnings.append(f"{PREFIX}scores: absent; all merges rank alike, words may be cut wrong")
        scores = [0.0] * len(vocabulary) if vocabulary.scores is None else (-vocabulary.scores).tolist()
        # Token text -> negated score: the smallest comes first from a heap.
        self._ranks: dict[str, float] = dict(zip(vocabulary.tokens, scores, strict=True))
        self._byte_ids = _find_byte_ids(vocabulary)
        self.lossy_bytes = bytes(byte for byte, i in enumerate(self._byte_ids) if i is None)
        # Words merge one by one, and can be remembered, since hardly any token has a space after another character.
        glued = "".join(set(re.findall(f"([^{SPACE}]){SPACE}", "\0".join(vocabulary.tokens))) | {"\0"})
        self._word_edge = re.compile(f"(?<=[^{SPACE}{re.escape(glued)}])(?={SPACE})")
        self._known_words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Token ids of plain text; after a special token or at the beginning it may get a space in front."""
        text = (" " + text if after_special and self.space_prefix else text).replace(" ", SPACE)
        known = self._known_words
        ids: list[int] = []
        for word in self._word_edge.split(text):
            found = known.get(word)
            if found is None:
                found = tuple(self._encode_word(word))
                if len(word) <= KNOWN_WORD_LENGTH and len(known) < KNOWN_WORDS:
                    known[word] = found
            ids += found
        return ids

    def normal_bytes(self, text: str) -> bytes:
        """The bytes that a normal token, spelt `text` in the vocabulary, stands for."""
        return utf8(text.replace(SPACE, " "))

    def _encode_word(self, word: str) -> list[int]:
        ids = self._vocabulary.ids
        whole: list[int] = []
        for piece in self._merge(word):
            found = ids.get(piece)
            if found is not None:
                whole.append(found)
            else:
                whole += [i for byte in piece.encode() if (i := self._byte_ids[byte]) is not None]
        return whole

    def _merge(self, word: str) -> list[str]:
        """`word` as the pieces that no merge can join any more."""
        ranks = self._ranks
        pieces = list(word)  # a piece that was joined to its left neighbour is ""
        last = len(pieces) - 1
        before = list(range(-1, last))
        after = [*range(1, last + 1), -1]
        # (negated score, left, right, length of the union); an entry is stale once a piece has changed.
        heap = [(ranks[pair], i, i + 1, 2) for i in range(last) if (pair := word[i : i + 2]) in ranks]
        heapify(heap)
        while heap:
            _, left, right, length = heappop(heap)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue
            joined = pieces[left] + pieces[right]
            pieces[left], pieces[right] = joined, ""
            after[left] = beyond = after[right]
            if beyond >= 0:
                before[beyond] = left
                self._push(heap, joined + pieces[beyond], left, beyond)
            if (previous := before[left]) >= 0:
                self._push(heap, pieces[previous] + joined, previous, left)
        return [piece for piece in pieces if piece]

    def _push(self, heap: list[tuple[float, int, int, int]], union: str, left: int, right: int) -> None:
        rank = self._ranks.get(union)
        if rank is not None:
            heappush(heap, (rank, left, right, len(union)))


def _find_byte_ids(vocabulary: Vocabulary) -> list[int | None]:
    """Byte -> id of <0xXX>, else of the token of that one character, else of the unknown token."""
    ids = vocabulary.ids
    found = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte)) if byte < 128 else None) for byte in range(256)]
    if missing := found.count(None):
        vocabulary.warnings.append(f"{PREFIX}tokens: {missing} of 256 byte tokens are missing; their text is unknown")
    return [vocabulary.special.get("unk") if i is None else i for i in found]
