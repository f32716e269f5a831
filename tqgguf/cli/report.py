"""The closing report of a run: figures as lines for people and as one JSON object for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tqgguf.cli.figures import size
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.runtime.generation.session import CacheReport, Timing

ENDINGS = {
    "eog": "ended by the model",
    "stop": "ended at a stop string",
    "length": "ended by -n",
    "context": "ended because the context is full",
    "interrupt": "interrupted",
    "kept": "kept in the prompt cache",
}


def lines(cache: CacheReport, timing: Timing, finish: str, seed: int, greedy: bool) -> list[str]:
    """The report for stderr."""
    prefix = f", first {cache.n_prefix} tokens exact" if cache.n_prefix else ""
    report = [
        f"{_prompt(timing)}{_answer(timing)}; {ENDINGS[finish]}",
        f"KV cache: K {cache.type_k}{_balance(cache)}, V {cache.type_v}{prefix}; "
        f"{cache.n_tokens:,} tokens in {size(cache.kv_bytes)}{_as_f16(cache)}",
    ]
    types = CacheSpec(cache.type_k, cache.type_v)
    if not types.has_float_k:
        report.append(_reads("keys", cache.type_k, cache))
    same = cache.prompt_reads.values_from_blocks == cache.prompt_reads.keys_from_blocks
    if not types.has_float_v and (types.has_float_k or not same):
        report.append(_reads("values", cache.type_v, cache))
    if cache.n_other_layers:
        report.append(f"{cache.n_other_layers} layers keep a cache of another kind, in full precision")
    if cache.not_compiled:
        report.append(f"decode steps were built one by one, which takes the host longer: {cache.not_compiled}")
    if not greedy:
        report.append(f"seed: {seed}")
    return report


def _as_f16(cache: CacheReport) -> str:
    if cache.kv_bytes == cache.f16_bytes:
        return ""
    return f", as f16 {size(cache.f16_bytes)} ({cache.f16_bytes / max(cache.kv_bytes, 1):.2f}x)"


def turn_line(timing: Timing, n_tokens: int, n_ctx: int) -> str:
    """The speed of one answer of a chat, and how full the context is. timing: of this turn."""
    return f"{_prompt(timing)}{_answer(timing)}; context: {n_tokens:,} of {n_ctx:,} tokens"


def as_json(cache: CacheReport, timing: Timing, finish: str, seed: int) -> dict[str, Any]:
    """The same figures by name; what does not apply is left out. Bytes and counts are whole numbers, times seconds."""
    held = {name: value for name, value in asdict(cache).items() if value is not None}
    return {"finish": finish, "seed": seed, "timing": asdict(timing), "kv_cache": held}


def _prompt(timing: Timing) -> str:
    rate = _rate(timing.prompt_tokens, timing.prompt_seconds)
    return f"prompt: {_tokens(timing.prompt_tokens)}{rate}{_reused(timing)}"


def _answer(timing: Timing) -> str:
    """The first token of an answer comes with its prompt, so that the speed is that of the others."""
    if not timing.answer_tokens:
        return ""
    return f"; answer: {_tokens(timing.answer_tokens)}{_rate(timing.decoded_tokens, timing.decode_seconds)}"


def _tokens(n: int) -> str:
    return f"{n:,} token{'' if n == 1 else 's'}"


def _reused(timing: Timing) -> str:
    """What of the prompt a prompt cache spared."""
    if not timing.reused_tokens:
        return ""
    text = f", {timing.reused_tokens:,} more from the prompt cache"
    if timing.reused_generated:
        text += f" ({timing.reused_generated:,} of them generated or from another program)"
    return text


def _balance(cache: CacheReport) -> str:
    """What was taken out of K, and where its channel scale is from."""
    if cache.balance == "off":
        return ""
    if cache.balance == "page":
        return " minus page means"
    return f" balanced (scale from {'calibration' if cache.is_calibrated else 'page 0'})"


def _reads(what: str, cache_type: str, cache: CacheReport) -> str:
    """How many keys (or values) were read from blocks, for the prompt and for the answer, of how many."""
    shares = []
    for phase, reads in (("prompt", cache.prompt_reads), ("answer", cache.answer_reads)):
        blocks, floats = (getattr(reads, f"{what}_{how}") for how in ("from_blocks", "in_float"))
        if blocks + floats:
            shares.append(f"{phase} {blocks / (blocks + floats):.1%} ({blocks:,} of {blocks + floats:,})")
    rest = cache_type if cache_type in ("f32", "bf16") else "f16"
    fallback = f"{cache.by_fallback:,} by fallback" if cache.by_fallback else "none by fallback"
    return f"{what} read from blocks: {', '.join(shares) or 'none'}; the rest in {rest}, {fallback}"


def _rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""
