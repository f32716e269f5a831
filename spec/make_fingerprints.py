"""Makes fingerprint.json: `python spec/make_fingerprints.py`, in an environment that has what the tests need.

Models as files, what is fed to each hash, and the hashes. The files are built by the tests' writers, the hashes are the
package's; tests/test_fingerprint_spec.py holds both against a reading of fingerprint.md in plain Python.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from make_tables import write

from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.fingerprint import Fingerprint, fingerprint_folder, fingerprint_gguf

SPEC = Path(__file__).parent
sys.path.insert(0, str(SPEC.parent / "tests"))

from gguf_builder import BOOL, F64, I64, STRING, U8, U64, Tensor, Typed, build_gguf  # noqa: E402
from plain_fingerprint import of_folder, of_gguf  # noqa: E402

Pieces = dict[str, list[bytes]]

SMALL: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "not fed",
    "llama.block_count": 1,
    "llama.context_length": 2048,
    "llama.embedding_length": Typed(U64, 4),
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.head_count_kv": [1],
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 4,
    "llamaX.rope.freq_base": 1.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "Ġb", "\U0001f600", b"\xff", ""],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "not fed",
    "tokenizer.chat_template.tools": "not fed",
}
EVERY_VALUE: dict[str, Any] = {
    "general.architecture": "a.b",
    "a.b.floats": [0.0, -0.0, 1.5, 1e-5],
    "a.b.doubles": Typed(F64, [1e16, 0.1, float("inf"), float("nan")]),
    "a.b.large": Typed(U64, [2**64 - 1, 5]),
    "a.b.negative": Typed(I64, [-1, 7]),
    "a.b.bytes": Typed(U8, [0, 255]),
    "a.b.flags": Typed(BOOL, [True, False]),
    "a.b.no strings": Typed(STRING, []),
    "a.b.no numbers": Typed(U8, []),
    "a.b.nested": [[1, 2], [], [3]],
    "a.b.nested strings": [["x", "y"], ["ä"]],
    "a.b.f32": 0.1,
    **{
        f"a.b.f64 {value}": Typed(F64, value) for value in (1e16, 9999999999999998.0, 1e-4, 9.5e-5, -0.0, 1e300, 5e-324)
    },
    "a.b.u64": Typed(U64, 2**64 - 1),
    "a.b.i64": Typed(I64, -(2**63)),
    "a.b.text": 'quote " back \\ slash / \b\t\n\f\r\x01\x7f ~ é 中 \U0001f600',
    "a.b.broken": b"\xc3(\xff",
    "a.b.rope.rope.x": 1,
    "tokenizer.é": 1,
    "tokenizer.Z": 1,
    "tokenizer.\U00010000": 1,
    "tokenizer.\ufffd": 1,
}
CONFIG: dict[str, Any] = {
    "model_type": "llama", "rms_norm_eps": 1e-05, "rope_theta": 10000, "tie_word_embeddings": False,
    "rope_scaling": {"factor": 2.0, "type": "linear"}, "torch_dtype": "not fed", "list": [1, 2.0, "x"],
    "text_config": {"use_cache": True, "partial_rotary_factor": 0.5, "n": None}, "words": ["a", "é"], "empty": [],
    "objects": [{"b": 1, "a": [True]}],
}  # fmt: skip


STRETCHED = {"freq_base": 500000.0, "scaling.factor": 4.0}


def main() -> None:
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones(4, np.float16),
        "B": Tensor((1, 32), 8, bytes(range(34))),
        "none": np.empty((0, 2), np.float32),
    }
    large = {"t": Tensor((1025,), 0, bytes(i % 251 for i in range(4100)))}
    models = [
        gguf_model("a small model", build_gguf(SMALL, tensors)),
        gguf_model(
            "the same with other RoPE", build_gguf(SMALL, tensors), {"freq_base": 500000.0, "scaling.factor": 4.0}
        ),
        gguf_model("every kind of value", build_gguf(EVERY_VALUE, {})),
        gguf_model("a tensor of 4100 bytes", build_gguf({"general.architecture": "x"}, large)),
        folder_model("a folder"),
    ]
    write(SPEC / "fingerprint.json", {"version": 1, "models": models})


def gguf_model(name: str, data: bytes, rope: dict[str, float] | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(data)
        with open_gguf(path) as file:
            found = fingerprint_gguf(file, rope)
    return described(name, {"model.gguf": data}, found, of_gguf(data, rope)) | {"rope_in_use": rope}


def folder_model(name: str) -> dict[str, Any]:
    header = {
        "__metadata__": {"format": "mlx"},
        "w": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]},
        "v": {"dtype": "U32", "shape": [1], "data_offsets": [8, 12]},
    }
    text = json.dumps(header).encode()
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b'{"version": "1.0"}\n',
        "tokenizer_config.json": json.dumps({"chat_template": "not fed", "eos_token": {"content": "</s>"}}).encode(),
        "model.safetensors": struct.pack("<Q", len(text)) + text + bytes(range(12)),
    }
    with tempfile.TemporaryDirectory() as folder:
        for file, data in files.items():
            (Path(folder) / file).write_bytes(data)
        found = fingerprint_folder(folder)
    return described(name, files, found, of_folder(files))


def described(name: str, files: dict[str, bytes], found: Fingerprint, pieces: Pieces) -> dict[str, Any]:
    """A model in the file of vectors: everything but names and hashes in hex."""
    return {
        "name": name,
        "files": {file: data.hex() for file, data in files.items()},
        "pieces": {part: [piece.hex() for piece in fed] for part, fed in pieces.items()},
        "hashes": {part: getattr(found, part) for part in pieces},
        "identity": hashlib.sha256((found.weights + found.hyperparameters).encode()).hexdigest()[:32],
    }


if __name__ == "__main__":
    main()
