"""Peak memory of one cache, by a process of its own: nothing else that is measured stands in its memory.

`measure_memory` starts the process, which runs this module; MLX says what it held on the device, the system what was
resident. Meant to run before the caller loads the model itself.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from tqgguf.formats.bench_record import Memory
from tqgguf.formats.errors import TqggufError, words_of
from tqgguf.measuring.bench.modes import ModeSession, modes_of
from tqgguf.measuring.bench.speed import random_tokens
from tqgguf.measuring.cache_pairs import parse_pairs
from tqgguf.measuring.evaluation.caches import CacheOptions, specs_of
from tqgguf.runtime.models.model_opening import ModelAsk, open_asked

DECODED = 4  # tokens of each context that are decoded one by one


@dataclass(frozen=True)
class MemoryPlan:
    """One mode (a pair's name) of a model, measured as it grows to each of the contexts, in tokens."""

    model: ModelAsk
    pair: str
    contexts: Sequence[int]
    chunk: int
    seed: int
    n_prefix: int | None
    balance: str | None


def measure_memory(plan: MemoryPlan) -> list[Memory]:
    """TqggufError: the process failed, for instance for want of memory."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise TqggufError(f"the memory of {plan.pair} could not be measured (status {done.returncode}): {last}")
    return [Memory(**row) for row in json.loads(done.stdout)]


def memory_of(plan: MemoryPlan) -> list[Memory]:
    """The same within this process, which should have done nothing before."""
    opening = open_asked(plan.model)
    layers = opening.opened.config.layer_shapes()
    pairs, options = parse_pairs(plan.pair), CacheOptions(plan.n_prefix, plan.balance)
    chosen = opening.calibrate(specs_of(pairs, options))
    n_ctx = max(plan.contexts)
    (mode,) = modes_of(pairs, layers, n_ctx, replace(options, channel_scales=chosen.channel_scales))
    loaded = opening.load()
    mx.clear_cache()
    mx.reset_peak_memory()
    session = ModeSession(loaded, mode, n_ctx=n_ctx, chunk=plan.chunk)
    ids = random_tokens(n_ctx, loaded.tokenizer.vocab_size, plan.seed)
    found = []
    for context in sorted(plan.contexts):
        session.prefill(ids[: max(context - DECODED, len(session.tokens) + 1, 1)])
        while len(session.tokens) < context:
            session.decode(ids[len(session.tokens)])
        found.append(Memory(mode.label, context, session.kv_bytes, mx.get_peak_memory(), peak_resident(), plan.seed))
    return found


def peak_resident() -> int | None:
    """The most bytes of this process that were resident at once. On Linux not getrusage's, which a child inherits."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def _main(argument: str) -> int:
    values: dict[str, Any] = json.loads(argument)
    try:
        found = memory_of(MemoryPlan(**values | {"model": ModelAsk(**values["model"])}))
    except (TqggufError, MemoryError) as error:
        sys.stderr.write(f"{type(error).__name__}: {words_of(error)}\n")
        return 1
    sys.stdout.write(json.dumps([asdict(memory) for memory in found]))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
