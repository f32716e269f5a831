"""Which type each tensor of a model gets when its weights are to be of a given type: llama-quantize's rules.

Source: llama.cpp's llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type), of mid 2026. Where it chooses a
K-quant, which nothing here encodes, its own substitute for rows that no K-quant fits takes that place, so that no
tensor gets fewer bits than there. Data is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf.types import GGML_TYPES

FILE_TYPES: Final[dict[str, int]] = {
    "f32": 0,
    "f16": 1,
    "bf16": 32,
    "q8_0": 7,
    "q5_1": 9,
    "q5_0": 8,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 25,
}
"""Types that weights can be converted to -> `general.file_type` (llama.h, LLAMA_FTYPE)."""

QUANTIZATION_VERSION: Final = 2  # ggml.h, GGML_QNT_VERSION

KEPT_NAMES: Final = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
"""Parts of names of tensors that stay as they are: small, or sensitive."""
KEPT: Final = frozenset({"position_embd.weight", "token_types.weight"})

_NO_MATRIX = "one-dimensional"
_NO_WEIGHT = "kept by name"
_NOT_FLOAT = "whole numbers"
_OUTPUT = "the output layer"
_SENSITIVE = "a sensitive layer"
_ROWS = "rows of no whole blocks"

_OUTPUTS = ("output.weight",)
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_BLOCK = 32
_SUBSTITUTES = {"q6_k": "q8_0", "q5_k": "q5_1"}


@dataclass(frozen=True)
class ModelFacts:
    """What the rules ask of a model; zeros where its metadata does not say."""

    architecture: str = ""
    n_layers: int = 0
    n_experts: int = 0
    n_gqa: int = 0
    is_tied: bool = True


@dataclass(frozen=True)
class Choice:
    """The type that a tensor gets, and why it is not the one that was asked for ("" if it is)."""

    ggml_type: int
    reason: str = ""


def facts_of(file: GGUFFile) -> ModelFacts:
    """What a GGUF says of its model; whatever is absent or of another kind counts as not said."""
    architecture = file.metadata.get("general.architecture")
    prefix = architecture if isinstance(architecture, str) else ""

    def number(key: str) -> int:
        value: Any = file.metadata.get(f"{prefix}.{key}")
        if isinstance(value, np.ndarray) and len(value):
            value = value[0]
        return int(value) if isinstance(value, int | np.integer) else 0

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    return ModelFacts(
        architecture=prefix,
        n_layers=number("block_count"),
        n_experts=number("expert_count"),
        n_gqa=heads // kv_heads if kv_heads else 0,
        is_tied="output.weight" not in file.tensors,
    )


def choose(info: TensorInfo, wanted: str, model: ModelFacts) -> Choice:
    """The type of a tensor where weights are to be of type `wanted`, a key of FILE_TYPES."""
    kept = _why_kept(info)
    if kept:
        return Choice(info.ggml_type, kept if info.ggml_type != _type_id(wanted) else "")
    if BLOCK_TYPES[wanted].family == "float":
        return Choice(_type_id(wanted))
    columns = info.shape[-1]
    name, reason = _mixed(info.name, columns, wanted, model)
    if columns % _BLOCK:
        name, reason = "f16", _ROWS
    return Choice(_type_id(name), reason if name != wanted else "")


def summary(reasons: Iterable[str]) -> dict[str, int]:
    """How often each reason was given, the most frequent first."""
    found = [reason for reason in reasons if reason]
    return {reason: found.count(reason) for reason in sorted(set(found), key=lambda r: (-found.count(r), r))}


def _why_kept(info: TensorInfo) -> str:
    if len(_stripped(info.shape)) < 2:
        return _NO_MATRIX
    kept = info.name in KEPT or any(part in info.name for part in KEPT_NAMES)
    if kept or not info.name.endswith("weight"):
        return _NO_WEIGHT
    ggml_type = GGML_TYPES.get(info.ggml_type)
    is_whole = ggml_type is not None and ggml_type.dtype is not None and ggml_type.name.startswith("I")
    return _NOT_FLOAT if is_whole else ""


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading ones, which ggml does not count as dimensions."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _type_id(name: str) -> int:
    number = BLOCK_TYPES[name].ggml_type
    assert number is not None
    return number


def _mixed(name: str, columns: int, wanted: str, model: ModelFacts) -> tuple[str, str]:
    """The type for a matrix, the mixture of llama-quantize being what it is."""
    chosen, reason = wanted, ""
    few_experts = model.n_experts == 8  # Mixtral's number, which llama-quantize asks for as such
    if name in _OUTPUTS or (model.is_tied and name in _EMBEDDINGS):
        reason = _OUTPUT
        if model.architecture == "falcon" or columns % _BLOCK:
            chosen = "q8_0"
        elif wanted != "q8_0":
            chosen = "q6_k"
    elif any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")):
        reason = _SENSITIVE
        if few_experts:
            chosen = "q8_0"
        elif wanted == "iq4_nl" and model.n_gqa >= 4:
            chosen = "q5_k"
    elif "attn_k.weight" in name and few_experts:
        chosen, reason = "q8_0", _SENSITIVE
    elif wanted == "iq4_nl" and _is_sensitive_to_iq4(name, model):
        chosen, reason = "q5_k", _SENSITIVE
    return _SUBSTITUTES.get(chosen, chosen), reason


def _is_sensitive_to_iq4(name: str, model: ModelFacts) -> bool:
    if "ffn_down" in name:
        return 0 <= _layer(name) < model.n_layers // 8
    return "attn_output.weight" in name and model.n_experts == 8 and model.architecture != "falcon"


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
