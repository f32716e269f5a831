"""The closing report of a run: figures as lines for people and as one JSON object for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tqgguf.cli.figures import size
from tqgguf.runtime.generation.session import CacheReport, Timing

ENDINGS = {
    "eog": "ended by the model",
    "stop": "ended at a stop string",
    "length": "ended by -n",
    "context": "ended because the context is full (raise -c)",
    "interrupt": "interrupted",
    "kept": "kept in the prompt cache",
}


def lines(cache: CacheReport, timing: Timing, finish: str, seed: int, greedy: bool) -> list[str]:
    """The report for stderr."""
    prompt = f"prompt: {timing.prompt_tokens:,} tokens, {_rate(timing.prompt_tokens, timing.prompt_seconds)}"
    prompt += _reused(timing)
    answer = f"answer: {timing.decoded_tokens:,} decoded, {_rate(timing.decoded_tokens, timing.decode_seconds)}"
    prefix = f", first {cache.n_prefix} tokens exact" if cache.n_prefix else ""
    report = [
        f"{prompt}; {answer}; {ENDINGS[finish]}",
        f"KV cache: K {cache.type_k}{_balance(cache)}, V {cache.type_v}{prefix}; "
        f"{cache.n_tokens:,} tokens in {size(cache.kv_bytes)}, as f16 {size(cache.f16_bytes)} "
        f"({cache.f16_bytes / max(cache.kv_bytes, 1):.2f}x)",
        _reads("keys", cache.type_k, cache),
    ]
    if cache.prompt_reads.values_from_blocks != cache.prompt_reads.keys_from_blocks:
        report.append(_reads("values", cache.type_v, cache))
    if cache.n_other_layers:
        report.append(f"{cache.n_other_layers} layers keep a cache of another kind, in full precision")
    if cache.not_compiled:
        report.append(f"decode steps were built one by one, which takes the host longer: {cache.not_compiled}")
    if not greedy:
        report.append(f"seed: {seed}")
    return report


def as_json(cache: CacheReport, timing: Timing, finish: str, seed: int) -> dict[str, Any]:
    """The same figures by name. Bytes and counts are whole numbers, times seconds."""
    return {"finish": finish, "seed": seed, "timing": asdict(timing), "kv_cache": asdict(cache)}


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
    return f"{tokens / seconds:.1f} tokens/s" if tokens and seconds else "-"
