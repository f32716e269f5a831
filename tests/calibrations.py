"""What the tests of calibrations share: tiny models, a sidecar's contents, an empty cache folder."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny_models import TinyModel

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.models.calibration import Calibration
from tqgguf.formats.models.fingerprint import Fingerprint

N_PREFIX = 4
LLAMA = TinyModel("llama", n_layers=2, hidden_size=128, intermediate_size=128, seed=21)
GEMMA = TinyModel("gemma3", n_layers=3, hidden_size=128, window=64, window_pattern=3, rope_base=1e6, seed=22)
FINGERPRINT = Fingerprint(*(digit * 64 for digit in "abcd"))
SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 4, 4)]


def made(**changes: Any) -> Calibration:
    scales = {
        0: np.array([[1.0, 2.0, 0.5], [4.0, 0.5, 0.5]], np.float32),
        1: np.array([[1.0, 1.0, 2.0, 0.5]], np.float32),
    }
    fields = {
        "scales": scales,
        "fingerprint": FINGERPRINT,
        "architecture": "llama",
        "model": "a model",
        "n_tokens": 4096,
        "text": "text.txt",
        "text_sha256": "e" * 64,
    }
    return Calibration(**{**fields, **changes})
