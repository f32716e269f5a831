"""Which block caches can be in one batch."""

from __future__ import annotations

from collections.abc import Sequence

from tqgguf.formats.errors import RequestError
from tqgguf.runtime.cache.sequence_cache import SequenceCache


def check_alike(caches: Sequence[SequenceCache], shapes: Sequence[tuple[int, ...]]) -> None:
    """shapes: `shape_of` those that hold tokens."""
    settings = {cache.settings for cache in caches}
    if len(settings) != 1:
        found = f"found {len(settings)} different settings"
        raise RequestError(f"a batch takes block caches of one layer and of the same types, {found}")
    # of keys, in any case
    given = {tuple(cache.channel_scale.shape) for cache in caches if cache.channel_scale is not None}
    if len(set(shapes)) > 1 or len(given | {shape[:2] for shape in shapes}) > 1:
        found = " and ".join(map(str, sorted({*shapes, *given})))
        raise RequestError(
            f"a batch takes block caches of as many KV heads and of one head size, found (heads and size of K, of V) "
            f"{found}"
        )


def shape_of(cache: SequenceCache) -> tuple[int, ...] | None:
    """KV heads and head size of K and of V; None while there are no tokens."""
    sides = cache.sides
    return None if sides is None else tuple(n for side in sides for n in (side.n_heads or 0, side.codec.head_dim))
