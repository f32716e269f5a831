"""Text of tokens that each stand for bytes of their own: the decoder of GGUF vocabularies."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class ByteStream:
    """A `TokenDecoder` over the bytes of single tokens.

    `token_bytes`: the bytes of a token; `is_hidden`: whether a token is left out of the text.
    The leading space of a SentencePiece token is kept, as llama.cpp does while generating.
    """

    pending = ""  # bytes of an incomplete character are no text yet

    def __init__(self, token_bytes: Callable[[int], bytes], is_hidden: Callable[[int], bool]) -> None:
        self._token_bytes, self._is_hidden = token_bytes, is_hidden
        # Holds incomplete UTF-8 back, and replaces bytes by U+FFFD once no continuation can make them a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if self._is_hidden(token_id) else self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
