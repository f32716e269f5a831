"""What `tqgguf selftest` does: choose the device, compare, measure if asked, print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from tqgguf.cli.figures import aligned
from tqgguf.cli.json_text import json_text
from tqgguf.cli.progress import ProgressLine
from tqgguf.formats.errors import RequestError
from tqgguf.runtime import selftest_speed
from tqgguf.runtime.attention.kernel_backend import KernelBackend
from tqgguf.runtime.backends import choose_device, default_backend, describe, gpu_family, kernels_launched
from tqgguf.runtime.selftest import (
    HEAD_DIMS,
    QUICK_HEAD_DIMS,
    QUICK_TYPES,
    Case,
    Outcome,
    all_cases,
    takes_parts,
)
from tqgguf.runtime.selftest_matrices import matrix_cases
from tqgguf.runtime.selftest_speed import Speed

DEVICES = ("auto", "gpu", "cpu")
_SHOWN_FAILURES = 20


def selftest(
    device: str, head_dims: tuple[int, ...], all_pairs: bool, quick: bool, bench: bool, json_output: bool
) -> int:
    """Run the tests, print each operation and types when they are through, and return the exit status. RequestError: a
    device or a head size that cannot be, or both all pairs and a part."""
    if device not in DEVICES:
        raise RequestError(f"--device: expected {', '.join(DEVICES)}, found {device!r}")
    if any(n < 1 for n in head_dims):
        raise RequestError(f"--head-dim: expected numbers of at least 1, found {min(head_dims)}")
    if all_pairs and quick:
        raise RequestError("--all and --quick: leave one out")
    on_gpu = device != "cpu" and gpu_family() is not None
    choose_device(on_gpu)
    backend = default_backend()
    cases = all_cases(backend, head_dims or (QUICK_HEAD_DIMS if quick else HEAD_DIMS), all_pairs)
    if isinstance(backend, KernelBackend):
        cases += matrix_cases(backend.launcher)
    if quick:
        cases = [case for case in cases if case.types in QUICK_TYPES]
    if not json_output:
        print(f"{describe()}; MLX {version('mlx')}\n", flush=True)
    outcomes = _compare(cases, prints=not json_output)
    pairs = selftest_speed.PAIRS if bench else selftest_speed.PAIRS[:1]
    speeds = list(selftest_speed.measure(backend, pairs=pairs)) if on_gpu and (bench or not quick) else []
    launched = kernels_launched(backend)
    missing = device == "gpu" and not launched
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if json_output:
        print(json_text(_as_json(outcomes, speeds, launched, takes_parts(backend))), flush=True)
    else:
        print("\n".join(_lines(outcomes, failed, speeds, launched, takes_parts(backend))))
        if bench and not on_gpu:
            print("Speed is measured on a GPU only.")
        if missing:
            print("FAILED: nothing ran on a GPU, and one was asked for: MLX finds none on this machine.")
    return 1 if failed or missing or not outcomes else 0


def _compare(cases: Sequence[Case], prints: bool) -> list[Outcome]:
    """The outcomes of all cases, those of an operation and types together: they share kernels. Each group's row is
    printed when it is there, so that a run that ends early has shown something."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.operation, case.types), []).append(case)
    widest = [(*names, str(len(group)), *_WIDEST) for names, group in groups.items()]
    line, outcomes = ProgressLine("comparing", "cases"), list[Outcome]()
    if prints:
        print(aligned([_HEAD], 2, widest)[0], flush=True)
    for group in groups.values():
        found: list[Outcome] = []
        for case in group:
            line.update(len(outcomes) + len(found), len(cases))
            found.append(case.run())
        outcomes += found
        if prints:
            line.end()
            print(aligned([_row(found)], 2, [_HEAD, *widest])[0], flush=True)
    line.end()
    return outcomes


_HEAD = "operation", "types", "cases", "failed", "worst error", "limit"
_WIDEST = "", "0.0e-00", "0e-00"


def _row(group: Sequence[Outcome]) -> tuple[str, ...]:
    """Of an operation and types: how many cases, how many failed, the worst error."""
    return (
        group[0].operation,
        group[0].types,
        str(len(group)),
        str(sum(not outcome.passed for outcome in group)),
        f"{max(_size(outcome.error) for outcome in group):.1e}",
        f"{max(outcome.limit for outcome in group):.0e}",
    )


def _lines(
    outcomes: Sequence[Outcome], failed: Sequence[Outcome], speeds: Sequence[Speed], launched: int, in_parts: bool
) -> list[str]:
    """What follows the table."""
    lines = [""]
    for outcome in failed[:_SHOWN_FAILURES]:
        found = outcome.problem or f"error {outcome.error:.2e}, limit {outcome.limit:.0e}"
        what = f"{outcome.operation} {outcome.types}, {outcome.head_dim} values, {outcome.detail}"
        lines.append(f"FAILED: {what}: {found}")
    if len(failed) > _SHOWN_FAILURES:
        lines.append(f"... and {len(failed) - _SHOWN_FAILURES} more")
    if speeds:
        rows = [
            (s.types, str(s.n_keys), f"{s.blocks_us:.0f}", f"{s.f16_us:.0f}", f"{s.f16_us / s.blocks_us:.2f}")
            for s in speeds
        ]
        lines += aligned([("attention", "keys", "us", "us from f16", "times as fast"), *rows])
        lines.append("")
    if launched:
        lines.append(f"long steps: {'keys in parts' if in_parts else 'by masks, which takes up to twice the time'}")
    kernels = f", {launched} kernels launched" if launched else ""
    verdict = "all right" if not failed else f"{len(failed)} FAILED"
    lines.append(f"{len(outcomes)} cases{kernels}: {verdict}")
    return lines


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _as_json(outcomes: Sequence[Outcome], speeds: Sequence[Speed], launched: int, in_parts: bool) -> dict[str, Any]:
    return {
        "device": describe(),
        "mlx": version("mlx"),
        "kernels_launched": launched,
        "long_steps_in_parts": in_parts,
        "failed": sum(not outcome.passed for outcome in outcomes),
        "cases": [
            {
                **asdict(outcome),
                "error": outcome.error if math.isfinite(outcome.error) else None,
                "passed": outcome.passed,
            }
            for outcome in outcomes
        ],
        "speeds": [asdict(speed) for speed in speeds],
    }
