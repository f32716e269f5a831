"""Times on a GPU, of works side by side: of their kernels by CUPTI, and wall time of evaluations that take turns.

CUPTI is reached through torch's profiler; where torch or CUDA is missing, times of kernels are left out and all else
works. A work is built before the clock starts: what Python and the graph cost is not in its time, but for works that
already evaluate while they are built. It knows nothing of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

ROTATED_BYTES = 150_000_000  # of inputs that calls rotate over: more than twice an H200's L2 cache
MOST_SETS = 24
MOST_CHAIN_US = 50_000  # a chain is cut where it would take longer
LEAST_CHAIN = 4
NAME_LENGTH = 100  # of a kernel's name that is kept: templates' arguments take thousands
_OF_TORCH = "at::native"  # in the names of torch's kernels, of which one marks the end of an evaluation

Kernels = dict[str, tuple[float, int]]
"""Microseconds and launches on the GPU, by the kernel's name."""


@dataclass(frozen=True)
class Work:
    """make: builds what `n_calls` calls give. is_lazy: evaluates nothing of it."""

    make: Callable[[], Any]
    n_calls: int = 1
    is_lazy: bool = True


@dataclass(frozen=True)
class Timing:
    """Of one call. kernels_us: by name; n_kernels: launched. wall_us: the median of the rounds; best_us: the best."""

    kernels_us: dict[str, float]
    n_kernels: float
    wall_us: float
    best_us: float

    @property
    def gpu_us(self) -> float:
        return sum(self.kernels_us.values())


def chain(
    call: Callable[[mx.array, Any], mx.array], q: mx.array, inputs: list[Any], most: int, is_lazy: bool = True
) -> Work:
    """Calls in one evaluation, each fed with the answer before it; inputs rotate, so that no cache holds them."""

    def make(n: int) -> mx.array:
        out = q
        for i in range(n):
            out = call(out, inputs[i % len(inputs)])
        return out

    mx.eval(make(LEAST_CHAIN))  # compiles
    us = evaluated_us(Work(partial(make, LEAST_CHAIN), is_lazy=is_lazy)) / LEAST_CHAIN
    n = max(min(LEAST_CHAIN, most), min(most, int(MOST_CHAIN_US / us)))
    return Work(partial(make, n), n, is_lazy)


def n_sets(n_bytes: int) -> int:
    """How many inputs of that size a chain needs."""
    return max(2, min(MOST_SETS, ROTATED_BYTES // max(1, n_bytes) + 1))


def timed(works: dict[str, Work], rounds: int = 5) -> dict[str, Timing]:
    """Every work once a round, in turn, so that a disturbance hits all alike; then their kernels in one session."""
    for work in works.values():
        mx.eval(work.make())  # an idle GPU's first calls take up to twice their time
    walls: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            walls[name].append(evaluated_us(work) / work.n_calls)
    found = kernels_of([partial(evaluated_us, work) for work in works.values()])
    timings = {}
    for (name, work), kernels in zip(works.items(), found, strict=True):
        n = work.n_calls
        us = {kernel: total / n for kernel, (total, _) in kernels.items()}
        launched = sum(times for _, times in kernels.values()) / n
        timings[name] = Timing(us, launched, median(walls[name]), min(walls[name]))
    return timings


def evaluated_us(work: Work) -> float:
    """Microseconds of evaluating what a work builds."""
    made = work.make() if work.is_lazy else None
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(made if work.is_lazy else work.make())
    mx.synchronize()
    return (time.perf_counter() - start) * 1e6


def kernels_of(evaluations: Sequence[Callable[[], Any]]) -> list[Kernels]:
    """What each evaluation runs on the GPU. All are run, and without torch and CUDA nothing is known of them."""
    torch = _torch_with_cuda()
    found: list[Kernels] = [{} for _ in evaluations]
    if torch is None:
        for evaluate in evaluations:
            evaluate()
        return found
    mark = torch.zeros(1, device="cuda")
    mark.add_(1)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for evaluate in evaluations:
            evaluate()
            mx.synchronize()
            mark.add_(1)
            torch.cuda.synchronize()
    at = 0
    events = [event for event in profiled.events() if "CUDA" in str(event.device_type)]
    for event in sorted(events, key=lambda event: event.time_range.start):
        if _OF_TORCH in event.name:
            at += 1
        elif at < len(found):
            name = event.name[:NAME_LENGTH]
            us, times = found[at].get(name, (0.0, 0))
            found[at][name] = us + event.time_range.elapsed_us(), times + 1
    if at != len(found):
        raise RuntimeError(f"profiler: expected {len(found)} marks between evaluations, found {at}")
    return found


@lru_cache
def copy_bandwidth() -> float:
    """Bytes read and written a second by copies on the device: torch's, else MLX's negation of an array."""
    torch, n, n_bytes = _torch_with_cuda(), 10, 1 << 31
    if torch is None:
        array = mx.zeros((1 << 26,))
        mx.eval(array)
        return 2 * array.nbytes / timed({"copy": Work(partial(mx.negative, array))})["copy"].best_us * 1e6
    source, target = (torch.zeros(n_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for n_copies in (2, n):
        start.record()
        for _ in range(n_copies):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1e3
    del source, target
    torch.cuda.empty_cache()
    return 2 * n * n_bytes / seconds


@lru_cache
def _torch_with_cuda() -> Any:
    try:
        import torch
        import torch.profiler
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def print_head(*names: str) -> None:
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names), flush=True)


def print_row(*cells: Any) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
