"""Turns generated token ids into text that can be shown at once: whole characters, nothing of a stop string.

Knows bytes and stop strings only; which ids end generation is the caller's business.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tqgguf.runtime.tokenizers.text_tokenizer import TextTokenizer

_CHARACTER_TOKENS = 16  # over which a character may be spread: it has four bytes, and some tokens have none


class TextStream:
    """Text of one answer as it grows. `stop`: strings that end it; they and what follows are never shown.

    `show_special`: whether control tokens appear as their text (llama.cpp's --special).
    The leading space of a SentencePiece token is kept, as llama.cpp does while generating.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), *, show_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._show_special = show_special
        # Holds incomplete UTF-8 back, and replaces bytes by U+FFFD once no continuation can make them a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def take_up(self, before: Sequence[int], n_generated: int) -> None:
        """Begin behind the tokens `before`: what they left incomplete is shown once it is complete.

        A character may have begun in any of them, a stop string only in the last `n_generated`, which are an answer's.
        """
        self._decoder.decode(b"".join(map(self._bytes_of, before[-_CHARACTER_TOKENS:])))
        n = min(n_generated, sum(map(len, self._stop)) + _CHARACTER_TOKENS)
        text = b"".join(map(self._bytes_of, before[len(before) - n :])).decode("utf-8", "ignore")
        self._held = "" if text.endswith(self._stop) else text[len(text) - self._held_length(text) :]

    def _bytes_of(self, token_id: int) -> bytes:
        hidden = not self._show_special and self._tokenizer.is_special(token_id)
        return b"" if hidden else self._tokenizer.token_bytes(token_id)

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` was generated; "" after a stop string."""
        return "" if self.stopped else self._show(self._decoder.decode(self._bytes_of(token_id)))

    def finish(self, is_cut: bool = False) -> str:
        """What was held back, now that nothing more will come. An incomplete character becomes U+FFFD, or is left out
        if the text is cut there, for it is none yet.
        """
        if self.stopped:
            return ""
        shown = "" if is_cut else self._show(self._decoder.decode(b"", final=True))
        if self.stopped:
            return shown
        shown, self._held = shown + self._held, ""
        return shown

    def _show(self, new: str) -> str:
        text = self._held + new
        # The stop that is complete first wins, so that the result does not depend on how text falls into tokens.
        found = min(((at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[: found[1]]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
