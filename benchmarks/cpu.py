"""The CPU backend end to end: attention beside dense numpy, then SmolLM2's prefill and decode by cache type and depth.

    python benchmarks/cpu.py [--depths 0 2048 8000] [--rounds 5] [--skip-attention] [K/V ...]

One run, interleaved: every round measures each cache once, in turn, and ratios are medians of the rounds' own ratios
to our f16 cache at the same depth. Where llama-cpp-python is installed, llama.cpp stands beside them with f16, q8_0 and
q4_0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import cpu_attention
import mlx.core as mx

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.cores import cores
from tqgguf.runtime import backends
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import LoadedModel, embedded_model, load_model

PAIRS = ["f16/f16", "turbo4/turbo4", "turbo4/turbo3", "q8_0/q8_0", "q4_0/q4_0"]
LLAMA_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml type ids
PREFILL, DECODE = 512, 8  # tokens of one measurement


class Engine(Protocol):
    def prefill(self, n: int) -> None:
        """Start anew and evaluate n tokens."""

    def decode(self, n: int) -> None:
        """Evaluate n tokens, one at a time."""


class Ours:
    def __init__(self, model: LoadedModel, pair: str) -> None:
        self.model, self.types = model, pair.split("/")

    def prefill(self, n: int) -> None:
        self.session = Session(self.model, CacheSpec(*self.types))
        self.session.prefill([1 + i % 40000 for i in range(n)])

    def decode(self, n: int) -> None:
        for token in range(n):
            self.session.decode(5 + token)


class LlamaCpp:
    def __init__(self, cache_type: str, n_ctx: int) -> None:
        import llama_cpp

        kind = LLAMA_TYPES[cache_type]
        self.model = llama_cpp.Llama(
            str(embedded_model()),
            n_ctx=n_ctx,
            n_threads=cores(),
            type_k=kind,
            type_v=kind,
            flash_attn=True,
            verbose=False,
        )

    def prefill(self, n: int) -> None:
        self.model.reset()
        self.model.eval([1 + i % 40000 for i in range(n)])

    def decode(self, n: int) -> None:
        for token in range(n):
            self.model.eval([5 + token])


def seconds(call: Callable[..., Any], *args: int) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def engines(pairs: list[str], n_ctx: int) -> dict[str, Engine]:
    model = load_model()
    found: dict[str, Engine] = {f"tqgguf {pair}": Ours(model, pair) for pair in pairs}
    try:
        found |= {f"llama.cpp {name}/{name}": LlamaCpp(name, n_ctx) for name in LLAMA_TYPES}
    except ImportError:
        print("llama-cpp-python is not installed: no llama.cpp beside us")
    return found


def report(title: str, tokens: int, times: dict[str, list[float]]) -> None:
    base = next(iter(times.values()))
    print(f"\n{title}\n{'':28}{'tokens/s':>10}{'of our f16':>12}")
    for name, measured in times.items():
        ratio = median(b / a for a, b in zip(measured, base, strict=True))
        print(f"{name:28}{tokens / median(measured):10.1f}{ratio:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="tqgguf's CPU backend, end to end")
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="K/V")
    parser.add_argument("--depths", nargs="*", type=int, default=[0, 2048, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-attention", action="store_true")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    print(backends.describe())
    if not args.skip_attention:
        sys.argv[1:] = []
        cpu_attention.main()
    all_engines = engines(args.pairs, max(args.depths) + PREFILL + DECODE * (args.rounds + 1))
    times: dict[str, list[float]] = {name: [] for name in all_engines}
    for turn in range(args.rounds + 1):
        for name, engine in all_engines.items():
            taken = seconds(engine.prefill, PREFILL)
            if turn:
                times[name].append(taken)
    report(f"prefill of {PREFILL} tokens", PREFILL, times)
    for depth in args.depths:
        for engine in all_engines.values():
            engine.prefill(max(depth, 1))
        times = {name: [] for name in all_engines}
        for turn in range(args.rounds + 1):
            for name, engine in all_engines.items():
                taken = seconds(engine.decode, DECODE)
                if turn:
                    times[name].append(taken)
        report(f"decode at depth {depth}", DECODE, times)


if __name__ == "__main__":
    main()
