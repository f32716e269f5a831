"""A llama model of two layers that was constructed, not trained, and continues any text that it has seen before.

    path = write_induction(tmp_path / "m.gguf")

Layer 0 has a previous-token head: query and key are the same for all tokens, and turned by RoPE's fast pairs so that
their product is largest one position back; it writes the code of the token before into a part of the residual stream of
its own. Layer 1 has an induction head: it looks, with RoPE's slow pairs, which hardly turn within the context, for the
position whose previous token is the current one, and writes that position's token into a third part. The output layer
reads that part. So after "... is 4" earlier, "... is" is followed by "4", at any distance, if "is" stands nowhere else.

With `key_constant`, one more channel of layer 1's keys holds that number in every key, as some of Qwen2.5's do; no
query looks at it. Codes of tokens are random directions, so that each differs clearly from every other. The vocabulary
is `tiny_models`' with some more merges: " is", and a digit after a blank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf_builder import build_gguf
from tiny_models import MERGES, SPECIAL, TinyModel, model_metadata, vocabulary

N_CTX = 8192
HEAD_DIM = 64
CODE = 64  # channels of a token's code
CONSTANT = 3 * CODE  # the channel that is the same for all tokens
HIDDEN = 256
ROPE_BASE = 1e9
N_FAST = 14  # pairs that tell one position from the next, and from all others
N_SLOW = 16  # pairs that turn by less than 0.3 within the context
SHARPNESS = 12.0  # of the previous-token head, per pair
FREE_PAIR = 15  # between the two kinds, where the constant goes
MATCH = 60.0  # the score of the position looked for

MORE_MERGES = ("Ġ is", *(f"Ġ {digit}" for digit in range(10)))


def tokens() -> list[str]:
    return [*vocabulary()[: -len(SPECIAL)], *(merge.replace(" ", "") for merge in MORE_MERGES), *SPECIAL]


def induction_gguf(key_constant: float = 0.0) -> bytes:
    spec = TinyModel(
        n_layers=2, hidden_size=HIDDEN, intermediate_size=32, n_heads=1, n_kv_heads=1, head_dim=HEAD_DIM, tied=False,
        context_length=N_CTX, rope_base=ROPE_BASE, with_chat_template=False,
    )  # fmt: skip
    vocabulary = tokens()
    last = len(vocabulary) - 1
    changes: dict[str, Any] = {
        "general.name": "induction",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * (len(vocabulary) - len(SPECIAL)) + [3] * len(SPECIAL),
        "tokenizer.ggml.merges": [*MERGES, *MORE_MERGES],
        "tokenizer.ggml.bos_token_id": last - 2,
        "tokenizer.ggml.eos_token_id": last,
        "tokenizer.ggml.padding_token_id": last - 2,
    }
    return build_gguf({**model_metadata(spec), **changes}, _tensors(len(vocabulary), key_constant))


def write_induction(path: Path, key_constant: float = 0.0) -> Path:
    path.write_bytes(induction_gguf(key_constant))
    return path


def codes(n_tokens: int) -> np.ndarray:
    """Unit vectors [n_tokens, CODE], and so are their first halves times sqrt(2): the halves are what keys hold."""
    random = np.random.default_rng(5)
    halves = random.standard_normal((2, n_tokens, CODE // 2))
    halves /= np.linalg.norm(halves, axis=-1, keepdims=True)
    return np.concatenate(list(halves), axis=-1) / math.sqrt(2)


def _tensors(n_tokens: int, key_constant: float) -> dict[str, np.ndarray]:
    code = codes(n_tokens)
    embedding = np.zeros((n_tokens, HIDDEN))
    embedding[:, :CODE], embedding[:, CONSTANT] = code, 1.0
    output = np.zeros((n_tokens, HIDDEN))
    output[:, 2 * CODE : CONSTANT] = code * 40
    found = {"token_embd.weight": embedding, "output.weight": output, "output_norm.weight": np.ones(HIDDEN)}
    # RMSNorm divides by the root mean square: of code and constant in layer 0, of the previous token's code too in 1
    sizes = (math.sqrt(2 / HIDDEN), math.sqrt(3 / HIDDEN))
    for i, (q, k, v, o) in enumerate((_previous_token(), _induction(key_constant))):
        found |= {
            f"blk.{i}.attn_norm.weight": np.full(HIDDEN, sizes[i]),
            f"blk.{i}.attn_q.weight": q,
            f"blk.{i}.attn_k.weight": k,
            f"blk.{i}.attn_v.weight": v,
            f"blk.{i}.attn_output.weight": o,
            f"blk.{i}.ffn_norm.weight": np.ones(HIDDEN),
            f"blk.{i}.ffn_gate.weight": np.zeros((32, HIDDEN)),
            f"blk.{i}.ffn_up.weight": np.zeros((32, HIDDEN)),
            f"blk.{i}.ffn_down.weight": np.zeros((HIDDEN, 32)),
        }
    return {name: np.ascontiguousarray(values, np.float32) for name, values in found.items()}


def _moved(source: int, target: int, n: int = CODE) -> tuple[np.ndarray, np.ndarray]:
    """V and output matrices that copy n channels of the residual stream from `source` to `target`."""
    v, o = np.zeros((HEAD_DIM, HIDDEN)), np.zeros((HIDDEN, HEAD_DIM))
    v[np.arange(n), source + np.arange(n)] = 1
    o[target + np.arange(n), np.arange(n)] = 1
    return v, o


def _previous_token() -> tuple[np.ndarray, ...]:
    q, k = np.zeros((2, HEAD_DIM, HIDDEN))
    pair = np.arange(N_FAST)
    angle = ROPE_BASE ** (-pair / (HEAD_DIM // 2))
    # a query turned back by one position: equal to the key of the position before
    k[2 * pair, CONSTANT] = SHARPNESS
    q[2 * pair, CONSTANT], q[2 * pair + 1, CONSTANT] = SHARPNESS * np.cos(angle), -SHARPNESS * np.sin(angle)
    return q, k, *_moved(0, CODE)


def _induction(key_constant: float) -> tuple[np.ndarray, ...]:
    q, k = np.zeros((2, HEAD_DIM, HIDDEN))
    half = np.arange(2 * N_SLOW)
    size = math.sqrt(MATCH * math.sqrt(HEAD_DIM) * 2)  # half a code has half its length squared
    first = HEAD_DIM - 2 * N_SLOW
    q[first + half, half] = size
    k[first + half, CODE + half] = size
    k[2 * FREE_PAIR, CONSTANT] = key_constant
    return q, k, *_moved(0, 2 * CODE)
