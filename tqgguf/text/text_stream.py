"""Turns generated token ids into text that can be shown at once: whole characters, nothing of a stop string.

Knows stop strings; how tokens become text is the tokenizer's business, which ids end generation the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tqgguf.text.text_tokenizer import TextTokenizer

_CHARACTER_TOKENS = 16  # over which a character may be spread: it has four bytes, and some tokens have none


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

    def take_up(self, before: Sequence[int], n_generated: int) -> None:
        """Begin behind the tokens `before`: what they left incomplete is shown once it is complete.

        A character may have begun in any of them, a stop string only in the last `n_generated`, which are an answer's.
        """
        n = min(n_generated, sum(map(len, self._stop)) + _CHARACTER_TOKENS)
        start = len(before) - n
        for token_id in before[max(0, start - _CHARACTER_TOKENS) : start]:
            self._decoder.push(token_id)
        text = "".join(map(self._decoder.push, before[start:]))
        self._held = "" if text.endswith(self._stop) else text[len(text) - self._held_length(text) :]

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` was generated; "" after a stop string."""
        return "" if self.stopped else self._show(self._decoder.push(token_id))

    def finish(self, is_cut: bool = False) -> str:
        """What was held back, now that nothing more will come. An incomplete character becomes U+FFFD, or is left out
        if the text is cut there, for it is none yet.
        """
        if self.stopped:
            return ""
        rest = self._decoder.finish()
        shown = self._show(rest.rstrip("\ufffd") if is_cut else rest)
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
