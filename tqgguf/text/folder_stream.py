"""Text of a folder's tokens as they come: what the `tokenizers` library decodes of them all, and no other text.

The text is derived from the library's own decoder, by decoding the last tokens anew with every token: what was there
before is the text that was shown, what follows is new. What a later token could still change is held back, which is
known of the decoder's steps. Knows nothing of stop strings or of which ids end an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from tqgguf.text.library_errors import failing_as

MOST_IDS: Final = 48
"""Of tokens that are decoded together: when there are more, the last ones stand for all."""
KEPT_IDS: Final = (8, 16, 32)
"""How many last ones are tried: their text must be the end of the text of all."""
_BYTE: Final = re.compile("<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT: Final = "\ufffd"
_JOINING: Final = ("Fuse", "ByteLevel")
"""Steps after which a decoder's steps see the whole text, no tokens."""
_STABLE_ON_TEXT: Final = ("Fuse", "Strip", "Metaspace")
"""Steps that leave the beginning of a whole text as it is when the text becomes longer."""


def held_back(decoder: Any) -> int | None:
    """How many last characters of a decoder's text a later token can change, beside an incomplete character.

    decoder: as tokenizer.json has it. None: all of them.
    """
    held, is_text = 0, False
    for step in decoder_steps(decoder):
        kind = step.get("type")
        if is_text and kind == "Replace":
            pattern = (step.get("pattern") or {}).get("String")
            if not pattern:
                return None  # a regular expression can wait for anything
            held += 0 if len(pattern) == 1 else max(len(pattern), len(step.get("content") or ""))
        elif is_text and kind not in _STABLE_ON_TEXT:
            return None
        is_text = is_text or kind in _JOINING
    return held


def decoder_steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder of tokenizer.json, in their order."""
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for step in decoder.get("decoders") or ():
                yield from decoder_steps(step)
        else:
            yield decoder


def decoded(backend: Backend, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """The library's text of `ids`. FormatError: its decoder fails with them."""
    with failing_as("tokenizer.json: its decoder fails with some tokens"):
        return backend.decode(ids, skip_special_tokens=skip_special)


class FolderStream:
    """A `TokenDecoder` over a `tokenizers.Tokenizer`.

    decoder: of the backend, as tokenizer.json has it. hidden: ids that are left out of the text. context: ids that the
    text goes on from; they are not part of it, but decide whether it begins with a space.
    """

    def __init__(
        self, backend: Backend, decoder: Any, hidden: frozenset[int] = frozenset(), context: Sequence[int] = ()
    ) -> None:
        self._backend, self._hidden = backend, hidden
        self._held_back = held_back(decoder)
        kinds = {step.get("type") for step in decoder_steps(decoder)}
        self._joins_bytes, self._knows_last = "ByteFallback" in kinds, "BPEDecoder" in kinds
        self._ids: list[int] = [i for i in context[-MOST_IDS:] if self._is_shown(i)]
        self._text = self._decode(self._ids)
        self._n_shown = len(self._text)

    def push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._ids.append(token_id)
        if self._held_back is None:
            return ""
        self._text = self._decode(self._ids)
        settled = self._settled(self._held_back)
        new = self._text[self._n_shown : settled]
        self._n_shown = max(self._n_shown, settled)
        if len(self._ids) > MOST_IDS:
            self._forget()
        return new

    def finish(self) -> str:
        rest = self.pending
        self._text = self._decode(self._ids)
        self._n_shown = len(self._text)
        return rest

    @property
    def pending(self) -> str:
        text = self._decode(self._ids) if self._held_back is None else self._text
        return text[self._n_shown :]

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._hidden and self._backend.id_to_token(token_id) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return decoded(self._backend, ids) if ids else ""

    def _settled(self, held: int) -> int:
        """How many characters of the text no later token can change."""
        end = len(self._text)
        n_ids = len(self._ids)
        if self._joins_bytes:  # one byte that fits to nothing makes every byte token beside it U+FFFD
            while n_ids and _BYTE.fullmatch(self._backend.id_to_token(self._ids[n_ids - 1]) or ""):
                n_ids -= 1
        if n_ids < len(self._ids):
            end = len(self._decode(self._ids[:n_ids]))
        elif self._text.endswith(_REPLACEMENT):
            end -= 1
        if self._knows_last:  # the last token is spelt otherwise than the same token before others
            longer = self._decode([*self._ids, self._ids[-1]])
            end = next((i for i in range(end) if self._text[i] != longer[i : i + 1]), end)
        return max(0, end - held)

    def _forget(self) -> None:
        """Let the last ids stand for all, so that decoding costs the same however long the text becomes."""
        n_held = len(self._text) - self._n_shown
        for n in KEPT_IDS:
            text = self._decode(self._ids[-n:])
            # Some text of theirs must have been shown: it is what a decoder may strip at the beginning of a text.
            if len(text) > n_held and self._text.endswith(text):
                self._ids, self._text, self._n_shown = self._ids[-n:], text, len(text) - n_held
                return
