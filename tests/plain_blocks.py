"""The block types once more, in plain Python loops over spec/tables.json: an oracle that shares nothing with tqgguf.

Follows spec/blocks.md step by step and is meant to be read beside it. Numbers are Python floats, rounded to float32
after every single operation: a double holds the exact sum, product, quotient or root of float32 numbers well enough
that rounding twice changes nothing.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

TABLES = json.loads((Path(__file__).parent.parent / "spec" / "tables.json").read_text(encoding="utf-8"))
LIMITS = TABLES["limits"]
TYPES = {t["name"]: t for t in TABLES["types"]}
TURBO_BLOCKS = {b["values"]: b for b in TABLES["turbo_blocks"]}
CODEBOOKS = {(c["generation"], c["bits"], c["group"]): c for c in TABLES["codebooks"]}
F32_MAX = (2 - 2**-23) * 2.0**127

Values = list[float]


def f32(x: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def f16_bytes(x: float) -> bytes:
    """Clamped to the largest f16, so that nothing decodes to infinity."""
    top = float(LIMITS["f16_max"])
    return struct.pack("<e", min(max(x, -top), top))


def floats(text: str) -> Values:
    """Hex of little-endian float32 numbers."""
    data = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def halves(text: str) -> Values:
    """Hex of little-endian float16 numbers."""
    data = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(data) // 2}e", data))


def lcg(n: int) -> Values:
    values, s = [], 12345
    for _ in range(n):
        s = (s * 1664525 + 1013904223) % 2**32
        values.append(((s >> 8) - 2**23) / 2**23)
    return values


# --- rows: head vectors


def encode_row(name: str, x: Values, chunk: int | None = None, generation: int = 3) -> bytes:
    """One head vector. chunk: size of the rotation without signs, of ggml's types."""
    x = [f32(v) for v in x]
    if chunk:
        x = [v for part in cut(x, chunk) for v in rotate(part)]
    return b"".join(encode_block(name, part, generation) for part in cut(x, values_of_block(name, len(x))))


def decode_row(
    name: str, row: bytes, n: int, chunk: int | None = None, generation: int = 3, *, rotated: bool = False
) -> Values:
    """The n values of a head vector in original axes, or where `rotated` as blocks have them."""
    size = values_of_block(name, n)
    blocks = [row[i * len(row) * size // n : (i + 1) * len(row) * size // n] for i in range(n // size)]
    x = [v for block in blocks for v in decode_block(name, block, size, generation)]
    if rotated:
        return x
    if chunk:
        return [v for part in cut(x, chunk) for v in rotate(part)]
    if TYPES[name]["family"] != "turbo":
        return x
    s1, s2 = (signs(TABLES["signs"][s]) for s in ("s1", "s2"))
    return [v for part in cut(x, TURBO_BLOCKS[size]["part"]) for v in rotate(part, s2, s1)]


def values_of_block(name: str, head_dim: int) -> int:
    """Turbo types hold some head sizes in one block of their own."""
    own = TYPES[name]["family"] == "turbo" and head_dim in TURBO_BLOCKS
    return head_dim if own else TYPES[name]["values"]


def cut(x: Values, size: int) -> list[Values]:
    return [x[start : start + size] for start in range(0, len(x), size)]


# --- rotation


def signs(hex_bits: str) -> list[int]:
    data = bytes.fromhex(hex_bits)
    return [-1 if data[i // 8] >> i % 8 & 1 else 1 for i in range(8 * len(data))]


def rotate(x: Values, first: list[int] | None = None, second: list[int] | None = None) -> Values:
    n = len(x)
    first, second = first or [1] * n, second or [1] * n
    x = [v * s for v, s in zip(x, first, strict=False)]
    half = 1
    while half < n:
        for start in range(0, n, 2 * half):
            for i in range(start, start + half):
                x[i], x[i + half] = f32(x[i] + x[i + half]), f32(x[i] - x[i + half])
        half *= 2
    factor = f32(1 / math.sqrt(n))
    return [f32(v * factor) * s for v, s in zip(x, second, strict=False)]


# --- blocks


def encode_block(name: str, x: Values, generation: int) -> bytes:
    how = TYPES[name]["encode"]
    return ENCODERS[how["method"]](name, x, how, generation)


def encode_float(name: str, x: Values, how: Any, generation: int) -> bytes:
    (value,) = x
    if name == "f32":
        return struct.pack("<f", value)
    if name == "f16":
        return f16_bytes(value)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return struct.pack("<H", bits - 1 if bits & 0x7FFF == 0x7F80 else bits)


def encode_signed(name: str, x: Values, how: Any, generation: int) -> bytes:
    d = f32(max(abs(v) for v in x) / how["divisor"])
    inverse = inverse_of(d)
    codes = [half_away(f32(v * inverse)) & 0xFF for v in x]
    return f16_bytes(d) + pack(name, codes)


def encode_symmetric(name: str, x: Values, how: Any, generation: int) -> bytes:
    d = f32(extreme(x) / how["divisor"])
    inverse = inverse_of(d)
    zero, top = how["zero_code"], how["max_code"]
    codes = [min(top, int(f32(f32(v * inverse) + (zero + 0.5)))) for v in x]
    return f16_bytes(d) + pack(name, codes)


def encode_affine(name: str, x: Values, how: Any, generation: int) -> bytes:
    low = min(x)  # of +0 and -0 the first, as Python has it
    d = f32(min(f32(max(x) - low), F32_MAX) / how["levels"])
    inverse = inverse_of(d)
    codes = [int(min(how["levels"], f32(f32(f32(v - low) * inverse) + 0.5))) for v in x]
    return f16_bytes(d) + f16_bytes(low) + pack(name, codes)


def encode_iq4_nl(name: str, x: Values, how: Any, generation: int) -> bytes:
    values, boundaries = TABLES["iq4_nl"]["values"], TABLES["iq4_nl"]["boundaries"]
    top = extreme(x)
    if abs(top) < LIMITS["iq4_nl_floor"]:
        return f16_bytes(0.0) + pack(name, [not_above(0.0, boundaries)] * len(x))
    guess = f32(top / values[0])
    inverse = inverse_of(guess)
    codes = [not_above(f32(v * inverse), boundaries) for v in x]
    along = across = 0.0
    for v, code in zip(x, codes, strict=True):
        weighted = f32(f32(v * v) * values[code])
        along = f32(along + f32(weighted * v))
        across = f32(across + f32(weighted * values[code]))
    d = f32(along / across) if across > 0 else 0.0
    return f16_bytes(d if math.isfinite(d) else guess) + pack(name, codes)


def encode_turbo(name: str, x: Values, how: Any, generation: int) -> bytes:
    block = TURBO_BLOCKS[len(x)]
    book = CODEBOOKS[generation, code_bits(name), len(x)]
    norm = length_of(x)
    inverse = f32(1 / norm) if norm > LIMITS["norm_floor"] else 0.0
    x = [f32(v * inverse) for v in x]
    s1, s2 = (signs(TABLES["signs"][s]) for s in ("s1", "s2"))
    x = [v for part in cut(x, block["part"]) for v in rotate(part, s1, s2)]
    codes = [not_above(v, book["boundaries"]) for v in x]
    length = length_of([book["values"][code] for code in codes])
    stored = f32(norm / length) if length > LIMITS["norm_floor"] else norm
    return f16_bytes(stored) + pack(name, codes)


ENCODERS = {
    "float": encode_float,
    "signed": encode_signed,
    "symmetric": encode_symmetric,
    "affine": encode_affine,
    "iq4_nl": encode_iq4_nl,
    "turbo": encode_turbo,
}


def decode_block(name: str, block: bytes, n: int, generation: int) -> Values:
    how, fields = TYPES[name]["encode"], fields_of(name, n)
    if how["method"] == "float":
        if name == "bf16":
            return list(struct.unpack("<f", b"\0\0" + block))
        return list(struct.unpack("<f" if name == "f32" else "<e", block))
    d, *low = (struct.unpack_from("<e", block, f["offset"])[0] for f in fields if f["holds"] == "f16")
    codes = unpack(name, block, n)
    if how["method"] == "turbo":
        book = CODEBOOKS[generation, code_bits(name), n]["values"]
        return [f32(book[code] * d) for code in codes]
    if how["method"] == "iq4_nl":
        return [f32(TABLES["iq4_nl"]["values"][code] * d) for code in codes]
    if how["method"] == "signed":
        return [f32((code - 256 if code > 127 else code) * d) for code in codes]
    if how["method"] == "symmetric":
        return [f32((code - how["zero_code"]) * d) for code in codes]
    return [f32(f32(code * d) + low[0]) for code in codes]


# --- codes and their bits


def fields_of(name: str, n: int) -> list[dict[str, Any]]:
    """The fields of a block of n values."""
    return TURBO_BLOCKS[n]["fields"][name] if TYPES[name]["family"] == "turbo" else TYPES[name]["fields"]


def code_bits(name: str) -> int:
    return sum(field["bits"] for field in TYPES[name]["fields"] if field["holds"] == "codes")


def places(field: dict[str, Any], n: int) -> list[tuple[int, int]]:
    """For each value its byte within the field and the lowest bit of its code there."""
    if field["order"] == "halves":
        return [(j % (n // 2), 0 if j < n // 2 else field["bits"]) for j in range(n)]
    return [divmod(j * field["bits"], 8) for j in range(n)]


def pack(name: str, codes: list[int]) -> bytes:
    packed = b""
    for field in fields_of(name, len(codes)):
        if field["holds"] == "codes":
            data = bytearray(field["bytes"])
            for code, (byte, bit) in zip(codes, places(field, len(codes)), strict=True):
                data[byte] |= (code >> field["shift"] & (1 << field["bits"]) - 1) << bit
            packed += bytes(data)
    return packed


def unpack(name: str, block: bytes, n: int) -> list[int]:
    codes = [0] * n
    for field in fields_of(name, n):
        if field["holds"] == "codes":
            for j, (byte, bit) in enumerate(places(field, n)):
                part = block[field["offset"] + byte] >> bit & (1 << field["bits"]) - 1
                codes[j] |= part << field["shift"]
    return codes


# --- arithmetic


def not_above(v: float, boundaries: Values) -> int:
    return sum(boundary <= v for boundary in boundaries)


def length_of(x: Values) -> float:
    total = 0.0
    for v in x:
        total = f32(total + f32(v * v))
    return f32(math.sqrt(total))


def inverse_of(d: float) -> float:
    inverse = f32(1 / d) if d else 0.0
    return inverse if math.isfinite(inverse) else 0.0


def extreme(x: Values) -> float:
    """The first value of largest magnitude; +0 where all are zero."""
    return max(x, key=abs) + 0.0


def half_away(q: float) -> int:
    """The nearest whole number, halves away from zero."""
    return int(math.copysign(math.floor(abs(q) + 0.5), q))


# --- pages


def lower_median(x: Values) -> float:
    return sorted(x)[(len(x) - 1) // 2]


def counted_rows(rows: list[Values], n_prefix: int) -> list[int]:
    """Of one KV head's rows of a page, f16 values, the tokens that mean and channel scale count."""
    tokens = range(n_prefix, len(rows))
    if not tokens:
        return []
    middle = [lower_median([rows[t][c] for t in tokens]) for c in range(len(rows[0]))]
    reach = {t: max(f32(abs(k - m)) for k, m in zip(rows[t], middle, strict=True)) for t in tokens}
    limit = LIMITS["far_outside"] * lower_median(list(reach.values()))
    return [t for t in tokens if reach[t] <= limit]


def page_mean(rows: list[Values], n_prefix: int) -> Values:
    """Of one KV head's rows of a page, f16 values; one value per channel."""
    counted = [rows[t] for t in counted_rows(rows, n_prefix)]
    share = f32(1 / len(counted)) if counted else 1.0
    mean = []
    for channel in range(len(rows[0])):
        total = 0.0
        for row in counted:
            total = f32(total + row[channel])
        mean.append(struct.unpack("<e", f16_bytes(f32(total * share)))[0])
    return mean


def counted_queries(squares: list[Values]) -> list[int]:
    """Of one KV head's tokens, of which each has the sum of its group's q[c]**2, those that a channel scale counts."""
    largest = {t: max(x) for t, x in enumerate(squares) if 0 < max(x) < math.inf}
    limit = LIMITS["far_outside"] ** 2 * lower_median(list(largest.values())) if largest else 0.0
    return [t for t, top in largest.items() if top <= limit]


def balance(row: Values, mean: Values, scale: Values) -> Values:
    return [f32(f32(k - m) * a) for k, m, a in zip(row, mean, scale, strict=True)]


def unbalance(row: Values, mean: Values, scale: Values) -> Values:
    return [f32(f32(k / a) + m) for k, m, a in zip(row, mean, scale, strict=True)]


def channel_scale(query_squares: Values, key_squares: Values, pairs: list[tuple[int, int]]) -> Values:
    """Of one KV head, in double precision."""
    q, k = list(query_squares), list(key_squares)
    for x in (q, k):
        for i, j in pairs:
            x[i] = x[j] = (x[i] + x[j]) / 2
    n, q_mean, k_mean = len(q), sum(q) / len(q), sum(k) / len(k)
    if not (q_mean > 0 and k_mean > 0):
        return [1.0] * n
    floor = LIMITS["balance_floor"]
    scale = [((q[i] + floor * q_mean) / (k[i] + floor * k_mean)) ** 0.25 for i in range(n)]
    centre = math.exp(sum(math.log(a) for a in scale) / n)
    return [f32(a / centre) for a in scale]
