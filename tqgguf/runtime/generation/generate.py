"""Generating an answer token by token: sampling, and why it ended.

Evaluation is the session's. Knows nothing of text on a terminal, flags or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tqgguf.runtime.generation.sampling import Sampler
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.tokenizers.text_stream import TextStream


@dataclass
class Generation:
    """One answer: iterate over `pieces` for its text as it comes; `finish` then says why it ended.

    context: ids of the text that the answer continues, if it is no text of its own (an answer in a chat is one).
    finish: 'eog' (the model ended it), 'stop' (a stop string), 'length' (-n), 'context' (no room left).
    """

    session: Session
    sampler: Sampler
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    show_special: bool = False
    context: Sequence[int] = ()
    finish: str | None = None
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream = TextStream(
            self.session.loaded.tokenizer, self.stop, show_special=self.show_special, context=self.context
        )

    def pieces(self, logits: NDArray[np.float32]) -> Iterator[str]:
        """Text from the logits after the prompt until the end. Every yielded piece is whole characters.

        Each token shown has been evaluated, except the last one of an answer that ended by length or stop string.
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
            if text := stream.push(token):
                yield text
            if stream.stopped:
                self.finish = "stop"
            elif self.session.room < 1:
                self.finish = "context"
            elif self.n_predict < 0 or len(self.ids) < self.n_predict:
                logits = self.session.decode(token)
        if rest := self.rest():
            yield rest

    def complete(self) -> None:
        """Evaluate the last token of an answer that ended by length or stop string: the session then holds all."""
        if self.finish in ("length", "stop") and self.ids and self.session.room:
            self.session.decode(self.ids[-1])

    def rest(self) -> str:
        """Text held back: a character or stop string that was not completed. An interrupted answer still shows it."""
        return self._stream.finish()
