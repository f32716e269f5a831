"""Rows of the table of rules: prompt caches of mlx-lm in safetensors files (TQ52x)."""

from __future__ import annotations

from typing import Final

from tqgguf.formats.rules.rule import ERROR, Rule

_AGAIN: Final = "write the cache again with mlx_lm.cache_prompt"

MLX_RULES: Final[tuple[Rule, ...]] = (
    Rule("TQ520", "mlx-cache-metadata", ERROR, "an array belongs to no layer that the metadata name", _AGAIN),
    Rule("TQ521", "mlx-cache-class", ERROR, "a layer's cache is of a class that is not read here",
         "caches of recurrent layers and of batches can be used by mlx-lm alone"),
    Rule("TQ522", "mlx-cache-array", ERROR, "an array of a layer's cache is missing, or of a wrong type or shape",
         _AGAIN),
    Rule("TQ523", "mlx-cache-number", ERROR, "a number of a layer's cache is missing or absurd", _AGAIN),
    Rule("TQ524", "mlx-cache-offset", ERROR, "layers of a prompt cache hold different numbers of tokens", _AGAIN),
    Rule("TQ525", "mlx-cache-non-finite", ERROR, "a value, scale or bias of a token that is held is infinite or NaN",
         "write the cache again: such rows give wrong text"),
)  # fmt: skip
