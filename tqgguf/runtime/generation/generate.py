"""Generating an answer token by token: sampling, and why it ended.

Evaluation is the session's. Knows nothing of text on a terminal, flags or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tqgguf.runtime.generation.session import Session
from tqgguf.text.sampling import Sampler
from tqgguf.text.text_stream import TextStream


@dataclass
class Generation:
    """One answer: iterate over `pieces` for its text as it comes; `finish` then says why it ended.

    context: ids of the text that the answer continues, if it is no text of its own (an answer in a chat is one).
    finish: 'eog' (the model ended it), 'stop' (a stop string), 'length' (-n), 'context' (no room left). goes_on: the
    session's tokens will be gone on with, so that an incomplete stop string at the end is left to whoever does that
    (`take_up`), unless the model ended the answer.
    """

    session: Session
    sampler: Sampler
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    show_special: bool = False
    context: Sequence[int] = ()
    goes_on: bool = False
    finish: str | None = None
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream = TextStream(
            self.session.loaded.tokenizer, self.stop, show_special=self.show_special, context=self.context
        )

    def pieces(self, logits: NDArray[np.float32]) -> Iterator[str]:
        """Text from the logits after the prompt until the end, a piece for each token. Every piece is whole characters,
        or empty.

        Whenever a piece is out, the session holds every token of the answer, the last one evaluated or pending.
        """
        tokenizer = self.session.loaded.tokenizer
        stream = self._stream
        while self.finish is None:
            if 0 <= self.n_predict <= len(self.ids):
                self.finish = "length"
                break
            token = self.sampler.sample(logits[: tokenizer.vocab_size])  # some output layers are padded
            self.sampler.accept(token)
            if token in tokenizer.end_of_generation:
                self.finish = "eog"
                break
            self.ids.append(token)
            self.session.pending = [token]
            self.session.timing.answer_tokens += 1
            yield stream.push(token)
            if stream.stopped:
                self.finish = "stop"
            elif self.session.room < 1:
                self.finish = "context"
            elif self.n_predict < 0 or len(self.ids) < self.n_predict:
                logits = self.session.decode(token)
        if rest := self.rest():
            yield rest

    def take_up(self, held: Sequence[int], n_generated: int) -> None:
        """Go on in the middle of a text: `held` are its tokens, the last `n_generated` of which an answer made. What
        that answer left incomplete belongs to the text of this one.
        """
        self._stream.take_up(held, n_generated)

    def complete(self) -> None:
        """Evaluate the answer's last token, for files that name no token without rows."""
        session = self.session
        if self.ids and session.pending == self.ids[-1:] and session.room and not session.is_torn:
            self.session.decode(self.ids[-1])

    def rest(self) -> str:
        """Text held back that belongs to the answer. An answer that was cut ends before a character of which it has a
        part, so that the pieces of an answer are together the whole of it.
        """
        is_cut = self.finish != "eog"
        return "" if self.goes_on and is_cut else self._stream.finish(is_cut)
