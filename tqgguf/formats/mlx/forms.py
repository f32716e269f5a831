"""MLX's packed forms of matrices, and which of them holds a ggml type's values exactly: the one table of both.

Knows sizes, not how codes are packed (runtime/layers/weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

F32_BYTES = 4


@dataclass(frozen=True)
class MlxForm:
    """bits of a code, values that share a scale, MLX's name. largest_scale: of scales that are a byte, the last that
    means the same number to ggml and mlx (above: NaN, infinite, or a sign).
    """

    bits: int
    group_size: int = 32
    mode: str = "affine"
    largest_scale: int | None = None

    @property
    def group_bytes(self) -> int:
        """Bytes beside the codes: float32 scale and bias, or a byte."""
        return 2 * F32_BYTES if self.mode == "affine" else 1

    def n_bytes(self, n_values: int) -> int:
        return n_values * self.bits // 8 + n_values // self.group_size * self.group_bytes


MLX_FORMS: Mapping[str, MlxForm] = {
    "Q4_0": MlxForm(4),
    "Q4_1": MlxForm(4),
    "Q5_0": MlxForm(5),
    "Q5_1": MlxForm(5),
    "Q8_0": MlxForm(8),
    "IQ4_NL": MlxForm(8),
    "IQ4_XS": MlxForm(8),
    "Q4_K": MlxForm(4),
    "Q5_K": MlxForm(5),
    "MXFP4": MlxForm(4, 32, "mxfp4", 0xFE),
    "NVFP4": MlxForm(4, 16, "nvfp4", 0x7E),
}
"""By ggml type the form that holds its values exactly."""
