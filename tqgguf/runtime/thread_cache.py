"""`lru_cache` for what MLX has not evaluated yet: such arrays belong to a stream of the thread that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar

R = TypeVar("R")


def lru_cache_in_thread(maxsize: int) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Of positional arguments. Results are kept for the thread that asked; maxsize: of all threads together."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @lru_cache(maxsize=maxsize)
        def kept(thread: int, *args: Hashable) -> R:
            return function(*args)

        @wraps(function)
        def call(*args: Hashable) -> R:
            return kept(threading.get_ident(), *args)

        return call

    return decorate
