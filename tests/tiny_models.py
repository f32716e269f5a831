"""Tiny seeded GGUF models for tests: every served architecture, real in all but their weights, which are random.

    path = write_tiny(tmp_path / "m.gguf", TinyModel("qwen3", head_dim=128, weights="Q8_0"))

A model holds what llama.cpp needs to load it: hyper-parameters, a byte-level BPE vocabulary of 288 tokens with ChatML's
special tokens and template, and weights of any type that gguf-py can quantise. Numbers come from the raw bits of PCG64,
which numpy promises never to change, so a spec stands for the same bytes everywhere; `fingerprint` says which.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_builder import U32, Typed, build_gguf, quantised

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
    "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


Changes = dict[str, Any]


@dataclass(frozen=True)
class TinyModel:
    """One tiny model. `weights` and `embedding`: types of the matrices and of token_embd (None: as `weights`)."""

    architecture: str = "llama"
    n_layers: int = 2
    hidden_size: int = 256
    intermediate_size: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    tied: bool = True
    weights: str = "F32"
    embedding: str | None = None
    context_length: int = 2048
    rope_base: float = 10000.0
    rope_base_local: float | None = None
    rope_scale: float | None = None
    """Linear scaling factor of positions."""
    rope_factors: bool = False
    """Write rope_freqs.weight, llama 3's factor per pair."""
    window: int | None = None
    window_pattern: int | None = None
    """Every n-th layer is global (gemma3). None: the key is not written."""
    with_chat_template: bool = True
    seed: int = 0


def vocabulary() -> list[str]:
    """288 tokens: GPT-2's letters of all bytes in order, the merges' results, the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    return [*letters, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def tokenizer_metadata(with_chat_template: bool = True) -> dict[str, Any]:
    tokens = vocabulary()
    n_special = len(SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - n_special) + [3] * n_special,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.padding_token_id": len(tokens) - 3,
        "tokenizer.ggml.add_bos_token": False,
    } | ({"tokenizer.chat_template": CHAT_TEMPLATE} if with_chat_template else {})


def model_metadata(model: TinyModel) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": model.n_layers,
        "context_length": model.context_length,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.intermediate_size,
        "attention.head_count": model.n_heads,
        "attention.head_count_kv": model.n_kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": model.rope_base,
    }
    if model.architecture == "llama":
        keys["rope.dimension_count"] = model.head_dim
    if model.rope_scale is not None:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": model.rope_scale}
    if model.rope_base_local is not None:
        keys["rope.freq_base_swa"] = model.rope_base_local
    if model.window is not None:
        keys["attention.sliding_window"] = model.window
    if model.window_pattern is not None:
        keys["attention.sliding_window_pattern"] = Typed(U32, model.window_pattern)
    return {
        "general.architecture": model.architecture,
        "general.name": f"tiny {model.architecture}",
        **{f"{model.architecture}.{suffix}": value for suffix, value in keys.items()},
        **tokenizer_metadata(model.with_chat_template),
    }


DTYPES = {"F32": np.float32, "F16": np.float16}


def model_tensors(model: TinyModel) -> dict[str, Any]:
    """Every tensor of the model, in `gguf_builder`'s form."""
    return {
        name: quantised(values, kind) if kind not in ("F32", "F16") else values.astype(DTYPES[kind])
        for name, (values, kind) in _weights(model).items()
    }


def tiny_gguf(model: TinyModel, metadata: Changes | None = None, tensors: Changes | None = None) -> bytes:
    """The GGUF file of a spec, with entries and tensors added or replaced; the value None removes one."""
    return build_gguf(_changed(model_metadata(model), metadata), _changed(model_tensors(model), tensors))


def write_tiny(path: Path, model: TinyModel, metadata: Changes | None = None, tensors: Changes | None = None) -> Path:
    """Write a spec's file; changes as in `tiny_gguf`."""
    path.write_bytes(tiny_gguf(model, metadata, tensors))
    return path


def _changed(items: dict[str, Any], changes: Changes | None) -> dict[str, Any]:
    return {name: value for name, value in {**items, **(changes or {})}.items() if value is not None}


def fingerprint(model: TinyModel) -> str:
    """SHA-256 of the spec's file: says whether recorded results still belong to what is built now."""
    return hashlib.sha256(tiny_gguf(model)).hexdigest()


def _weights(model: TinyModel) -> dict[str, tuple[np.ndarray, str]]:
    h, ffn = model.hidden_size, model.intermediate_size
    q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    gemma, qwen2 = model.architecture == "gemma3", model.architecture == "qwen2"
    head_norms = model.architecture in ("qwen3", "gemma3")
    random = _Uniform(model.seed)
    n_vocabulary = len(vocabulary())
    made: dict[str, tuple[np.ndarray, str]] = {}

    def matrix(name: str, rows: int, columns: int, kind: str, size: float = 1.0) -> None:
        made[name] = random((rows, columns), size / np.sqrt(columns)), kind

    def vector(name: str, n: int, middle: float, size: float) -> None:
        made[name] = np.float32(middle) + random((n,), size), "F32"

    matrix("token_embd.weight", n_vocabulary, h, model.embedding or model.weights, 4.0)
    if not model.tied:
        matrix("output.weight", n_vocabulary, h, model.weights, 4.0)
    vector("output_norm.weight", h, 1.0, 0.2)
    if model.rope_factors:
        made["rope_freqs.weight"] = np.linspace(1.0, 8.0, model.head_dim // 2, dtype=np.float32), "F32"
    for i in range(model.n_layers):
        vector(f"blk.{i}.attn_norm.weight", h, 1.0, 0.2)
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            matrix(f"blk.{i}.{name}.weight", rows, h, model.weights, 1.5)
            if qwen2:
                vector(f"blk.{i}.{name}.bias", rows, 0.0, 0.5)
        if head_norms:
            vector(f"blk.{i}.attn_q_norm.weight", model.head_dim, 1.5, 0.3)
            vector(f"blk.{i}.attn_k_norm.weight", model.head_dim, 1.5, 0.3)
        matrix(f"blk.{i}.attn_output.weight", h, q, model.weights)
        if gemma:
            vector(f"blk.{i}.post_attention_norm.weight", h, 1.0, 0.2)
        vector(f"blk.{i}.ffn_norm.weight", h, 1.0, 0.2)
        matrix(f"blk.{i}.ffn_gate.weight", ffn, h, model.weights, 1.5)
        matrix(f"blk.{i}.ffn_up.weight", ffn, h, model.weights, 1.5)
        matrix(f"blk.{i}.ffn_down.weight", h, ffn, model.weights)
        if gemma:
            vector(f"blk.{i}.post_ffw_norm.weight", h, 1.0, 0.2)
    return made


class _Uniform:
    """Float32 values of a given standard deviation, evenly distributed, from raw bits: the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
        raw = self._bits.random_raw(int(np.prod(shape))) >> np.uint64(40)  # 24 bits: exact in float32
        unit = raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        return (unit * np.float32(deviation * np.sqrt(3.0))).reshape(shape)


# Models whose logits llama.cpp has computed: see data/README.md. Each turns on something that is easy to get wrong.
ORACLE_CASES: dict[str, TinyModel] = {
    "llama": TinyModel("llama", seed=1),
    "llama heads wider than hidden": TinyModel("llama", hidden_size=128, head_dim=96, n_kv_heads=1, tied=False, seed=2),
    "llama rope factors": TinyModel("llama", rope_factors=True, rope_base=500000.0, seed=3),
    "llama linear scaling": TinyModel("llama", rope_scale=4.0, seed=4),
    "llama factors and scaling": TinyModel("llama", rope_factors=True, rope_scale=2.0, seed=5),
    "qwen2 biases": TinyModel("qwen2", rope_base=1e6, seed=6),
    "qwen3 head norms": TinyModel("qwen3", head_dim=128, n_kv_heads=4, rope_base=1e6, tied=False, seed=7),
    "gemma3 window": TinyModel(
        "gemma3", n_layers=3, head_dim=128, n_kv_heads=1, window=8, window_pattern=2, rope_base=1e6, seed=8
    ),
    "gemma3 two bases": TinyModel(
        "gemma3", n_layers=3, window=16, window_pattern=3, rope_base=1e6, rope_base_local=5000.0, rope_scale=8.0, seed=9
    ),
    "gemma3 odd hidden size": TinyModel("gemma3", hidden_size=160, n_layers=3, window=8, window_pattern=2, seed=10),
    "gemma3 no window": TinyModel("gemma3", head_dim=256, n_heads=2, n_kv_heads=1, rope_base=1e6, seed=11),
    "gemma3 six layers": TinyModel("gemma3", hidden_size=128, n_layers=6, window=8, rope_base=1e6, seed=12),
}
ORACLE_TOKENS = [(i * i * 7 + i * 31 + 5) % 280 for i in range(40)]
ORACLE_POSITIONS = (0, 7, 8, 9, 23, 39)
