"""RoPE with one factor per pair, as llama 3's context extension stores it in GGUF files (tensor rope_freqs.weight)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from tqgguf.runtime.model_config import ModelConfig


class FactoredRoPE(nn.Module):
    """RoPE whose wavelengths are multiplied by `factors` [rope_dim / 2]; `traditional`: pairs are neighbours."""

    def __init__(self, config: ModelConfig, traditional: bool, factors: NDArray[np.float32]) -> None:
        super().__init__()
        self._dims, self._traditional, self._scale = config.rope_dim, traditional, 1.0 / config.rope_factor
        exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
        self._freqs = mx.array((config.rope_theta**exponents * factors).astype(np.float32))

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return mx.fast.rope(
            x, self._dims, traditional=self._traditional, base=None, scale=self._scale, offset=offset, freqs=self._freqs
        )
