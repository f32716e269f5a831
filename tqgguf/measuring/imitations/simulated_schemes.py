"""What other engines keep in a KV cache, as descriptions: quantisers, which keys a query still reads in f16, bits.

For comparison in `tqgguf eval` only. A scheme is imitated on the float path (`simulated_cache`), so that its damage is
its own while its bytes and speed are not; bits are charged as the engine would store them. Needs neither numpy nor MLX:
the command line lists these names. The arithmetic is `fake_quantise`'s.

`SCHEMES` holds engines with codecs of their own. `variant` makes the others: our block types, otherwise used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from tqgguf.formats.blocks.block_types import BLOCK_TYPES, PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import default_prefix

_WHOLE_HEAD = 1 << 30

MEAN_TOKENS = 256
"""Tokens at the start that a constant mean of K is measured on."""


@dataclass(frozen=True)
class Blocks:
    """Our blocks of a cache type."""

    cache_type: str


@dataclass(frozen=True)
class MinMax:
    """Evenly spaced values from a group's minimum to its maximum, both kept in f16 (as minimum and step).

    A group is `group` neighbouring channels of a token, at most the head; or with `of_tokens` as many tokens of one
    channel, from an absolute multiple on.
    """

    bits: int
    group: int
    of_tokens: bool = False


@dataclass(frozen=True)
class IntegerZero:
    """Steps of a group's range / (2**bits - 1) around a zero point that is a whole number of steps; both f16.

    With 8 bits codes are signed, -127 to 127, and there are 254 steps.
    """

    bits: int
    group: int


@dataclass(frozen=True)
class Gaussian:
    """The head is rotated by a Hadamard matrix (with random signs before it if `signed`), then every value becomes the
    nearest of the Lloyd-Max values of N(0, 1) times its group's root mean square, one f16 a group.

    renormalised: what is decoded gets the group's own norm.
    """

    bits: int
    group: int | None = None
    signed: bool = False
    renormalised: bool = False


@dataclass(frozen=True)
class SignSketch:
    """bits - 1 bits of Lloyd-Max codes of the vector, rotated by a random matrix, under its f16 norm; what is left is
    kept as the signs of its products with as many random vectors, and its f16 norm (QJL): unbiased scores.
    """

    bits: int


Quantiser = Blocks | MinMax | IntegerZero | Gaussian | SignSketch


@dataclass(frozen=True)
class ExactKeys:
    """Which keys (or values) a query reads in f16: any that one of these says.

    first: of the first positions. recent: the last ones up to the query's own. page: of the query's own page of so many
    positions. prompt: any, by queries at the positions below.
    """

    first: int = 0
    recent: int = 0
    page: int = 0
    prompt: int = 0

    def mask(self, queries: Any, keys: Any) -> Any:
        """Booleans for positions `queries` and `keys`, integer arrays of numpy or MLX that broadcast."""
        found = (keys < self.first) | (queries < self.prompt) | (queries - keys < self.recent)
        return found | (queries // self.page == keys // self.page) if self.page else found

    def n_charged(self, n_tokens: int) -> int:
        """Tokens of a cache of `n_tokens` that are in f16 for good. A page that fills is not: it will be codes."""
        return min(n_tokens, self.first + self.recent)


@dataclass(frozen=True)
class SideScheme:
    """How K or V is kept. mean_tokens: a mean of the first so many tokens is taken off every row and kept in f16."""

    quantiser: Quantiser
    exact: ExactKeys = ExactKeys()
    mean_tokens: int = 0


@dataclass(frozen=True)
class Scheme:
    """A cache. exact_layers: so many layers at each end stay f16. note: where it comes from, for the table's reader."""

    k: SideScheme
    v: SideScheme
    note: str
    exact_layers: int = 0

    @property
    def has_tail(self) -> bool:
        """Whether tokens near the query are in f16."""
        return any(side.exact.recent or side.exact.page for side in (self.k, self.v))

    def without_tail(self) -> Scheme:
        """The same, but every key is read as it decodes; what stays is exact by position."""
        k, v = (replace(side, exact=replace(side.exact, recent=0, page=0)) for side in (self.k, self.v))
        return replace(self, k=k, v=v)

    def is_exact(self, layer: int, n_layers: int) -> bool:
        """Whether a layer stays f16."""
        return min(layer, n_layers - 1 - layer) < self.exact_layers


def _kivi(bits: int, group: int) -> Scheme:
    """KIVI's decoding, from models/llama_kivi.py of jy-yuan/KIVI; groups of 32 and a residual of 128 are the paper's.

    K's residual is coded as soon as it has 128 tokens, and until then not charged, as our tail is not; V's tokens one
    by one, once 128 are behind the query's own: those 129 are charged as f16. 32 bits for each group.
    """
    return Scheme(
        SideScheme(MinMax(bits, group, of_tokens=True), ExactKeys(page=128)),
        SideScheme(MinMax(bits, group), ExactKeys(recent=129)),
        f"KIVI: K by channel in groups of {group} tokens, V by token in groups of {group}, residual of 128 tokens",
    )


def _sign_sketch(bits_k: int, bits_v: int) -> Scheme:
    """turboquant-bench's cache: TurboQuantProd(bits_k) for K, groups of 32 for V, buffer_size 128, its defaults.

    Charged: the buffer as f16; 32 bits of norms for each key; 32 bits for each group of values. Its codebooks are
    computed for spheres, ours here for normal distributions, which differ by less than a per cent from 64 channels on.
    """
    exact = ExactKeys(recent=128)
    return Scheme(
        SideScheme(SignSketch(bits_k), exact),
        SideScheme(MinMax(bits_v, 32), exact),
        f"turboquant-bench: K {bits_k - 1} bits and 1 bit of QJL, V {bits_v} bits, the last 128 tokens f16 (charged)",
    )


def _vllm(bits: int) -> Scheme:
    """vLLM's presets, from TQ_PRESETS and get_boundary_skip_layers of its turboquant/config.py; "nc" corrects norms.

    Charged: 16 bits of norm for each key, 32 bits of scale and zero for each value vector, two layers at each end as
    f16. Every key is read as it was stored, as vLLM's decoding does.
    """
    return Scheme(
        SideScheme(Gaussian(bits, renormalised=True)),
        SideScheme(MinMax(bits, _WHOLE_HEAD)),
        f"vLLM's turboquant_{bits}bit_nc: two layers at each end f16 (charged)",
        exact_layers=2,
    )


def _vllm_metal(bits_k: int, bits_v: int) -> Scheme:
    """vllm-metal's cache, from metal_kernel_backend/turboquant.py: `quantize`, `lm_quant`, BLOCK_SIZE 32.

    Charged: 32 bits of scale and zero point for 32 values of K, 16 bits for 32 of V. Every key is read as stored.
    """
    return Scheme(
        SideScheme(IntegerZero(bits_k, 32)),
        SideScheme(Gaussian(bits_v, 32, signed=True)),
        f"vllm-metal's turboquant, K q{bits_k}_0, V q{bits_v}_0",
    )


SCHEMES: dict[str, Scheme] = {
    "kivi4": _kivi(4, 32),
    "kivi2": _kivi(2, 32),
    "kivi4-g128": _kivi(4, 128),
    "qjl3": _sign_sketch(3, 2),
    "qjl4": _sign_sketch(4, 4),
    "vllm-4bit-nc": _vllm(4),
    "vllm-3bit-nc": _vllm(3),
    "vllm-metal": _vllm_metal(8, 3),
    "vllm-metal-q4": _vllm_metal(4, 3),
}

MEAN, RECENT, AFTER_PREFILL = "mean1", "recent", "after-prefill"
VARIANTS = (MEAN, f"{RECENT}N", AFTER_PREFILL)
"""Other uses of our types, as they are written after an @; N is a number of tokens."""

_RECENT = re.compile(rf"{RECENT}([1-9]\d{{0,5}})")


def is_variant(form: str) -> bool:
    """Whether `variant` knows a form."""
    return form in (MEAN, AFTER_PREFILL) or _RECENT.fullmatch(form) is not None


def has_tail(name: str, form: str) -> bool:
    """Whether such a cache has f16 tokens near the query that can be left away; recentN is nothing without them."""
    return SCHEMES[name].has_tail if name in SCHEMES else form in (MEAN, AFTER_PREFILL)


def variant(type_k: str, type_v: str, form: str, n_ctx: int, n_prefix: int | None = None, tail: bool = True) -> Scheme:
    """Our types in another form, for windows of `n_ctx` tokens.

    mean1: one constant mean of K, of the first step's tokens (at most MEAN_TOKENS), instead of page means and channel
    scale; exact prefix and f16 tail as ours (without the tail, queries read their own page as blocks). recentN: plain
    blocks, but for the last N tokens, which stay f16 and are charged. after-prefill: plain blocks, quantised when the
    prompt has been evaluated; the prompt is the first half of a window, so that only the second half is touched.
    """
    recent = _RECENT.fullmatch(form)
    if form == MEAN:
        first = default_prefix((type_k, type_v)) if n_prefix is None else n_prefix
        exact = ExactKeys(first, page=PAGE_TOKENS, prompt=MEAN_TOKENS) if tail else ExactKeys(first)
        note = f"one mean of K, of the first {MEAN_TOKENS} tokens"
    elif recent is not None:
        exact = ExactKeys(recent=int(recent[1]))
        note = f"plain blocks but for the last {recent[1]} tokens, which are f16 (charged)"
    else:
        assert form == AFTER_PREFILL, form
        exact = ExactKeys(page=PAGE_TOKENS if tail else 0, prompt=n_ctx // 2)
        note = f"plain blocks from position {n_ctx // 2} on; queries before it read f16, and their KLD of 0 counts"
    mean_tokens = MEAN_TOKENS if form == MEAN and BLOCK_TYPES[type_k].family != "float" else 0
    return Scheme(SideScheme(Blocks(type_k), exact, mean_tokens), SideScheme(Blocks(type_v), exact), note)
