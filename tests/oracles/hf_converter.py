"""What llama.cpp's converter makes of the tiny checkpoints: writes tests/data/converted_checkpoints.json.

    PYTHONPATH=tests python tests/oracles/hf_converter.py LLAMA_CPP

LLAMA_CPP is a source tree of llama.cpp (llama-cpp-python 0.3.36 has one in vendor/llama.cpp); transformers and
sentencepiece must be installed. The converter uses torch for a dozen operations on whole arrays, for which numpy stands
in here: torch's wheels of a gigabyte are not needed. Pre-tokenizers, which it knows by hashes of real vocabularies, are
named here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import transformers  # before torch is there, or it would ask for the real one
from tiny_checkpoints import CASES, write_checkpoint

OUT = Path(__file__).parent.parent / "data" / "converted_checkpoints.json"
PRE = "gpt-2"


class Dtype:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


class Tensor:
    """An array under torch's method names; bfloat16 is held as its bits."""

    def __init__(self, array: np.ndarray, dtype: Dtype) -> None:
        self.array, self.dtype = array, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def dim(self) -> int:
        return self.array.ndim

    def view(self, dtype: Dtype) -> Tensor:
        return Tensor(self.array.view(dtype.dtype), dtype)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.array.reshape(shape[0] if isinstance(shape[0], tuple) else shape), self.dtype)

    def swapaxes(self, i: int, j: int) -> Tensor:
        return Tensor(self.array.swapaxes(i, j), self.dtype)

    def to(self, dtype: Dtype) -> Tensor:
        values = self.array
        if self.dtype is torch.bfloat16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return Tensor(values.astype(dtype.dtype), dtype)

    def __add__(self, other: float) -> Tensor:
        return Tensor(self.array + self.array.dtype.type(other), self.dtype)

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key], self.dtype)

    def numpy(self) -> np.ndarray:
        return self.array


torch: Any = types.ModuleType("torch")
for name, numpy_name in (
    *((name, name) for name in ["float16", "float32", "float64", "uint8", "int64", "int32", "int16", "int8"]),
    ("bool", "bool"), ("bfloat16", "uint16"), ("float8_e4m3fn", "uint8"), ("float8_e5m2", "uint8"),
):  # fmt: skip
    setattr(torch, name, Dtype(np.dtype(numpy_name)))
torch.Tensor, torch.dtype, torch.Size = Tensor, Dtype, tuple
torch.from_numpy = lambda array: Tensor(array, torch.uint8)
torch.arange = lambda start, stop, step, dtype: np.arange(start, stop, step, dtype=np.float32)
torch.tensor = lambda values, dtype: Tensor(np.array([np.float32(v) for v in values]), torch.float32)
torch.__getattr__ = lambda name: type(name, (), {})


def digest(value: Any) -> Any:
    """A metadata value, or of long arrays a hash."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list) and len(value) > 16:
        return "sha256:" + hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
    return value


def record(path: Path) -> dict[str, Any]:
    """What a GGUF holds: type and value of each key; type, shape and hash of each tensor's bytes."""
    from tqgguf.formats.gguf.reader import open_gguf

    with open_gguf(path) as file:
        return {
            "metadata": {key: [str(file.metadata_type(key)), digest(value)] for key, value in file.metadata.items()},
            "tensors": {
                name: [info.type_name, list(info.shape), hashlib.sha256(file.raw(name)).hexdigest()]
                for name, info in file.tensors.items()
            },
        }


def main(llama_cpp: str) -> None:
    sys.modules["torch"] = torch
    sys.path[:0] = [f"{llama_cpp}/gguf-py", llama_cpp]
    import conversion
    import gguf
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: PRE
    recorded = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in CASES.items():
            folder = write_checkpoint(Path(temporary) / name, case)
            config = base.ModelBase.load_hparams(folder, False)
            kind = conversion.get_model_class(base.get_model_architecture(config, base.ModelType.TEXT))
            out = Path(temporary) / f"{name}.gguf"
            kind(folder, gguf.LlamaFileType[f"MOSTLY_{case.outtype.upper()}"], out, eager=True).write()
            recorded[name] = record(out)
    OUT.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    print(f"{OUT}: {len(recorded)} checkpoints, transformers {transformers.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
