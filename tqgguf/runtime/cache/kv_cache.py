"""The KV cache in blocks, in mlx-lm's cache protocol: what its programs ask of a cache beside rows and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.base import create_causal_mask

from tqgguf.formats.errors import FormatError
from tqgguf.runtime.attention import hook
from tqgguf.runtime.attention.reads import Usage
from tqgguf.runtime.backends import default_backend
from tqgguf.runtime.cache.batch_cache import BatchBlockKVCache
from tqgguf.runtime.cache.sequence_cache import SequenceCache
from tqgguf.runtime.kv.pages import PAGE
from tqgguf.runtime.kv.saved import split_state


class BlockKVCache(SequenceCache):
    """The K and V of one layer in block types, of one sequence. See `make_prompt_cache`, and `SequenceCache` for its
    arguments."""

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of the next n tokens: None, "causal", or a boolean array [n, keys held + n] where one is needed."""
        window = self.window or window_size
        if not return_array and (window is None or self.offset + n <= window):
            return "causal" if n > 1 else None
        mask = hook.CausalMask(create_causal_mask(n, self.n_visible, window_size=window))
        mask.window = window
        return mask

    @classmethod
    def merge(cls, caches: Sequence[BlockKVCache]) -> BatchBlockKVCache:
        """A batch of these caches' sequences, for mlx-lm. RequestError: not caches of one layer of the same types."""
        return BatchBlockKVCache(caches)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything `from_state` needs: settings as scalars, and both sides' arrays (None where there are none)."""
        self._settle()
        settings = (*self.settings.scalars(), self.offset, self.start // PAGE, self.channel_scale)
        if self.sides is None:
            return settings
        dims = tuple(side.codec.head_dim for side in self.sides)
        # V's codes as they are held: mlx-lm evaluates states all the time and hardly ever reads one
        v_tiled = int(self.sides[1].tiled)
        return (*settings, *dims, v_tiled, *(list(side.arrays()) for side in self.sides))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """FormatError or RequestError for anything that `state` cannot have given; the cache is then as it was."""
        settings, (offset, first_page, channel_scale), rest = split_state(state)
        fresh = BlockKVCache.__new__(BlockKVCache)
        usage, backend = getattr(self, "usage", None), getattr(self, "backend", None)
        fresh._start(settings, channel_scale, usage or Usage(), backend or default_backend())
        fresh.offset = offset
        if rest:
            dim_k, dim_v, v_tiled, *arrays = rest
            fresh.sides = fresh._make_side("k", dim_k), fresh._make_side("v", dim_v)
            for side, saved, tiled in zip(fresh.sides, arrays, (False, bool(v_tiled)), strict=True):
                side.restore(first_page, offset, saved, tiled)
            if fresh.sides[0].n_heads != fresh.sides[1].n_heads:
                heads = [side.n_heads for side in fresh.sides]
                raise FormatError(f"cache state: expected as many heads of K as of V, found {heads[0]} and {heads[1]}")
        self.__dict__.update(fresh.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies (mlx-lm's server makes some) go by the state: a backend's handles cannot be copied."""
        names = "usage", "keeps_pages", "windows", "shortest", "valid_from", "fingerprint", "_furthest"
        return type(self).from_state, (self.state,), {name: getattr(self, name) for name in names}


def can_go_back(cache: Any, length: int) -> bool:
    """Whether a layer's cache, of any kind, can be trimmed to `length` tokens."""
    return cache.can_go_back(length) if isinstance(cache, BlockKVCache) else bool(cache.is_trimmable())
