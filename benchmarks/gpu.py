"""Attention from blocks on a GPU beside MLX's and mlx-lm's, in one run: tables on stdout, every figure as JSON.

    python benchmarks/gpu.py [decode encode prefill model] [--quick] [--out results.json]

Every part has a module of its own (gpu_decode.py and so on) that says what it measures; gpu_timing.py says how. All
ratios are of one process, whose works take turns. `--quick` is a first look of less than a minute, `--smoke` runs
everything at tiny sizes, on any machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import gpu_decode
import gpu_model
import gpu_pages
import gpu_prefill
import mlx.core as mx
from gpu_timing import copy_bandwidth

from tqgguf.runtime.backends import describe

TASKS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "decode": gpu_decode.measure,
    "encode": gpu_pages.measure,
    "prefill": gpu_prefill.measure,
    "model": gpu_model.measure,
}
QUICK = {
    **{"keys": [8192, 32768, 131072], "rows": [1], "batches": [1], "pairs": ["turbo4/turbo3"], "shapes": 1},
    **{"new_rows": [2048], "tasks": ["decode", "prefill", "model"], **gpu_model.QUICK},
}
SMOKE = {
    **{"keys": [256], "pairs": ["turbo4/turbo3"], "batches": [1, 2], "shapes": 1, "chain": 2},
    **{"encoded": [128], "new_rows": [64], "cached": [256], **gpu_model.SMOKE},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="attention from blocks on a GPU beside MLX's and mlx-lm's")
    parser.add_argument("tasks", nargs="*", metavar="what", help=", ".join(TASKS))
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    for part in (gpu_decode, gpu_pages, gpu_prefill, gpu_model):
        part.add_flags(parser)
    presets, _ = parser.parse_known_args()
    parser.set_defaults(**(QUICK if presets.quick else SMOKE if presets.smoke else {}))
    args = parser.parse_args()
    mx.random.seed(0)
    print(describe(), flush=True)
    found: dict[str, Any] = {"device": describe(), "mlx": mx.__version__, "copy_bytes_a_second": copy_bandwidth()}
    for task in args.tasks or TASKS:
        start = time.perf_counter()
        found[task] = TASKS[task](args)
        print(f"\n{task}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.out:  # after every part: what is there stays, whatever comes
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
