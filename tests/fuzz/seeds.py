"""Small sound files of every kind, and damaged ones for every rule: what the fuzzers start from."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from gguf_builder import BOOL, U8, U64, Tensor, Typed, build_gguf, quantised
from llama_builder import Memory, build_state, packed_tokens
from mlx_cache_files import BEFORE, CURRENT, QUANTISED, cache_bytes
from mlx_cache_files import SOUND as MLX_SOUND
from snapshots import carrier_bytes, make_layer, make_snapshot
from test_gguf_defects import DAMAGED
from test_llama_state import SOUND
from unsound_files import calibration, safetensors, unsound_files

MAX_BYTES = 1 << 16


def sound() -> dict[str, bytes]:
    """Sound files by name, each of a kilobyte or a few."""
    arrays = {"a.texts": ["a", "", "münze"], "a.flags": Typed(BOOL, [True, False]), "a.nested": [[1], []]}
    hyperparameters = {
        "block_count": 1, "context_length": 8, "embedding_length": 32, "attention.head_count": 1,
    }  # fmt: skip
    metadata = {
        "general.architecture": "llama", "general.alignment": 32, "a.flag": True, "a.u8": Typed(U8, 3),
        **{f"llama.{suffix}": value for suffix, value in hyperparameters.items()}, **arrays, "a.u64": Typed(U64, 5),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": [0.0, 1.0], "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    tensors = {
        "blk.0.attn_q.weight": quantised(np.ones((2, 32), np.float32), "Q4_1"),
        "b": np.arange(5, dtype=np.float16),
        "c": Tensor((256,), 12, bytes(144)),
    }
    shard = {"split.no": 0, "split.count": 2, "split.tensors.count": 1}
    plain = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
    half = {"dtype": "BF16", "shape": [1], "data_offsets": [8, 10]}
    with tempfile.TemporaryDirectory() as folder:
        sidecar = calibration(Path(folder))
    return {
        "model": build_gguf(metadata, tensors),
        "empty": build_gguf({}, {}),
        "shard": build_gguf(shard, {"a": np.ones(1, np.float32)}),
        "calibration": sidecar,
        "snapshot": carrier_bytes(make_snapshot(3, make_layer(0, 3, n_kv_heads=1, balance="full", n_prefix=2))),
        "safetensors": safetensors({"__metadata__": {"a": "b"}, "a": plain, "b": half}, bytes(10)),
        "mlx cache": cache_bytes(CURRENT, MLX_SOUND),
        "older mlx cache": cache_bytes(BEFORE, QUANTISED),
        "session": build_state().data,
        "sequence": build_state("sequence", tokens=packed_tokens([5, -1, -1], [(1, b"pixel")])).data,
        "window": build_state(tokens=range(6), memories=[Memory(n_cells=6), Memory(n_cells=4, first=2)]).data,
        **{name: built.data for name, built in SOUND.items()},
    }  # fmt: skip


def all_seeds() -> dict[str, bytes]:
    """Those, and damaged ones."""
    with tempfile.TemporaryDirectory() as folder:
        damaged = {name: next(iter(case.files.values())) for name, case in unsound_files(Path(folder)).items()}
    seeds = sound() | {f"damaged {name}": data for name, data in DAMAGED_DATA.items()} | damaged
    return {name: data for name, data in seeds.items() if len(data) <= MAX_BYTES}


DAMAGED_DATA = {name: data for name, (data, _, _, _) in DAMAGED.items()}
