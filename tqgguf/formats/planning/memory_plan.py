"""What memory a model needs at which context, by cache type, and the longest context that fits: from headers alone.

KV bytes are `kv_size`'s, which are what `run` reports. Beside them and the weights stands an estimate of the rest, made
of measured constants. Nothing of the weights is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import CacheSpec, LayerTypes
from tqgguf.formats.blocks.kv_size import F32_BYTES, LayerShape, kv_bytes

PROGRAM_BYTES = 119_000_000
"""Python with MLX, mlx-lm and numpy, and what opening a model takes. Measured: 128 MB resident with SmolLM2's 49,152
tokens and 167 MB with Gemma 3's 262,144, before any weight is read (Linux, x86-64, Python 3.11, MLX 0.32.4 for CPUs).
"""

TOKENIZER_BYTES = 183
"""A token of the vocabulary adds so much; from the same measurement."""

FIXED_BYTES = 95_000_000
"""What evaluation takes at most whatever the model is: tiles of decoded weights, keys and values, threads, and what
malloc keeps of arrays that were outgrown. Measured on SmolLM2 and Gemma 3 270m, Linux: 19 MB at 1,024 tokens to 88 MB
at 4,600, by 35 MB more or less from run to run; less with MALLOC_MMAP_THRESHOLD_=131072.
"""

GROWTH_SHARE = 32
"""Planes of a cache have room for 1/32 more than they hold (runtime/kv/planes.py)."""

MOST_CONTEXT = 2**40
"""No search looks further."""


@dataclass(frozen=True)
class Workspace:
    """What a run holds beside weights and cache, an estimate in bytes.

    program: the process before weights. evaluation: activations of one chunk in float32 (gate, up and their product;
    eight arrays as wide as the model or its heads), the logits of one token twice, and FIXED_BYTES.
    """

    program: int
    evaluation: int

    @property
    def total(self) -> int:
        return self.program + self.evaluation


def estimate_workspace(chunk: int, hidden: int, feed_forward: int, attention: int, n_vocabulary: int) -> Workspace:
    """For chunks of so many tokens. attention: values of all heads of a token."""
    of_token = 3 * feed_forward + 8 * max(hidden, attention)
    return Workspace(
        PROGRAM_BYTES + TOKENIZER_BYTES * n_vocabulary,
        F32_BYTES * (chunk * of_token + 2 * n_vocabulary) + FIXED_BYTES,
    )


@dataclass(frozen=True)
class CachePlan:
    """K and V of one pair of types. sizes: bytes at each context of the plan. longest: tokens whose cache fits beside
    weights and workspace, at most the model's own context; 0: not even one page.
    """

    label: str
    type_k: str
    type_v: str
    sizes: tuple[int, ...]
    longest: int

    @property
    def growth(self) -> int:
        """Bytes from the shortest to the longest context of the plan."""
        return self.sizes[-1] - self.sizes[0]


def cache_plan(
    label: str, spec: CacheSpec, shapes: Sequence[LayerShape], contexts: Sequence[int], room: int, most: int
) -> CachePlan:
    """room: bytes that are left for the cache. most: tokens of the longest context that is wanted.

    RequestError: a type that some layer's heads cannot have.
    """
    layers, types = _merged(shapes, spec.resolve(len(shapes)))
    sizes = tuple(kv_bytes(layers, types, n) for n in contexts)
    return CachePlan(label, spec.type_k, spec.type_v, sizes, longest_context(layers, types, room, most))


def longest_context(shapes: Sequence[LayerShape], types: Sequence[LayerTypes], room: int, most: int) -> int:
    """The most tokens, up to `most`, that a cache can grow to within `room` bytes, its spare capacity included."""

    def fits(n: int) -> bool:
        held = peak_bytes(shapes, types, n)
        return held + held // GROWTH_SHARE <= room

    low, high = 0, min(most, MOST_CONTEXT) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def peak_bytes(shapes: Sequence[LayerShape], types: Sequence[LayerTypes], n_tokens: int) -> int:
    """The most that a cache holds on its way to n_tokens: an f16 tail is more than the page that it becomes."""
    return max(kv_bytes(shapes, types, n) for n in _peaks(shapes, n_tokens))


def _peaks(shapes: Sequence[LayerShape], n_tokens: int) -> Iterator[int]:
    """Lengths at which some layer is about to become smaller: before a page is full or leaves a window, the last of
    each kind before the end, and before the first page leaves, which takes the exact prefix along.
    """
    edges = {0, *(shape.window - 1 for shape in shapes if shape.window is not None)}
    ends = {n_tokens, *(edge + PAGE_TOKENS - 1 for edge in edges - {0} if edge + PAGE_TOKENS - 1 <= n_tokens)}
    for end in ends:
        yield end
        for edge in edges:
            yield max(end - (end - edge) % PAGE_TOKENS - 1, 0)


def _merged(
    shapes: Sequence[LayerShape], types: Sequence[LayerTypes]
) -> tuple[tuple[LayerShape, ...], tuple[LayerTypes, ...]]:
    """Layers of one kind as one with all their heads: bytes are proportional to heads."""
    heads: Counter[tuple[LayerShape, LayerTypes]] = Counter()
    for shape, kinds in zip(shapes, types, strict=True):
        heads[replace(shape, n_kv_heads=1), kinds] += shape.n_kv_heads
    return (
        tuple(replace(shape, n_kv_heads=n) for (shape, _), n in heads.items()),
        tuple(kinds for _, kinds in heads),
    )
