"""Reconstruction values and decision boundaries of the turbo types.

The tables hold the positive halves and are mirrored; they are stated for groups of 128 (values of standard deviation
1 / sqrt(128)) and scaled for other groups. Generation 3 is the Lloyd-Max quantiser of N(0, 1) divided by sqrt(128), to
six digits (the 2 bit table is the forks' own). Generation 2 is for reading only: the forks' older files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

_Halves = dict[int, tuple[tuple[float, ...], tuple[float, ...]]]

_TWO_BITS = ((0.039994, 0.133462), (0.0, 0.086728))

# generation -> bits -> (positive values, boundaries from zero upwards)
HALVES: dict[int, _Halves] = {
    3: {
        2: _TWO_BITS,
        3: ((0.021663, 0.066822, 0.118786, 0.190207), (0.0, 0.044243, 0.092804, 0.154496)),
        4: (
            (0.011349, 0.034299, 0.058050, 0.083292, 0.111036, 0.143016, 0.182877, 0.241529),
            (0.0, 0.022824, 0.046174, 0.070671, 0.097164, 0.127026, 0.162947, 0.212203),
        ),
    },
    2: {
        2: _TWO_BITS,
        3: ((0.021460, 0.065717, 0.117832, 0.190685), (0.0, 0.043589, 0.091775, 0.154259)),
        4: (
            (0.006938, 0.020989, 0.035597, 0.051262, 0.068756, 0.089527, 0.117195, 0.173926),
            (0.0, 0.013963, 0.028293, 0.043430, 0.060009, 0.079142, 0.103361, 0.145560),
        ),
    },
}
CURRENT_GENERATION = 3
TABLE_GROUP = 128


@dataclass(frozen=True, eq=False)
class Codebook:
    """`values` float32 [2**bits], ascending, and `boundaries` float32 [2**bits - 1] between them.

    The index of v is the number of boundaries not above v: a value on a boundary takes the upper index.
    """

    values: NDArray[np.float32]
    boundaries: NDArray[np.float32]


@cache
def codebook(bits: int, group: int = TABLE_GROUP, generation: int = CURRENT_GENERATION) -> Codebook:
    """The codebook of `bits` for a group of `group` values: float32(table) * float32(sqrt(128 / group))."""
    positive, upper = (np.array(half, np.float32) for half in HALVES[generation][bits])
    scale = np.float32(math.sqrt(TABLE_GROUP / group))
    values = np.concatenate([-positive[::-1], positive]) * scale
    boundaries = np.concatenate([-upper[:0:-1], upper]) * scale
    values.flags.writeable = boundaries.flags.writeable = False
    return Codebook(values, boundaries)
