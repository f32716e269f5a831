"""The table of what a side of a layer holds beside its rows: five arrays of floats, each of which may be absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import SCALE_LIMITS
from tqgguf.formats.snapshots.format import F16, F32

_LOWEST, _HIGHEST = SCALE_LIMITS


@dataclass(frozen=True)
class Part:
    """name: its field of `SideSnapshot`, and the end of its tensor's name. is_sound: which of its numbers may be there;
    expected: what these are, in words.
    """

    name: str
    dtype: type[np.floating[Any]]
    n_dims: int
    is_sound: Callable[[NDArray[Any]], NDArray[np.bool_]] = np.isfinite
    expected: str = "a finite number"

    @property
    def ggml_type(self) -> int:
        """Type of its tensor."""
        return F16 if self.dtype is np.float16 else F32


PARTS = (
    Part("tail", np.float16, 3),
    Part("prefix", np.float16, 3),
    Part("page_means", np.float16, 3),
    Part(
        "channel_scale",
        np.float32,
        2,
        lambda scale: (scale >= _LOWEST) & (scale <= _HIGHEST),
        f"a number from {_LOWEST:g} to {_HIGHEST:g}",
    ),
    # a query beyond float32's squares says nothing, and is kept as it is
    Part("query_squares", np.float32, 3, lambda squares: squares >= 0, "a number >= 0"),
)
PART_NAMES = tuple(part.name for part in PARTS)
