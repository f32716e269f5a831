"""What `tqgguf eval` is asked to do: the command line, parsed, checked and typed, before any file is opened.

Nothing here knows typer, and nothing reads files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tqgguf.cli.flag_table import ranges_of
from tqgguf.cli.model_flags import DEFAULT_CHUNKS
from tqgguf.cli.ranges import INT32, check_chunks, check_ranges, whole_numbers
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.cache_pairs import DEFAULT_PAIRS, CachePair, parse_pairs
from tqgguf.text.grid import DEFAULT_CHUNK

_ONLY_WITH_NEEDLE = ("--needle-lengths", "--needle-depths")
_NOT_WITH_NEEDLE = ("--like-llama", "--no-tail", "--chunks", "--report")


@dataclass(frozen=True)
class EvalRequest:
    """One call of `tqgguf eval`. Names of files are as the user wrote them; "-" is standard input.

    Raises RequestError for a number out of its range and an unknown cache type.
    """

    model: str | None = None
    """A GGUF file, any shard of a split one, or an MLX model folder. None: the embedded default model."""
    text_file: str | None = None
    """None: the text that tqgguf brings."""
    cache_types: str = DEFAULT_PAIRS
    n_ctx: int = 2048
    """Tokens of a window. 0: as many as the model was trained for."""
    n_chunks: int = DEFAULT_CHUNKS
    """Windows; ALL_CHUNKS: as many as the text gives. The default takes fewer where the text is short."""
    n_batch: int = 2048
    n_ubatch: int = DEFAULT_CHUNK
    """Tokens evaluated at a time, at most n_batch, not yet rounded up to whole pages."""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    threads: int = -1
    like_llama: bool = False
    """Score as llama-perplexity does, with plain caches."""
    no_tail: bool = False
    """Every key outside the exact prefix from blocks, and the f16 tail that `run` has as a second row."""
    balance: str | None = None
    """Balance of K. None: what the cache types ask for."""
    exact_first: int | None = None
    """First tokens whose K and V stay f16, 0 to 128. None: what the cache types ask for."""
    calibration: str = "auto"
    """A sidecar with K's channel scale; auto: look for one, off: take it from page 0 of each window."""
    report: str | None = None
    """A folder to write a page with plots into."""
    needle: bool = False
    """Ask for numbers hidden in the text instead of scoring it."""
    needle_lengths: str | None = None
    """Tokens of prompt and answer, a comma list. None: a quarter, a half and the whole of the context."""
    needle_depths: str = "0,25,50,75,100"
    """Where the number is, a comma list in per cent of the text."""
    seed: int = 1
    """Of the numbers."""
    json_output: bool = False
    verbose: bool = False
    debug: bool = False
    given: frozenset[str] = frozenset()
    """First long spellings of all flags that were given."""
    words: tuple[str, ...] = field(default=(), compare=False)
    """The command line after `tqgguf eval`, for a report that says how to repeat it."""
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, ranges_of("eval"))
        if self.n_ctx == 1:
            raise RequestError("-c: expected a window of 2 tokens or more, or 0 for the model's context, found 1")
        check_chunks(self.n_chunks)
        parse_pairs(self.cache_types)
        self._check_needle()

    def _check_needle(self) -> None:
        if not self.needle:
            for flag in _ONLY_WITH_NEEDLE:
                if flag in self.given:
                    raise RequestError(f"{flag}: has no meaning without --needle; add it, or leave this out")
            return
        for flag in _NOT_WITH_NEEDLE:
            if flag in self.given:
                raise RequestError(f"{flag}: has no meaning with --needle, which asks as run does; leave one out")
        if self.needle_lengths is not None:
            whole_numbers("--needle-lengths", self.needle_lengths, 1, INT32)
        whole_numbers("--needle-depths", self.needle_depths, 0, 100)

    def needle_lengths_of(self, n_ctx: int) -> list[int]:
        """The lengths to try in a context of n_ctx tokens. RequestError: one is longer."""
        if self.needle_lengths is None:
            return [n_ctx // 4, n_ctx // 2, n_ctx]
        lengths = whole_numbers("--needle-lengths", self.needle_lengths, 1, INT32)
        if max(lengths) > n_ctx:
            raise RequestError(f"--needle-lengths: expected at most -c, {n_ctx:,} tokens, found {max(lengths):,}")
        return lengths

    @property
    def depths(self) -> list[int]:
        """In per cent, in the order in which they were named."""
        return whole_numbers("--needle-depths", self.needle_depths, 0, 100)

    @property
    def pairs(self) -> tuple[CachePair, ...]:
        """The pairs to compare with f16, in the order in which they were named."""
        return parse_pairs(self.cache_types)
