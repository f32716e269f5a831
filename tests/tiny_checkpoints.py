"""Tiny seeded Hugging Face checkpoints for tests: config.json, model.safetensors, a tokenizer; always the same bytes.

    folder = write_checkpoint(tmp_path / "a", CASES["qwen3"])

Weights come from the raw bits of PCG64 (see `tiny_models`), files from plain struct packing and json.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_folders import byte_level, write_json
from tiny_models import CHAT_TEMPLATE, SPECIAL, vocabulary

N_TOKENS = len(vocabulary())
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": N_TOKENS,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
GEMMA = {
    "num_hidden_layers": 7,  # the sixth sees everything
    "hidden_size": 64,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
BYTE_LEVEL_SETTINGS = {
    "bos_token": SPECIAL[0],
    "eos_token": SPECIAL[2],
    "pad_token": SPECIAL[0],
    "chat_template": CHAT_TEMPLATE,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
PIECE_SETTINGS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "add_eos_token": False,
    "added_tokens_decoder": {
        "274": {"content": "<start_of_turn>", "special": True},
        "275": {"content": "▁▁", "special": False},
    },
}
WORDS = ("▁", "t", "h", "e", "o", "n", "w", "a", "r", "▁t", "▁th", "▁the", "he")
PIECES: tuple[tuple[str, float, int], ...] = (
    *((text, 0.0, kind) for text, kind in (("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2))),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((text, -float(i), 1) for i, text in enumerate(WORDS)),
    ("<user>", 0.0, 4),
)
"""Text, score and type (sentencepiece's) of a vocabulary's pieces."""


@dataclass(frozen=True)
class Case:
    """One checkpoint. dtype: F32, F16 or BF16; outtype: what llama.cpp's converter makes of that by itself."""

    model_type: str
    class_name: str
    dtype: str
    outtype: str
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: BYTE_LEVEL_SETTINGS)
    has_pieces: bool = False
    tied: bool = True


CASES: dict[str, Case] = {
    "llama": Case("llama", "LlamaForCausalLM", "BF16", "bf16", tied=False),
    "llama3": Case("llama", "LlamaForCausalLM", "F16", "f16", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama2": Case(
        "llama", "LlamaForCausalLM", "F16", "f16",
        settings={"bos_token": "<bos>", "eos_token": "<eos>", "add_prefix_space": True, "add_bos_token": True},
        has_pieces=True,
    ),
    "qwen2": Case("qwen2", "Qwen2ForCausalLM", "F32", "f16", {"head_dim": None, "hidden_size": 256}),
    "qwen3": Case("qwen3", "Qwen3ForCausalLM", "BF16", "bf16", {"rope_scaling": YARN}),
    "gemma3": Case("gemma3_text", "Gemma3ForCausalLM", "BF16", "bf16", GEMMA, PIECE_SETTINGS, True),
    "gemma3-f16": Case("gemma3_text", "Gemma3ForCausalLM", "F16", "f16", GEMMA, PIECE_SETTINGS, True),
}  # fmt: skip


def write_checkpoint(folder: Path, case: Case, **config: Any) -> Path:
    """Write a checkpoint; `config` are more entries of config.json, and None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        "architectures": [case.class_name],
        "model_type": case.model_type,
        **SIZES,
        "tie_word_embeddings": case.tied,
        **case.config,
        **config,
    }
    entries = {key: value for key, value in entries.items() if value is not None}
    write_json(folder / "config.json", entries)
    write_safetensors(folder / "model.safetensors", checkpoint_tensors(case), case.dtype)
    if case.has_pieces:
        (folder / "tokenizer.model").write_bytes(pieces_file(PIECES))
    else:
        byte_level().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", case.settings)
    return folder


def checkpoint_tensors(case: Case) -> dict[str, np.ndarray]:
    """float32 weights by their names."""
    sizes = {**SIZES, **case.config}
    hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    head_dim = sizes["head_dim"] or hidden // sizes["num_attention_heads"]
    q, kv = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    is_gemma, is_qwen2 = case.model_type == "gemma3_text", case.model_type == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (N_TOKENS, hidden)}
    for i in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
            if is_qwen2:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, q)
        if is_gemma or case.model_type == "qwen3":
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if is_gemma else []
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in norms}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not case.tied:
        shapes["lm_head.weight"] = (N_TOKENS, hidden)
    bits = np.random.PCG64(0)
    made = {}
    for name, shape in shapes.items():
        raw = bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
        unit = (raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)
        is_norm = name.endswith("norm.weight")
        middle = np.float32(0 if is_gemma or not is_norm else 1)
        made[name] = middle + unit * np.float32(0.3 if len(shape) == 1 else 2 / np.sqrt(shape[1]))
    return made


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        raw = _stored(values, dtype).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # cut, not rounded: any bytes will do
        return (values.view(np.uint32) >> np.uint32(16)).astype("<u2")
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype])


def pieces_file(pieces: Sequence[tuple[str, float, int]]) -> bytes:
    """A tokenizer.model: the pieces, then a trainer_spec (BPE, byte fallback, ids of unk, bos, eos and pad)."""
    fields = b"".join(_field(1, _piece(*piece)) for piece in pieces)
    spec = {3: 2, 4: len(pieces), 35: 1, 40: 3, 41: 2, 42: 1, 43: 0}
    return fields + _field(2, b"".join(_varint(key << 3) + _varint(value) for key, value in spec.items()))


def _piece(text: str, score: float, kind: int) -> bytes:
    return _field(1, text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _varint(3 << 3) + _varint(kind)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(n: int) -> bytes:
    groups = b""
    while n > 127:
        groups += bytes([n & 127 | 128])
        n >>= 7
    return groups + bytes([n])
