"""A whole model of Llama-3.1-8B's shape on a GPU: f16's cache and caches of blocks, in turns. Part of gpu.py, and:

    python benchmarks/gpu_model.py [decode fill prefill memory] [--quick] [--out results.json]

decode   time of a token: rounds of a whole page each, so that a page fills in every one, a cache of each type after the
         other; tokens are evaluated one ahead, as mlx-lm's generate does
fill     what a page that fills costs on the GPU, spread over its tokens, and appending to the tail, beside a step
prefill  new tokens after many that are held
memory   the peak while a long prompt is evaluated, beyond the model and what the cache holds in the end
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tqgguf.runtime  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from gpu_random_model import FLOATS, STEPS, Step, make_caches, make_step, random_model
from gpu_steps import measure_fill, take_steps
from gpu_timing import copy_bandwidth, print_head, print_row
from mlx_lm.models import llama

from tqgguf.runtime.backends import describe
from tqgguf.runtime.kv.pages import PAGE

WARM_UP = PAGE + 4  # steps: a page fills, so that its kernels are compiled
FIRST_TOKEN = 1


@dataclass
class Sequence:
    """A cache of some types, how its next token is evaluated, and the token."""

    types: str
    caches: list[Any]
    step: Step
    token: mx.array

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def sequences(model: llama.Model, args: argparse.Namespace, n_tokens: int) -> list[Sequence]:
    found = []
    for types in args.types:
        caches = make_caches(model, types, n_tokens)
        found.append(Sequence(types, caches, make_step(model, caches, args.step), mx.array([[FIRST_TOKEN]])))
    return found


def decode(model: llama.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds in turn. The step that the saved bytes predict: f16's, less those bytes by the copy bandwidth."""
    found = []
    columns = ("median ms", "best ms", "tokens/s", "slowest step ms", "of f16, median", "best", "predicted best ms")
    print_head("context", "K/V", "cache GB", *columns)
    for n_tokens in args.contexts:
        running = sequences(model, args, n_tokens)
        sizes = {each.types: each.nbytes for each in running}
        for each in running:
            each.token, _ = take_steps(each.step, each.token, args.warm_up)
        rounds: dict[str, list[list[float]]] = {each.types: [] for each in running}
        for _ in range(args.rounds):
            for each in running:
                each.token, ms = take_steps(each.step, each.token, args.steps)
                rounds[each.types].append(ms)
        means = {types: [sum(ms) / len(ms) for ms in of_type] for types, of_type in rounds.items()}
        f16 = means[FLOATS]
        for types, ours in means.items():
            saved_ms = (sizes[FLOATS] - sizes[types]) / copy_bandwidth() * 1e3
            slowest = max(map(max, rounds[types]))
            ratio = median(a / b for a, b in zip(ours, f16, strict=True))
            print_row(
                *(n_tokens, types, f"{sizes[types] / 1e9:.2f}", f"{median(ours):.2f}", f"{min(ours):.2f}"),
                *(f"{1e3 / median(ours):.1f}", f"{slowest:.1f}", f"{ratio:.2f}", f"{min(ours) / min(f16):.2f}"),
                f"{min(f16) - saved_ms:.2f}",
            )
            record = {"context": n_tokens, "types": types, "cache_bytes": sizes[types], "step": args.step}
            found.append(record | {"rounds_ms": ours, "slowest_ms": slowest, "steps_ms": rounds[types][-1]})
        del running
        mx.clear_cache()
    return found


def fill(model: llama.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    n_tokens, found = args.contexts[0], []
    columns = ("step us", "kernels", "tail's append us", "kernels", "a page's fill us", "kernels")
    print_head("context", "K/V", *columns, "both, of a step", "launched by us")
    for each in sequences(model, args, n_tokens):
        each.token, _ = take_steps(each.step, each.token, args.warm_up)
        cost = measure_fill(each.step, each.token, each.caches[0])
        share = (cost.fill_us / PAGE + cost.tail_us) / cost.step_us if cost.step_us else 0.0
        print_row(
            *(n_tokens, each.types, f"{cost.step_us:.0f}", cost.n_kernels, f"{cost.tail_us:.0f}", cost.n_of_tail),
            *(f"{cost.fill_us:.0f}", cost.n_of_fill, f"{share:.1%}", cost.n_launched),
        )
        found.append({"context": n_tokens, "types": each.types, "share": share} | vars(cost))
    mx.clear_cache()
    return found


def prefill(model: llama.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluated as mlx-lm does: what caches hold, in one step; the last logits too."""
    n_held, n_new = args.held, args.new
    tokens = mx.random.randint(0, args.vocab, (1, n_new))
    running = sequences(model, args, n_held)
    seconds: dict[str, list[float]] = {each.types: [] for each in running}
    for turn in range(args.rounds + 1):
        for each in running:
            took = _evaluated_seconds(model, tokens, each.caches)
            for cache in each.caches:
                cache.trim(n_new)
            if turn:  # the first one compiles
                seconds[each.types].append(took)
    print_head("new tokens", "held", "K/V", "median ms", "best ms", "of f16, median", "best")
    f16 = seconds[FLOATS]
    for types, ours in seconds.items():
        ratio = median(a / b for a, b in zip(ours, f16, strict=True))
        ms = (f"{median(ours) * 1e3:.1f}", f"{min(ours) * 1e3:.1f}")
        print_row(n_new, n_held, types, *ms, f"{ratio:.2f}", f"{min(ours) / min(f16):.2f}")
    return [{"new": n_new, "held": n_held, "types": types, "seconds": ours} for types, ours in seconds.items()]


def memory(model: llama.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    tokens = mx.random.randint(0, args.vocab, (1, args.prompt))
    print_head("prompt", "in steps of", "K/V", "model GB", "cache GB", "peak beyond both GB", "seconds, with compiling")
    for types in args.types:
        mx.clear_cache()
        held = mx.get_active_memory()
        caches = make_caches(model, types)
        mx.reset_peak_memory()
        seconds = 0.0
        for start in range(0, args.prompt, args.new):
            seconds += _evaluated_seconds(model, tokens[:, start : start + args.new], caches)
            mx.clear_cache()
        cache_bytes = sum(cache.nbytes for cache in caches)
        beyond = mx.get_peak_memory() - held - cache_bytes
        gigabytes = (f"{n / 1e9:.2f}" for n in (held, cache_bytes, beyond))
        print_row(args.prompt, args.new, types, *gigabytes, f"{seconds:.2f}")
        sizes = {"model_bytes": held, "cache_bytes": cache_bytes, "beyond_bytes": beyond}
        found.append({"prompt": args.prompt, "step": args.new, "types": types, "seconds": seconds} | sizes)
        del caches
    return found


def _evaluated_seconds(model: llama.Model, tokens: mx.array, caches: list[Any]) -> float:
    mx.synchronize()
    start = time.perf_counter()
    logits = model(tokens, cache=caches)[:, -1]
    mx.eval(logits, [cache.state for cache in caches])
    mx.synchronize()
    return time.perf_counter() - start


TASKS: dict[str, Callable[[llama.Model, argparse.Namespace], Any]] = {
    "decode": decode,
    "fill": fill,
    "prefill": prefill,
    "memory": memory,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--contexts", nargs="*", type=int, default=[8192, 65536], help="tokens held before decoding")
    group.add_argument("--types", nargs="*", default=["turbo4/turbo3"], metavar="K/V", help=f"beside {FLOATS}")
    group.add_argument("--step", choices=STEPS, default="compiled", help="how caches of blocks evaluate a token")
    group.add_argument("--rounds", type=int, default=5)
    group.add_argument("--steps", type=int, default=PAGE, help="of a round")
    group.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first round")
    group.add_argument("--held", type=int, default=32768, help="tokens held before prefill")
    group.add_argument("--new", type=int, default=2048, help="tokens of a step of prefill")
    group.add_argument("--prompt", type=int, default=32768, help="tokens whose peak memory is measured")
    group.add_argument("--layers", type=int, default=32)
    group.add_argument("--hidden", type=int, default=4096, help="the model's width, a multiple of 512")
    group.add_argument("--vocab", type=int, default=128256)


QUICK = {"contexts": [65536], "rounds": 2, "model_tasks": ["decode"]}
SMOKE = {
    **{"contexts": [256], "rounds": 1, "steps": 4, "warm_up": 2, "held": 256, "new": 256, "prompt": 512},
    **{"layers": 2, "hidden": 512, "vocab": 256},
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.types = [FLOATS, *(types for types in args.types if types != FLOATS)]
    model = random_model(args)
    return {name: TASKS[name](model, args) for name in getattr(args, "model_tasks", TASKS)}


def main() -> None:
    parser = argparse.ArgumentParser(description="a model of Llama-3.1-8B's shape, by cache type")
    parser.add_argument("model_tasks", nargs="*", metavar="what", help=", ".join(TASKS))
    parser.add_argument("--quick", action="store_true", help="decoding at 65,536 tokens only, two rounds")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    add_flags(parser)
    presets, _ = parser.parse_known_args()
    parser.set_defaults(**(QUICK if presets.quick else SMOKE if presets.smoke else {}))
    args = parser.parse_args()
    args.model_tasks = args.model_tasks or list(TASKS)
    print(describe(), flush=True)
    found = measure(args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
