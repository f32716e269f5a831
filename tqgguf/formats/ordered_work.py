"""Independent pieces of work on all cores, whose results are taken in order and do not pile up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tqgguf.formats.cores import cores

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2  # pieces beyond one for each core: whoever takes the results need not keep pace exactly


def in_order(work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
    """`map` with a thread for each core, a few pieces ahead of whoever takes the results. An error of `work` is raised
    in its piece's place; what was not begun is then given up.
    """
    n_threads = cores()
    if n_threads == 1:
        yield from map(work, pieces)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(work, piece))
                if len(waiting) >= n_threads + AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
