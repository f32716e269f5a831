"""What `tqgguf plan` is asked to do: the command line, parsed, checked and typed, before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass

from tqgguf.cli.flag_table import ranges_of
from tqgguf.cli.ranges import INT32, check_ranges, whole_numbers
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.quantities import parse_bytes
from tqgguf.measuring.cache_pairs import CachePair, requested_pairs
from tqgguf.text.grid import DEFAULT_CHUNK, round_chunk


@dataclass(frozen=True)
class PlanRequest:
    """One call of `tqgguf plan`. RequestError: a number out of its range, an unknown cache type, no size."""

    model: str | None = None
    """A GGUF file, any shard of a split one, or an MLX model folder. None: the embedded default model."""
    contexts: str = "0"
    """Tokens, a comma list. 0: the model's context, and parts of it."""
    cache_types: str | None = None
    """Pairs of types, a comma list. None: those of -ctk and -ctv, or every type."""
    types_k: str | None = None
    types_v: str | None = None
    """Comma lists, each with each. One of the two alone: the other side is f16, as in `run`."""
    memory: str | None = None
    """None: this machine's."""
    device: str | None = None
    """cpu or gpu. None: where MLX would compute."""
    n_batch: int = 2048
    n_ubatch: int = DEFAULT_CHUNK
    balance: str | None = None
    exact_first: int | None = None
    json_output: bool = False
    debug: bool = False
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, ranges_of("plan"))
        _ = self.context_list, self.n_bytes, self.specs

    @property
    def context_list(self) -> tuple[int, ...] | None:
        """None: the model's own."""
        found = tuple(whole_numbers("-c", self.contexts, 0, INT32))
        if 0 in found and len(found) > 1:
            raise RequestError(f"-c {self.contexts}: 0 is the model's own contexts; give it alone, or numbers above 0")
        return None if found == (0,) else found

    @property
    def n_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes("--memory", self.memory)

    @property
    def chunk(self) -> int:
        """Tokens evaluated at a time."""
        return round_chunk(min(self.n_ubatch, self.n_batch))

    @property
    def specs(self) -> tuple[tuple[str, CacheSpec], ...] | None:
        """Label and types of each row that is asked for; None: all that there are."""
        pairs = requested_pairs(self.cache_types, self.types_k, self.types_v)
        if pairs is None:
            if self.balance is not None or self.exact_first is not None:
                raise RequestError("--kv-balance, --cache-exact-first: name the types that they are for (-ctk, -ctv)")
            return None
        for pair in pairs:
            if not pair.is_ours:
                raise RequestError(
                    f"--cache-types {pair.label}: expected types that run has; `tqgguf eval` knows others"
                )
        return tuple((pair.label, self._spec(pair)) for pair in pairs)

    def _spec(self, pair: CachePair) -> CacheSpec:
        spec = pair.spec(self.exact_first, self.balance)
        spec.check()
        return spec
