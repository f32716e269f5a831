"""What `tqgguf doctor` is asked to do: the command line, parsed, checked and typed, before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqgguf.cli.flag_table import ranges_of
from tqgguf.cli.model_flags import DEFAULT_MEASURED
from tqgguf.cli.ranges import INT32, check_ranges
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError

LEAST_TOKENS = 2 * PAGE_TOKENS


@dataclass(frozen=True)
class DoctorRequest:
    """One call of `tqgguf doctor`. RequestError for a number out of its range."""

    model: str | None = None
    """A GGUF file, any shard of a split one, or an MLX model folder. None: the embedded default model."""
    text_file: str | None = None
    """None: the text that tqgguf brings."""
    n_ctx: int = 0
    """Tokens of the context that types are wanted for. 0: as many as the model was trained for."""
    n_measured: int = 0
    """Tokens that the layers are measured on, and of the window that the proposals are tried on. 0: those of the
    context, at most DEFAULT_MEASURED."""
    budget: float = 4.4
    """Bits per value of K and V together that a proposal may take at either number of tokens."""
    threads: int = -1
    report: str | None = None
    """A folder to write a page into."""
    json_output: bool = False
    verbose: bool = False
    debug: bool = False
    words: tuple[str, ...] = field(default=(), compare=False)
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, ranges_of("doctor"))
        for flag, n_tokens, otherwise in (
            ("-c", self.n_ctx, "all"),
            ("--measure", self.n_measured, f"those of -c, at most {DEFAULT_MEASURED}"),
        ):
            if n_tokens and not LEAST_TOKENS <= n_tokens <= INT32:
                raise RequestError(
                    f"{flag}: expected {LEAST_TOKENS} tokens or more, or 0 for {otherwise}, found {n_tokens}"
                )
        if not 1 <= self.budget <= 32:
            raise RequestError(f"--bpv: expected 1 to 32 bits per value, found {self.budget:g}")
