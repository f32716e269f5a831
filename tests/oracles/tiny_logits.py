"""Records llama.cpp's logits of the models in tiny_models.ORACLE_CASES into tests/data/tiny_logits.npz.

    pip install llama-cpp-python==0.3.36 && python tests/oracles/tiny_logits.py

F32 weights, f32 cache, no flash attention: llama.cpp's own arithmetic, nothing rounded that need not be.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

import llama_cpp  # noqa: E402
from tiny_models import ORACLE_CASES, ORACLE_POSITIONS, ORACLE_TOKENS, fingerprint, write_tiny  # noqa: E402


def logits(path: Path) -> np.ndarray:
    """Float32 [positions, vocabulary]."""
    f32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, type_k=f32, type_v=f32, flash_attn=False, verbose=False
    )
    model.eval(ORACLE_TOKENS)
    return np.array(model.scores[list(ORACLE_POSITIONS)], np.float32)


def main() -> None:
    recorded: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in ORACLE_CASES.items():
            recorded[f"{name}/logits"] = logits(write_tiny(Path(folder) / "tiny.gguf", model))
            recorded[f"{name}/sha256"] = np.array(fingerprint(model))
            print(name, recorded[f"{name}/logits"].std())
    np.savez_compressed(TESTS / "data" / "tiny_logits.npz", **recorded)


if __name__ == "__main__":
    main()
