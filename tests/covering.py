"""A pairwise covering set: a small list of cases in which every pair of values of any two parameters occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """Greedy covering: each case is grown from a pair that is still missing, value by value. Deterministic."""
    rng = random.Random(seed)
    columns = range(len(parameters))
    missing = {
        (i, a, j, b) for i, j in itertools.combinations(columns, 2) for a in parameters[i] for b in parameters[j]
    }
    order = sorted(missing, key=repr)
    rng.shuffle(order)
    cases = []
    for i, a, j, b in order:
        if (i, a, j, b) not in missing:
            continue
        case: dict[int, Any] = {i: a, j: b}
        for column in columns:
            if column not in case:
                case[column] = max(
                    parameters[column],
                    key=lambda value: (
                        sum(_pair(column, value, c, v) in missing for c, v in case.items()),
                        rng.random(),
                    ),
                )
        missing -= {_pair(c, case[c], d, case[d]) for c, d in itertools.combinations(columns, 2)}
        cases.append(tuple(case[column] for column in columns))
    return cases


def _pair(i: int, a: Any, j: int, b: Any) -> tuple[int, Any, int, Any]:
    return (i, a, j, b) if i < j else (j, b, i, a)
