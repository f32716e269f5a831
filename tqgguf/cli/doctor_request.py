"""What `tqgguf doctor` is asked to do: the command line, parsed, checked and typed, before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqgguf.cli.llama_flags import FLAGS, Fate, Flag, row
from tqgguf.cli.ranges import INT32
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError

LEAST_TOKENS = 2 * PAGE_TOKENS

_SHARED = {"--help", "--version", "--model", "--file", "--ctx-size", "--threads", "--json", "--verbose", "--debug"}
DEFAULT_MEASURED = 1024
_PROPOSED = "doctor proposes types: give it a budget with --bpv"

DOCTOR_FLAGS: tuple[Flag, ...] = (
    *(flag for flag in FLAGS if flag.fate is not Fate.IMPLEMENTED or flag.name in _SHARED),
    row(Fate.IMPLEMENTED, "", "--bpv", "number", ours=True),
    row(Fate.IMPLEMENTED, "", "--measure", "tokens", ours=True),
    row(Fate.IMPLEMENTED, "", "--report", "file", ours=True),
    row(Fate.REFUSED, _PROPOSED, "-ctk --cache-type-k", "text"),
    row(Fate.REFUSED, _PROPOSED, "-ctv --cache-type-v", "text"),
)


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
