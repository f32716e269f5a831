"""Turns generated token ids into text that can be shown at once: whole characters, nothing of a stop string.

Knows stop strings; how tokens become text is the tokenizer's business, which ids end generation the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tqgguf.runtime.tokenizers.text_tokenizer import TextTokenizer


class TextStream:
    """Text of one answer as it grows. `stop`: strings that end it; they and what follows are never shown.

    `show_special`: whether control tokens appear as their text (llama.cpp's --special).
    `context`: ids that the answer goes on from, where it continues a text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str] = (),
        *,
        show_special: bool = False,
        context: Sequence[int] = (),
    ) -> None:
        self._decoder = tokenizer.stream_decoder(context, show_special=show_special)
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` was generated; "" after a stop string."""
        return "" if self.stopped else self._show(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was held back, now that nothing more will come; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        shown = self._show(self._decoder.finish())
        if self.stopped:
            return shown
        shown, self._held = shown + self._held, ""
        return shown

    def _show(self, new: str) -> str:
        text = self._held + new
        # A stop string counts as soon as it is there, also in text that a later token could change.
        whole = text + self._decoder.pending if self._stop else text
        # The stop that is complete first wins, so that the result does not depend on how text falls into tokens.
        found = min(((at + len(stop), at) for stop in self._stop if (at := whole.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return whole[: found[1]]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
