"""The memory that a compressed cache saves is saved by the process, not only by its own account."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tqgguf.formats.blocks.cache_spec import LayerTypes
from tqgguf.formats.blocks.kv_size import kv_bytes
from tqgguf.runtime.models.load import embedded_model, open_model

N_TOKENS = 8192
MEASURE = """
import resource, sys
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import load_model
import mlx.core as mx
mx.set_default_device(mx.cpu)
session = Session(load_model(), CacheSpec(sys.argv[1], sys.argv[1]))
session.prefill([1 + i % 40000 for i in range(int(sys.argv[2]))])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def peak_bytes(cache_type: str) -> int:
    """Peak resident memory of a process that evaluates N_TOKENS tokens."""
    argv = [sys.executable, "-c", MEASURE, cache_type, str(N_TOKENS)]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_at_8192_tokens_the_process_saves_most_of_what_arithmetic_promises() -> None:
    shapes = open_model(embedded_model()).config.layer_shapes()
    sizes = [
        kv_bytes(shapes, [types] * len(shapes), N_TOKENS)
        for types in (LayerTypes("f16", "f16"), LayerTypes("turbo4", "turbo4", "full", 4))
    ]
    promised = sizes[0] - sizes[1]
    assert peak_bytes("f16") - peak_bytes("turbo4") >= 0.6 * promised
