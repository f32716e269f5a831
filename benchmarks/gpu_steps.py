"""Decode steps of a model one after the other: their wall time, and what a page that fills costs on the GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from gpu_random_model import Step
from gpu_timing import Kernels, kernels_of

from tqgguf.runtime.backends import default_backend, kernels_launched
from tqgguf.runtime.kv.pages import PAGE

BEFORE, AFTER = 10, 5  # profiled steps around the one that fills a page
OF_TAILS = ("join_rows", "copy", "slice_update", "Memcpy DtoD")  # in the names of kernels that may append to a tail


def likeliest(step: Step, token: mx.array) -> mx.array:
    return mx.argmax(step(token), axis=-1, keepdims=True)


def take_steps(step: Step, token: mx.array, n: int) -> tuple[mx.array, list[float]]:
    """The token after n more, each started before the one before it has ended; milliseconds of each step."""
    ms = []
    mx.eval(token)
    mx.synchronize()
    last = time.perf_counter()
    for i in range(n):
        following = likeliest(step, token)
        mx.async_eval(following)
        if i:
            mx.eval(token)
            now = time.perf_counter()
            ms.append((now - last) * 1e3)
            last = now
        token = following
    mx.eval(token)
    mx.synchronize()
    ms.append((time.perf_counter() - last) * 1e3)
    return token, ms


@dataclass(frozen=True)
class FillCost:
    """On the GPU, of all layers. step: one that fills no page. tail: of those, kernels that may append to tails (an
    upper bound: other copies of a step count too). fill: launches that only a page's fill brings, wherever they run.
    n_launched: our kernels by the launcher's count, for a step and for the one that fills; a compiled step has none.
    kernels_us: of a step; fill_kernels: of a fill, microseconds and launches."""

    step_us: float
    n_kernels: int
    tail_us: float
    n_of_tail: int
    fill_us: float
    n_of_fill: int
    n_launched: list[int]
    kernels_us: dict[str, float]
    fill_kernels: Kernels


def measure_fill(step: Step, token: mx.array, cache: Any) -> FillCost:
    """Steps up to shortly before the cache's page is full, and those around that by themselves."""
    n_before = (PAGE - cache.offset % PAGE - BEFORE) % PAGE
    token, _ = take_steps(step, token, n_before) if n_before else (token, [])
    tokens, launched, backend = [token], [], default_backend()

    def evaluate() -> None:
        before = kernels_launched(backend)
        tokens.append(likeliest(step, tokens[-1]))
        mx.eval(tokens[-1])
        launched.append(kernels_launched(backend) - before)

    steps = kernels_of([evaluate] * (BEFORE + AFTER))
    names = {name for kernels in steps for name in kernels}
    usual = {name: _usual([kernels.get(name, (0.0, 0)) for kernels in steps]) for name in names}
    fill = {name: _beyond([kernels.get(name, (0.0, 0)) for kernels in steps], *usual[name]) for name in names}
    fill = {name: cost for name, cost in fill.items() if cost[1]}
    tails = [cost for name, cost in usual.items() if any(part in name for part in OF_TAILS)]
    return FillCost(
        *(sum(us for us, _ in usual.values()), sum(n for _, n in usual.values())),
        *(sum(us for us, _ in tails), sum(n for _, n in tails)),
        *(sum(us for us, _ in fill.values()), sum(n for _, n in fill.values())),
        [int(median(launched)), max(launched)],
        {name: us for name, (us, n) in usual.items() if n},
        fill,
    )


def _usual(of_steps: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Microseconds and launches of a kernel in most steps."""
    times = int(median(n for _, n in of_steps))
    return median(us for us, n in of_steps if n == times) if times else 0.0, times


def _beyond(of_steps: Sequence[tuple[float, int]], usual_us: float, usual_n: int) -> tuple[float, int]:
    """What steps have beyond the usual one."""
    more = [(us - usual_us, n - usual_n) for us, n in of_steps if n > usual_n]
    return sum(us for us, _ in more), sum(n for _, n in more)
