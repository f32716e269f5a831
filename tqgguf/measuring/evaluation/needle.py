"""A needle in a haystack: one sentence with a number, at some depth of a long text, and a question for the number.

Everything goes the way that `run` goes: the model's chat template if it has one, a `Session` with one cache for each
cell, an answer at temperature 0. A cell of the grid is a length and a depth; f16 answers it first, and where f16 fails
nothing can be said of other caches.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.generation.generate import Generation
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.loaded_model import LoadedModel
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.grid import DEFAULT_CHUNK
from tqgguf.text.sampling import Sampler
from tqgguf.text.sampling_params import SamplingParams
from tqgguf.text.text_tokenizer import TextTokenizer

ANSWER_TOKENS = 32
N_DIGITS = 5

NEEDLE = "The pass-number of the lighthouse is {}."
QUESTION = "What is the pass-number of the lighthouse? Answer with the number."
COMPLETION = "Question: Which pass-number does the lighthouse have?\nAnswer: The pass-number of the lighthouse is"
"""For models without a chat template, which continue it."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_FITTING_ROUNDS = 12

Progress = Callable[[int, int], None]
"""Called with (prompt tokens evaluated, prompt tokens in all); what it raises ends the test."""


@dataclass(frozen=True)
class NeedlePrompt:
    """One cell. length: tokens of prompt and answer together, at most. depth: in per cent of the haystack."""

    length: int
    depth: int
    ids: tuple[int, ...]
    number: str


@dataclass(frozen=True)
class NeedleRow:
    """A cache to be asked, as `Session` makes it."""

    label: str
    spec: CacheSpec
    channel_scales: Mapping[int, mx.array] | None = None


@dataclass(frozen=True)
class NeedleAnswer:
    """What was answered, whether the number is in it, and how keys were read for it."""

    text: str
    found: bool
    reads: Reads


@dataclass
class NeedleCell:
    """A prompt and its answers by label, in the order of the rows. Only f16's (the first) where that failed."""

    prompt: NeedlePrompt
    answers: dict[str, NeedleAnswer] = field(default_factory=dict)


def needle_prompts(
    tokenizer: TextTokenizer, text: str, lengths: Sequence[int], depths: Sequence[int], seed: int, source: str = "text"
) -> list[NeedlePrompt]:
    """The cells of a grid, by length, then by depth. Their numbers depend on seed, length and depth alone.

    RequestError: a length without room for a haystack, a text that is too short, a template that fails.
    """
    template = ChatTemplate.of(tokenizer)
    hay = tokenizer.encode(text, add_special=False, parse_special=False)
    found = []
    for length in lengths:
        for depth in depths:
            number = _number(seed, length, depth)
            ids = _fitted(tokenizer, template, hay, length, depth, number, source)
            found.append(NeedlePrompt(length, depth, tuple(ids), number))
    return found


def least_length(tokenizer: TextTokenizer, length: int, depths: Sequence[int], seed: int) -> int:
    """Tokens of prompt and answer with one token of haystack, for the numbers that a length and these depths get."""
    template = ChatTemplate.of(tokenizer)
    return max(_least(tokenizer, template, depth, _number(seed, length, depth)) for depth in depths)


def _least(tokenizer: TextTokenizer, template: ChatTemplate, depth: int, number: str) -> int:
    return len(_encoded(tokenizer, template, "", depth, number)) + ANSWER_TOKENS + 1


def _number(seed: int, length: int, depth: int) -> str:
    """Digits that all differ, the first not 0."""
    digits = random.Random(f"{seed}/{length}/{depth}").sample("0123456789", N_DIGITS)
    return "".join(digits if digits[0] != "0" else reversed(digits))


def _fitted(
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    hay: Sequence[int],
    length: int,
    depth: int,
    number: str,
    source: str,
) -> list[int]:
    """The prompt with as much hay as fits into `length`; how many tokens a text has is known when it is encoded."""
    room = length - ANSWER_TOKENS
    least = _least(tokenizer, template, depth, number)
    if length < least:
        raise RequestError(f"--needle-lengths: expected {least} tokens or more for a needle, found {length}")
    n_hay = length - least + 1
    for _ in range(_FITTING_ROUNDS):
        if n_hay > len(hay):
            raise RequestError(
                f"{source} has {len(hay):,} tokens: expected at least {n_hay:,} for a length of {length:,} "
                "(--needle-lengths, -c)"
            )
        ids = _encoded(tokenizer, template, tokenizer.decode(hay[:n_hay]), depth, number)
        if len(ids) <= room:
            return ids
        n_hay = min(n_hay - 1, n_hay * room // len(ids))
    raise RequestError(f"{source}: expected a text whose parts have about as many tokens as they have in it")


def _encoded(tokenizer: TextTokenizer, template: ChatTemplate, hay: str, depth: int, number: str) -> list[int]:
    text = hide(hay.strip("\ufffd"), NEEDLE.format(number), depth)
    if not template.explicit:
        return tokenizer.encode(f"{text}\n\n{COMPLETION}")
    return tokenizer.encode(template.render([{"role": "user", "content": f"{text}\n\n{QUESTION}"}]))


def hide(text: str, needle: str, depth: int) -> str:
    """A text with a sentence between two of its own, as near to `depth` per cent of its characters as can be."""
    wanted = len(text) * depth / 100
    places = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    at = min(places, key=lambda place: abs(place - wanted))
    before = text[:at] if not at or text[at - 1].isspace() else text[:at] + " "
    return f"{before}{needle} {text[at:]}".rstrip()


class NeedleTest:
    """Several caches of one model over the cells of a grid. The first row is the reference, f16.

    `run` may be broken off by what its progress call raises: `cells` then are those that were answered by every row.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        rows: Sequence[NeedleRow],
        prompts: Sequence[NeedlePrompt],
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        self.loaded, self.rows, self.prompts, self.chunk = loaded, tuple(rows), tuple(prompts), chunk
        self.cells: list[NeedleCell] = []

    def run(self, progress: Progress | None = None) -> None:
        """Ask for every needle. Rows that need not be asked count as evaluated."""
        total = len(self.rows) * sum(len(prompt.ids) for prompt in self.prompts)
        done = 0
        for prompt in self.prompts:
            cell = NeedleCell(prompt)
            for row in self.rows:
                before = done

                def advance(n: int, _: int, before: int = before) -> None:
                    if progress is not None:
                        progress(before + n, total)

                if all(answer.found for answer in list(cell.answers.values())[:1]):
                    cell.answers[row.label] = self._ask(row, prompt, advance)
                done += len(prompt.ids)
            self.cells.append(cell)

    def _ask(self, row: NeedleRow, prompt: NeedlePrompt, progress: Progress) -> NeedleAnswer:
        session = Session(
            self.loaded, row.spec, n_ctx=prompt.length, chunk=self.chunk, channel_scales=row.channel_scales
        )
        logits = session.prefill(prompt.ids, progress)
        generation = Generation(session, Sampler(SamplingParams(temp=0.0)), ANSWER_TOKENS)
        text = ""
        for piece in generation.pieces(logits):
            text += piece
            if prompt.number in text:
                break
        mx.clear_cache()
        return NeedleAnswer(text, prompt.number in text, session.usage.reads)
