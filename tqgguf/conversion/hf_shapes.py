"""The shapes that a checkpoint's tensors must have by its configuration.

Knows sizes and the names that tensors have in a GGUF; neither values nor how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tqgguf.conversion.hf_parameters import number
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.model_keys import MATRICES

_VECTORS: Final[dict[str, str]] = {
    **dict.fromkeys(("output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), "hidden"),
    "attn_q_norm": "head_dim",
    "attn_k_norm": "head_dim",
}
"""Norms -> the name of their size."""
_VOCABULARY: Final = ("token_embd", "output")


class Shapes:
    """The shapes by a completed configuration. FormatError: one of its sizes is missing or none that can be.

    path: the configuration's, for messages.
    """

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        hidden, ffn = number(config, "hidden_size", path), number(config, "intermediate_size", path)
        heads = number(config, "num_attention_heads", path)
        kv_heads = number(config, "num_key_value_heads", path)
        if heads % kv_heads:
            raise FormatError(f"{path}: num_key_value_heads: expected a divisor of {heads} heads, found {kv_heads}")
        if "head_dim" not in config and hidden % heads:
            raise FormatError(f"{path}: num_attention_heads: expected a divisor of {hidden} channels, found {heads}")
        head_dim = number(config, "head_dim", path) if "head_dim" in config else hidden // heads
        q, kv = heads * head_dim, kv_heads * head_dim
        self._sizes = {"hidden": hidden, "ffn": ffn, "head_dim": head_dim, "q": q, "k": kv, "v": kv, "output": q}

    def check(self, what: str, name: str, found: tuple[int, ...]) -> None:
        """FormatError where a tensor has another shape. what: it in messages; name: in a GGUF; found: rows first.

        How many rows tensors with a row for each token have is not looked at; names that are not known have any shape.
        """
        expected = self._expected(name)
        if expected is None:
            return
        if len(found) != len(expected) or any(
            want not in (None, have) for want, have in zip(expected, found, strict=True)
        ):
            wanted = " x ".join("any" if size is None else str(size) for size in expected)
            have = " x ".join(map(str, found)) or "a scalar"
            raise FormatError(f"{what}: expected shape {wanted} by config.json, found {have}")

    def _expected(self, name: str) -> tuple[int | None, ...] | None:
        part, _, kind = name.rpartition(".")
        part = part.rpartition(".")[2]
        if part in _VOCABULARY:
            return None, self._sizes["hidden"]
        if part in _VECTORS:
            return (self._sizes[_VECTORS[part]],)
        if part not in MATRICES:
            return None
        n_in, n_out = MATRICES[part]
        return (self._sizes[n_out], self._sizes[n_in]) if kind == "weight" else (self._sizes[n_out],)
