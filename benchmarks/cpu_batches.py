"""Decoding several sequences at once on a CPU: SmolLM2 with our caches beside mlx-lm's own f16 cache.

    python benchmarks/cpu_batches.py [--depths 140 1000] [--sequences 1 4] [--rounds 12] [K/V ...]

One run, interleaved: each round takes one step of every cache, in turn. Milliseconds are medians over the rounds, and
ratios the medians of the rounds' own ratios to mlx-lm's cache at the same depth and number of sequences.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from tqgguf.runtime.cache.make_prompt_cache import make_prompt_cache
from tqgguf.runtime.models.load import load_model

PAIRS = ["turbo4/turbo3", "q8_0/q8_0"]
PEER = "mlx-lm's KVCache"
TOKENS = 40000  # ids below this are text in the default model
WARM_UP = 2


def prepared(model: Any, make: Callable[[], list[Any]], depth: int, n_sequences: int) -> list[Any]:
    """A cache of each layer that holds so many sequences of about `depth` random tokens."""
    rng, caches = np.random.default_rng(1), []
    for _ in range(n_sequences):
        caches.append(make())
        mx.eval(model(mx.array(rng.integers(0, TOKENS, (1, depth + int(rng.integers(0, 9))))), cache=caches[-1]))
    return caches[0] if n_sequences == 1 else [type(of[0]).merge(list(of)) for of in zip(*caches, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=PAIRS)
    parser.add_argument("--depths", nargs="*", type=int, default=[140, 1000])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model = load_model(None).model
    makers: dict[str, Callable[[], list[Any]]] = {PEER: lambda: [KVCache() for _ in model.layers]}
    for pair in args.pairs:
        k, v = pair.split("/")
        makers[pair] = lambda k=k, v=v: make_prompt_cache(model, type_k=k, type_v=v)
    print(f"{'depth':>8}{'sequences':>11}  {'cache':<18}{'ms a step':>10}{'of the peer':>13}")
    for depth in args.depths:
        for n in args.sequences:
            caches = {name: prepared(model, make, depth, n) for name, make in makers.items()}
            times: dict[str, list[float]] = {name: [] for name in caches}
            for round_number in range(WARM_UP + args.rounds):
                tokens = mx.array(np.random.default_rng(round_number).integers(0, TOKENS, (n, 1)))
                for name, cache in caches.items():
                    start = time.perf_counter()
                    mx.eval(model(tokens, cache=cache))
                    if round_number >= WARM_UP:
                        times[name].append(time.perf_counter() - start)
            for name, own in times.items():
                ratio = median(a / b for a, b in zip(own, times[PEER], strict=True))
                print(f"{depth:>8}{n:>11}  {name:<18}{1000 * median(own):>10.1f}{ratio:>13.2f}")


if __name__ == "__main__":
    main()
