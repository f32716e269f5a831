"""Makes vectors/ from the package: `python spec/make_vectors.py`, in an environment that has tqgguf.

Inputs, blocks and decoded values; turbo-fork.json and ggml-reference.json are others' work and not made here.
tests/test_spec_blocks.py holds the results against an implementation that shares no code with the package.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from make_tables import FLOATS, GGML, HEAD_DIMS, SPEC, TURBO, write

from tqgguf.formats.blocks.balance import (
    RopeLayout,
    balance_rows,
    centred_squares,
    channel_scale,
    counted_rows,
    page_mean,
    unbalance_rows,
)
from tqgguf.formats.blocks.block_types import BLOCK_TYPES, PAGE_TOKENS
from tqgguf.formats.blocks.cache_spec import TURBO_PREFIX
from tqgguf.formats.blocks.codec import Codec, resolve_codec


def lcg(n: int) -> np.ndarray:
    values, s = [], 12345
    for _ in range(n):
        s = (s * 1664525 + 1013904223) % 2**32
        values.append(((s >> 8) - 2**23) / 2**23)
    return np.array(values, np.float32)


def ramp(n: int) -> np.ndarray:
    return ((np.arange(n) - (n - 1) / 2) / 64).astype(np.float32)


def one_hot(n: int, at: int, value: float = 1.0, rest: float = 0.0) -> np.ndarray:
    x = np.full(n, rest, np.float32)
    x[at] = value
    return x


def normal(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def turbo_inputs(n: int) -> dict[str, np.ndarray]:
    few = {
        "zero": np.zeros(n, np.float32),
        "one_hot_first": one_hot(n, 0),
        "one_hot_last_negative": one_hot(n, n - 1, -3.0),
        "lcg": lcg(n),
        "ramp": ramp(n),
        "normal": normal(n, n),
        "constant_1e4": np.full(n, 1e4, np.float32),
        "one_and_denormals": one_hot(n, 0, 1.0, -1e-40),
    }
    if n != 128:
        return few
    return few | {
        "negative_zero": np.full(n, -0.0, np.float32),
        "constant_1": np.full(n, 1, np.float32),
        "constant_-2.5": np.full(n, -2.5, np.float32),
        "pair_half_of_it_rotates_to_zero": one_hot(n, 0) + one_hot(n, 1, -1.0),
        "heavy_tails": normal(n, 3) ** 5,
        "spike_1e6": one_hot(n, 5, 1e6, 1.0),
        "squares_overflow": np.full(n, 1e20, np.float32) * np.sign(lcg(n)),
        "largest_float32": np.full(n, np.finfo(np.float32).max, np.float32),
        "norm_just_above_1e-10": np.float32(9e-12) * np.sign(lcg(n)).astype(np.float32),
        "norm_just_below_1e-10": np.float32(8e-12) * np.sign(lcg(n)).astype(np.float32),
        "norm_is_a_denormal_f16": lcg(n) * np.float32(1e-6),
        "denormals": np.full(n, 1e-40, np.float32),
    }


def on_a_boundary(name: str, group: int) -> np.ndarray:
    """A random vector of which one rotated value equals a boundary that is not zero."""
    codec, rng = resolve_codec(name, group, "k"), np.random.default_rng(5)
    assert codec.rotation is not None and codec.boundaries is not None
    targets = codec.boundaries[codec.boundaries != 0]
    while True:
        x = rng.standard_normal((20_000, group)).astype(np.float32)
        norm = np.sqrt(np.add.accumulate(x * x, axis=1, dtype=np.float32)[:, -1:])
        rotated = codec.rotation.forward(x * (np.float32(1) / norm))
        found = np.isin(rotated, targets).any(axis=1)
        if found.any():
            return x[np.argmax(found)]


def case(codec: Codec, name: str, x: np.ndarray, **more: Any) -> dict[str, Any]:
    blocks = codec.encode(x)
    values = {"decoded_f32": hexed(codec.decode(blocks), "<f4")}
    if codec.rotation is not None:
        values = {"decoded_rotated_f32": hexed(codec.decode_rotated(blocks), "<f4")} | values
    return {"input": name, **more, "bytes": blocks.tobytes().hex(), **values}


def hexed(values: Any, dtype: str) -> str:
    return np.ascontiguousarray(values, dtype).tobytes().hex()


def turbo_vectors(head_dim: int) -> dict[str, Any]:
    inputs = turbo_inputs(head_dim)
    cases = []
    for name in TURBO:
        codec = resolve_codec(name, head_dim, "k")
        extra = {} if head_dim > 192 else {f"on_a_boundary_of_{name}": on_a_boundary(name, head_dim)}
        inputs |= extra
        for input_name, x in inputs.items():
            if input_name.startswith("on_a_boundary") and input_name not in extra:
                continue
            made = case(codec, input_name, x, type=name)
            if input_name != "lcg":
                del made["decoded_rotated_f32"]
            cases.append(made)
    return {
        "what": f"turbo blocks of head vectors of {head_dim} values, codebook generation 3",
        "head_dim": head_dim,
        "inputs_f32": {name: hexed(x, "<f4") for name, x in inputs.items()},
        "cases": cases,
    }


def ggml_edges() -> dict[str, np.ndarray]:
    """Blocks of 32 values beyond those that ggml's own code was recorded with."""
    n = 32
    half_steps = (np.arange(n, dtype=np.float32) - 16) / 2  # in steps of the scale: ties everywhere
    return {
        "zero": np.zeros(n, np.float32),
        "negative_zero": np.full(n, -0.0, np.float32),
        "negative_zero_first": one_hot(n, 0, -0.0),
        "one_hot_first": one_hot(n, 0),
        "one_hot_last_negative": one_hot(n, n - 1, -3.0),
        "both_extremes_negative_first": one_hot(n, 3, -4.0) + one_hot(n, 9, 4.0),
        "both_extremes_positive_first": one_hot(n, 3, 4.0) + one_hot(n, 9, -4.0),
        "ties_of_4_bits": half_steps,
        "ties_of_8_bits": np.append(half_steps[:-1], np.float32(127)),
        "constant_1": np.full(n, 1, np.float32),
        "lcg": lcg(n),
        "ramp": ramp(n),
        "scale_above_f16": lcg(n) * np.float32(1e9),
        "range_overflows_float32": np.finfo(np.float32).max * np.sign(lcg(n)).astype(np.float32),
        "scale_is_a_denormal_f16": lcg(n) * np.float32(1e-5),
        "scale_below_f16": lcg(n) * np.float32(1e-12),
        "below_iq4_nl_floor": np.full(n, 9e-16, np.float32),
        "inverse_scale_overflows": np.full(n, 1e-40, np.float32),
        "normal": normal(n, 32),
    }


def ggml_vectors() -> dict[str, Any]:
    inputs, cases = ggml_edges(), []
    for name in GGML:
        codec = resolve_codec(name, 32, "k", rotated=False)
        for input_name, x in inputs.items():
            made = case(codec, input_name, x, type=name)
            cases.append(made | {"confirmed_by": confirmed(name, x, made["bytes"])})
    return {
        "what": "ggml's quantised types, plain: single blocks of 32 values. confirmed_by: programs of others that make "
        "the same bytes; see ggml-reference.json too",
        "inputs_f32": {name: hexed(x, "<f4") for name, x in inputs.items()},
        "cases": cases,
    }


def confirmed(name: str, x: np.ndarray, expected: str) -> list[str]:
    if name == "iq4_nl":  # gguf-py cannot encode it
        return []
    try:
        with np.errstate(over="raise", invalid="raise"):  # what it makes of these is its compiler's choice
            theirs = gguf.quants.quantize(x[None], gguf.GGMLQuantizationType(BLOCK_TYPES[name].ggml_type))
    except FloatingPointError:
        return []
    return ["gguf-py 0.19.0"] if theirs.tobytes().hex() == expected else []


def rotated_vectors() -> dict[str, Any]:
    inputs, cases = {}, []
    for head_dim in HEAD_DIMS:
        inputs |= {f"lcg_{head_dim}": lcg(head_dim), f"zero_{head_dim}": np.zeros(head_dim, np.float32)}
        for name in GGML:
            for side in ("k", "v") if head_dim in (128, 256) else ("k",):
                codec = resolve_codec(name, head_dim, side)
                size = None if codec.rotation is None else codec.rotation.size
                sides = "k" if head_dim in (128, 256) and side == "k" else "v" if side == "v" else "k and v"
                about = {"type": name, "head_dim": head_dim, "side": sides, "chunk": size}
                cases.append(case(codec, f"lcg_{head_dim}", lcg(head_dim), **about))
                zero = case(codec, f"zero_{head_dim}", np.zeros(head_dim), **about)
                cases.append({k: v for k, v in zero.items() if not k.startswith("decoded")})
    for made in cases:
        made.pop("decoded_rotated_f32", None)
    return {
        "what": "ggml's quantised types with llama.cpp's rotation without signs, in chunks (null: not rotated)",
        "inputs_f32": {name: hexed(x, "<f4") for name, x in inputs.items()},
        "cases": cases,
    }


def float_vectors() -> dict[str, Any]:
    x = np.array(
        [0.0, -0.0, 1.0, -2.5, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 65519, 65520, -1e6, 3e38,
         np.finfo(np.float32).max, -np.finfo(np.float32).max, 2**-24, 2**-25, 3 * 2**-26, 1e-8, 1e-40, -1e-45],
        np.float32,
    )  # fmt: skip
    cases = [case(resolve_codec(name, len(x), "k"), "edges", x, type=name) for name in FLOATS]
    return {
        "what": "float types: rounding, clamping, denormals",
        "inputs_f32": {"edges": hexed(x, "<f4")},
        "cases": cases,
    }


def page_vectors() -> dict[str, Any]:
    """A page of two KV heads: its mean, its channel scale, its blocks as K and as V, and attention over it."""
    heads, dim, prefix = 2, 64, TURBO_PREFIX
    rng = np.random.default_rng(7)
    layout = RopeLayout(dim)
    keys = rng.standard_normal((heads, PAGE_TOKENS, dim)) * rng.uniform(0.2, 3.0, (heads, 1, dim))
    keys[:, :, 3] += 6 + np.arange(PAGE_TOKENS) / 100
    keys16 = keys.astype(np.float16)
    query_squares = rng.uniform(0, 4, (heads, dim)) * PAGE_TOKENS
    query_squares[1, 5] = 0.0
    mean = page_mean(keys16, prefix)
    key_squares = centred_squares(keys16, mean, prefix)
    scales = {
        "halves_64": RopeLayout(dim),
        "neighbours_64": RopeLayout(dim, traditional=True),
        "halves_32": RopeLayout(32),
        "none": RopeLayout(0),
    }
    a = channel_scale(query_squares, key_squares, layout)
    pages, read = [], {}
    for side, name, balance, n_prefix in (
        ("k", "turbo3", "full", prefix),
        ("k", "q4_0", "page", prefix),
        ("v", "turbo4", "off", prefix),
    ):
        codec = resolve_codec(name, dim, side)
        scale = a if balance == "full" else None
        rows = keys16.astype(np.float32) if balance == "off" else balance_rows(keys16, mean, scale)
        rows[:, :n_prefix] = 0
        blocks = codec.encode(rows)
        decoded = codec.decode(blocks)
        if balance != "off":
            decoded = unbalance_rows(decoded, mean, scale)
        read[side, name] = decoded
        shown = [n_prefix, n_prefix + 1, 64, PAGE_TOKENS - 1]
        pages.append(
            {"side": side, "type": name, "balance": balance, "exact_prefix": n_prefix}
            | {"blocks": blocks.swapaxes(0, 1).tobytes().hex()}
            | {"decoded_f32": {str(t): hexed(decoded[:, t], "<f4") for t in shown}}
        )
    return {
        "what": "One page of 128 tokens, 2 KV heads of 64 values. Arrays are row-major [tokens, n_kv_heads, ...], or "
        "[n_kv_heads, head_dim]. channel_scale and attention were computed in double precision: compare them within "
        "the tolerance stated; all other values are exact",
        "n_kv_heads": heads,
        "head_dim": dim,
        "rows_f16": hexed(keys16.swapaxes(0, 1), "<f2"),
        "mean_behind_prefix_f16": hexed(mean, "<f2"),
        "mean_of_all_rows_f16": hexed(page_mean(keys16, 0), "<f2"),
        "channel_scale": {
            "query_squares": query_squares.tolist(),
            "key_squares": key_squares.tolist(),
            "relative_tolerance": 1e-6,
            "by_rope_layout_f32": {
                name: hexed(channel_scale(query_squares, key_squares, layout), "<f4") for name, layout in scales.items()
            },
            "used": "halves_64",
        },
        "pages": pages,
        "attention": attention_vectors(rng, keys16, read["k", "turbo3"], read["v", "turbo4"], prefix),
    }


def outlier_vectors() -> dict[str, Any]:
    """A page of two KV heads whose rows far outside decide neither the mean nor the channel scale."""
    heads, dim, prefix = 2, 64, TURBO_PREFIX
    rng = np.random.default_rng(28)
    keys = rng.standard_normal((heads, PAGE_TOKENS, dim)) * rng.uniform(0.2, 3.0, (heads, 1, dim))
    keys[1, :, 7] += 500
    keys[0, [2, 9, 60]] *= np.array([[1000], [1000], [100]])
    keys[1, 77] *= 8  # its constant too: far from the middle, though not from zero
    keys[0, 20:50] *= 300
    keys[0, 127, 5] = 65504
    keys16 = keys.clip(-65504, 65504).astype(np.float16)
    mean = page_mean(keys16, prefix)
    query_squares, key_squares = rng.uniform(1, 4, (heads, dim)), centred_squares(keys16, mean, prefix)
    a = channel_scale(query_squares, key_squares, RopeLayout(dim))
    pages = []
    for name, scale in (("turbo3", a), ("q4_0", None)):
        rows = balance_rows(keys16, mean, scale)
        rows[:, :prefix] = 0
        blocks = resolve_codec(name, dim, "k").encode(rows)
        balance = "page" if scale is None else "full"
        pages.append({"type": name, "balance": balance, "blocks": blocks.swapaxes(0, 1).tobytes().hex()})
    counted = counted_rows(keys16, prefix)
    return {
        "what": "One page of K, 128 tokens, 2 KV heads of 64 values, some rows far outside. Arrays as in page.json; "
        "channel_scale is of RoPE over halves of all channels, in double precision",
        "n_kv_heads": heads,
        "head_dim": dim,
        "exact_prefix": prefix,
        "rows_f16": hexed(keys16.swapaxes(0, 1), "<f2"),
        "far_outside": [(np.flatnonzero(~of_head) + prefix).tolist() for of_head in counted],
        "mean_f16": hexed(mean, "<f2"),
        "query_squares": query_squares.tolist(),
        "key_squares": key_squares.tolist(),
        "channel_scale_f32": hexed(a, "<f4"),
        "relative_tolerance": 1e-6,
        "pages": pages,
    }


def attention_vectors(rng: np.random.Generator, rows: np.ndarray, k: np.ndarray, v: np.ndarray, prefix: int) -> Any:
    """One query per query head at position 130 over the page above (K turbo3 balanced, V turbo4) and three f16 rows."""
    heads, dim, group, n_tail = 2, 64, 2, 3
    tail_k, tail_v = (rng.standard_normal((heads, n_tail, dim)).astype(np.float16) for _ in range(2))
    query = rng.standard_normal((heads * group, dim)).astype(np.float32)
    keys, values = (
        np.concatenate([rows[:, :prefix], page[:, prefix:], tail], axis=1).astype(np.float64)
        for page, tail in ((k, tail_k), (v, tail_v))
    )
    results = []
    for window in (None, 100):
        first = 0 if window is None else keys.shape[1] - window
        scores = np.einsum("hgd,htd->hgt", query.reshape(heads, group, dim).astype(np.float64), keys[:, first:]) / 8
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("hgt,htd->hgd", weights, values[:, first:]).reshape(heads * group, dim)
        results.append({"window": window, "output": np.round(out, 9).tolist()})
    return {
        "position": PAGE_TOKENS + n_tail - 1,
        "scale": 0.125,
        "query_f32": hexed(query, "<f4"),
        "tail_k_f16": hexed(tail_k.swapaxes(0, 1), "<f2"),
        "tail_v_f16": hexed(tail_v.swapaxes(0, 1), "<f2"),
        "absolute_tolerance": 1e-5,
        "results": results,
    }


def main() -> None:
    vectors = SPEC / "vectors"
    for head_dim in HEAD_DIMS:
        write(vectors / f"turbo-{head_dim}.json", turbo_vectors(head_dim))
    write(vectors / "ggml-plain.json", ggml_vectors())
    write(vectors / "ggml-rotated.json", rotated_vectors())
    write(vectors / "float.json", float_vectors())
    write(vectors / "page.json", page_vectors())
    write(vectors / "page-outliers.json", outlier_vectors())


if __name__ == "__main__":
    main()
