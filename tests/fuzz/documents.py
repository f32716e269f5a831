"""Hypothesis strategies for whole GGUF files, by the in-memory builder: any metadata under known keys, any tensors."""

from __future__ import annotations

from typing import Any

from gguf_builder import (
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Payload,
    Tensor,
    Typed,
    build_gguf,
)
from hypothesis import strategies as st

from tqgguf.formats.gguf.model_keys import ARCHITECTURE_KEYS, ARRAY_KEYS, PER_LAYER_KEYS, PLAIN_KEYS
from tqgguf.formats.gguf.types import GGML_TYPES

KEYS = (
    *PLAIN_KEYS, *ARRAY_KEYS, *(f"llama.{suffix}" for suffix in (*ARCHITECTURE_KEYS, *PER_LAYER_KEYS)),
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eog_token_ids", "general.alignment", "split.no", "split.count",
    "split.tensors.count", "tqgguf.calibration.version", "tqgguf.fingerprint.version", "tqgguf.snapshot.version",
    "tqgguf.snapshot.layers", "tqgguf.layer.number", "tqgguf.codec.type", "other", "", b"\xff",
)  # fmt: skip
TEXTS = (
    "llama",
    "qwen3",
    "mamba",
    "model",
    "adapter",
    "kv-snapshot",
    "kv-calibration",
    "gpt2",
    "default",
    "",
    b"\xff\xfe",
)
NAMES = (
    "token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight",
    "tokens", "checksums", "blk.0.attn_k.rows", "blk.0.attn_k.channel_scale", "blk.999999999.x", "n" * 64, "", b"\xff",
)  # fmt: skip
BITS = {U8: (0, 8), I8: (1, 8), U16: (0, 16), I16: (1, 16), U32: (0, 32), I32: (1, 32), U64: (0, 64), I64: (1, 64)}

texts = st.sampled_from(TEXTS) | st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass"))


def numbers(type_id: int) -> st.SearchStrategy[Any]:
    """Values of one type that GGUF's builder can pack."""
    if type_id in (F32, F64):
        return st.floats(width=32)
    if type_id == BOOL:
        return st.integers(0, 255)
    signed, bits = BITS[type_id]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    small = [n for n in (0, 1, 2, 8, 32, 64) if n <= high]
    return st.integers(low, high) | st.sampled_from(small)


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] * 2 if depth else [7]


scalar_types = st.sampled_from((*BITS, F32, F64, BOOL))
scalars = scalar_types.flatmap(lambda kind: numbers(kind).map(lambda value: Typed(kind, value)))
arrays = scalar_types.flatmap(lambda kind: st.lists(numbers(kind), max_size=5).map(lambda x: Typed(kind, x)))
text_arrays = st.lists(texts, max_size=4).map(lambda values: Typed(STRING, values))
nested = st.integers(1, 6).map(_nested) | st.just([[1, 2], [], [3]])
payloads = st.builds(Payload, st.integers(0, 14), st.binary(max_size=20))
values = st.one_of(scalars, texts, arrays, text_arrays, nested, payloads)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor with the data that its type and shape need, unless something about it is odd."""
    kind = draw(st.sampled_from((*GGML_TYPES, 4, 42, 99)))
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 32, 64, 256)), max_size=3)))
    known = GGML_TYPES.get(kind)
    size = 1
    for n in shape:
        size *= n
    n_bytes = 0 if known is None else min(size // known.block_size * known.block_bytes, 4096)
    fill = draw(st.sampled_from((0x00, 0x3C, 0x7F, 0xFF)))
    odd = draw(st.sampled_from(("sound", "sound", "dims", "n_dims", "offset")))
    return Tensor(
        shape,
        kind,
        bytes([fill]) * n_bytes,
        dims=tuple(draw(st.lists(st.integers(0, (1 << 64) - 1), max_size=5))) if odd == "dims" else None,
        n_dims=draw(st.integers(0, (1 << 32) - 1)) if odd == "n_dims" else None,
        offset=draw(st.integers(0, (1 << 64) - 1)) if odd == "offset" else None,
    )


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """A file."""
    metadata = draw(st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=12))
    named = draw(st.lists(st.tuples(st.sampled_from(NAMES), tensors()), max_size=5))
    return build_gguf(metadata, named, pad_end=draw(st.booleans()))
