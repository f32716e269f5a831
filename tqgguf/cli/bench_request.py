"""What `tqgguf bench` is asked to do: the command line, parsed, checked and typed, before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqgguf.cli.flag_table import ranges_of
from tqgguf.cli.model_flags import MOST_TOKENS
from tqgguf.cli.ranges import check_ranges, whole_numbers
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.cache_pairs import DEFAULT_PAIRS, CachePair, parse_pairs, requested_pairs
from tqgguf.text.grid import DEFAULT_CHUNK


@dataclass(frozen=True)
class BenchRequest:
    """One call of `tqgguf bench`. RequestError: a number out of its range, an unknown cache type, flags that exclude
    one another.
    """

    model: str | None = None
    """A GGUF file, any shard of a split one, or an MLX model folder. None: the embedded default model."""
    text_file: str | None = None
    """What the prompts to be matched are cut from. None: the text that tqgguf brings."""
    prompts: str = "512"
    answers: str = "64"
    depths: str = "0"
    """Comma lists of tokens; 0 in the first two: none."""
    repetitions: int = 3
    cache_types: str | None = None
    types_k: str | None = None
    types_v: str | None = None
    n_match: int = 64
    """Tokens of each answer that is compared with f16's. 0: no answers."""
    n_match_prompts: int = 2
    no_memory: bool = False
    n_batch: int = 2048
    n_ubatch: int = DEFAULT_CHUNK
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    threads: int = -1
    balance: str | None = None
    exact_first: int | None = None
    calibration: str = "auto"
    seed: int = 1
    output: str = "table"
    report: str | None = None
    compare: tuple[str, str] | None = None
    json_output: bool = False
    verbose: bool = False
    debug: bool = False
    given: frozenset[str] = frozenset()
    words: tuple[str, ...] = field(default=(), compare=False)
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, ranges_of("bench"))
        if self.compare is not None:
            others = sorted(self.given - {"--compare", "--json", "--output", "--verbose", "--debug"})
            if others:
                raise RequestError(f"--compare reads what was measured: {others[0]} has no meaning with it")
            return
        if self.json_output and self.output not in ("json", "table"):
            raise RequestError(f"--json and -o {self.output}: leave one out")
        _ = self.pairs, self.prompt_list, self.answer_list, self.depth_list
        if not (self.prompt_list or self.answer_list) and not self.n_match:
            raise RequestError("-p 0 -n 0 --match 0: nothing is left to measure")

    @property
    def form(self) -> str:
        """One of OUTPUT_FORMS."""
        return "json" if self.json_output else self.output

    @property
    def prompt_list(self) -> list[int]:
        return [n for n in whole_numbers("-p", self.prompts, 0, MOST_TOKENS) if n]

    @property
    def answer_list(self) -> list[int]:
        return [n for n in whole_numbers("-n", self.answers, 0, MOST_TOKENS) if n]

    @property
    def depth_list(self) -> list[int]:
        """In whole pages, rounded up, the shortest first."""
        return sorted({_in_pages(n) for n in whole_numbers("-d", self.depths, 0, MOST_TOKENS)})

    @property
    def depth_notices(self) -> list[str]:
        """Of depths that were rounded."""
        rounded = [n for n in whole_numbers("-d", self.depths, 0, MOST_TOKENS) if n != _in_pages(n)]
        return [f"-d {n}: depths are whole pages of {PAGE_TOKENS}, so {_in_pages(n)} is used" for n in rounded]

    @property
    def names_types(self) -> bool:
        return bool(self.cache_types or self.types_k or self.types_v)

    @property
    def pairs(self) -> tuple[CachePair, ...]:
        """What is compared with f16."""
        return requested_pairs(self.cache_types, self.types_k, self.types_v) or parse_pairs(DEFAULT_PAIRS)


def _in_pages(n: int) -> int:
    return -(-n // PAGE_TOKENS) * PAGE_TOKENS
