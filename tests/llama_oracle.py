"""llama.cpp through llama-cpp-python's C functions: evaluate tokens, decode greedily, save and load states.

For tests that have it; on the CPU, one thread, flash attention as asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as c
import numpy as np

from tqgguf.formats.blocks.block_types import BLOCK_TYPES

MAX_TOKENS = 1 << 16


@c.llama_log_callback
def _silent(level, text, data):
    pass


c.llama_log_set(_silent, ctypes.c_void_p(0))
c.llama_backend_init()


class Model:
    def __init__(self, path: Path) -> None:
        self.handle = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        self.vocabulary = c.llama_model_get_vocab(self.handle)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        return ids[: c.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), True, True)]


class Context:
    """A context with caches of these types, for n_sequences sequences."""

    def __init__(
        self,
        model: Model,
        type_k: str = "f16",
        type_v: str = "f16",
        n_ctx: int = 1024,
        flash: bool = True,
        n_sequences: int = 1,
        ubatch: int = 512,
    ) -> None:
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_ctx, min(ubatch, n_ctx), n_sequences
        params.type_k, params.type_v = (BLOCK_TYPES[name].ggml_type for name in (type_k, type_v))
        params.flash_attn_type, params.swa_full, params.kv_unified = int(flash), False, True
        params.n_threads = params.n_threads_batch = 1
        self.model = model
        self.handle = c.llama_init_from_model(model.handle, params)
        self.n = 0

    def evaluate(self, tokens: Sequence[int], sequence: int = 0) -> None:
        """The next tokens of a sequence."""
        batch = c.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, self.n + i, 1, sequence
            batch.logits[i] = i == len(tokens) - 1
        assert c.llama_decode(self.handle, batch) == 0
        c.llama_batch_free(batch)
        self.n += len(tokens)

    def logits(self) -> np.ndarray:
        n = c.llama_vocab_n_tokens(self.model.vocabulary)
        return np.ctypeslib.as_array(c.llama_get_logits_ith(self.handle, -1), shape=(n,)).copy()

    def greedy(self, n: int) -> list[int]:
        """The next n tokens."""
        chosen: list[int] = []
        for _ in range(n):
            chosen.append(int(self.logits().argmax()))
            self.evaluate(chosen[-1:])
        return chosen

    def save(self, path: Path, kind: str, tokens: Sequence[int], sequence: int = 0) -> Path:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        name = str(path).encode()
        if kind == "session":
            assert c.llama_state_save_file(self.handle, name, ids, len(tokens))
        else:
            assert c.llama_state_seq_save_file(self.handle, name, sequence, ids, len(tokens))
        return path

    def load(self, path: Path, kind: str) -> list[int] | None:
        """The tokens of a file, None if llama.cpp refuses it. As its own tools do, the last position is dropped and the
        last token evaluated again, for a file has no logits.
        """
        ids, n = (ctypes.c_int32 * MAX_TOKENS)(), ctypes.c_size_t()
        name = str(path).encode()
        if kind == "session":
            sound = c.llama_state_load_file(self.handle, name, ids, MAX_TOKENS, ctypes.byref(n))
        else:
            sound = c.llama_state_seq_load_file(self.handle, name, 0, ids, MAX_TOKENS, ctypes.byref(n))
        if not sound:
            return None
        tokens = ids[: n.value]
        self.n = len(tokens) - 1
        c.llama_memory_seq_rm(c.llama_get_memory(self.handle), 0, self.n, -1)
        self.evaluate(tokens[-1:])
        return tokens

    def close(self) -> None:
        c.llama_free(self.handle)
