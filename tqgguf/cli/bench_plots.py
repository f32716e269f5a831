"""The plots of a benchmark, as SVG: speed over depth, memory over context."""

from __future__ import annotations

from tqgguf.cli.plots import as_svg, few_ticks, from_zero, look_of, new_axes
from tqgguf.formats.bench_record import BenchRecord, Phase

_MEGABYTE = 10**6


def speed_over_depth(record: BenchRecord, phase: Phase, n_tokens: int) -> str:
    """A line for each cache, medians, with bars from the slowest to the fastest."""
    what = "prefill" if phase == "prefill" else "decode"
    figure, axes = new_axes("tokens in the cache before", f"{what} speed (tokens/s)")
    for i, mode in enumerate(record.modes):
        rows = [s for s in record.measured() if (s.mode, s.phase, s.n_tokens) == (mode, phase, n_tokens)]
        if not rows:
            continue
        low, high = ([abs(s.rate - s.spread[end]) for s in rows] for end in (0, 1))
        axes.errorbar(
            [s.depth for s in rows], [s.rate for s in rows], yerr=[low, high], capsize=2, linewidth=1, label=mode,
            **look_of(i),
        )  # fmt: skip
    from_zero(axes)
    few_ticks(axes)
    return as_svg(figure, axes, f"{what} speed over depth")


def memory_over_context(record: BenchRecord, what: str) -> str:
    """A line for each cache. what: `kv`, `device` or `rss`."""
    names = {"kv": "KV cache", "device": "peak device memory", "rss": "peak resident memory"}
    figure, axes = new_axes("context (tokens)", f"{names[what]} (MB)")
    for i, mode in enumerate(record.modes):
        rows = [m for m in record.memories if m.mode == mode and getattr(m, what) is not None]
        if rows:
            sizes = [getattr(m, what) / _MEGABYTE for m in rows]
            axes.plot([m.n_tokens for m in rows], sizes, linewidth=1, label=mode, **look_of(i))
    from_zero(axes)
    axes.set_xlim(left=0)
    few_ticks(axes)
    return as_svg(figure, axes, f"{names[what]} over context")
