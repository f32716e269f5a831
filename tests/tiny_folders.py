"""Tiny MLX model folders for tests: an mlx-lm model of any type with random weights, saved as mlx-lm saves it, and a
tokenizer.json with the vocabulary of `tiny_models`, as Hugging Face's `tokenizers` writes it.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tiny_models import CHAT_TEMPLATE, MERGES, SPECIAL, vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(vocabulary()),
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write_folder(
    folder: Path,
    model_type: str = "llama",
    *,
    dtype: mx.Dtype = mx.float32,
    quantization: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A complete folder. `quantization`: mlx's group_size, bits and mode; `config`: more entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": model_type, **SIZES, "eos_token_id": len(vocabulary()) - 1, **(config or {})}
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(settings))
    model.set_dtype(dtype)
    if quantization:
        nn.quantize(model, **quantization)
        settings["quantization"] = quantization
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    write_json(folder / "config.json", settings)
    byte_level().save(str(folder / "tokenizer.json"))
    roles = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[2], "special": True}}
    write_json(folder / "tokenizer_config.json", {**roles, "chat_template": CHAT_TEMPLATE})
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def byte_level() -> Tokenizer:
    """The vocabulary of `tiny_models` as a byte-level BPE."""
    ids = {text: i for i, text in enumerate(vocabulary()[: -len(SPECIAL)])}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split()) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A vocabulary in SentencePiece's manner: spaces as U+2581, bytes as <0xXX>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    ids = {text: i for i, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer
