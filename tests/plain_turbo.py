"""The turbo block formats once more, in plain Python loops: an oracle that shares nothing with tqgguf.

Numbers are Python floats, rounded to float32 after every single operation (a double holds the exact sum or product of
two float32 well enough that rounding twice changes nothing). Slow, and meant to be read beside the specification.
"""

from __future__ import annotations

import math
import struct

S1 = "59036ae44959f842bb3bc6a4a950f249"
S2 = "90eeac16dc8f623f7a35a5b76265a5be"
VALUES = {
    2: [0.039994, 0.133462],
    3: [0.021663, 0.066822, 0.118786, 0.190207],
    4: [0.011349, 0.034299, 0.058050, 0.083292, 0.111036, 0.143016, 0.182877, 0.241529],
}
BOUNDARIES = {
    2: [0.0, 0.086728],
    3: [0.0, 0.044243, 0.092804, 0.154496],
    4: [0.0, 0.022824, 0.046174, 0.070671, 0.097164, 0.127026, 0.162947, 0.212203],
}
ROTATED_PART = {64: 64, 96: 32, 128: 128, 192: 64}


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def lcg(n: int) -> list[float]:
    values, s = [], 12345
    for _ in range(n):
        s = (s * 1664525 + 1013904223) % 2**32
        values.append(((s >> 8) - 2**23) / 2**23)
    return values


def sign(hex_bits: str, i: int) -> int:
    return -1 if bytes.fromhex(hex_bits)[i // 8] >> (i % 8) & 1 else 1


def tables(bits: int, group: int) -> tuple[list[float], list[float]]:
    scale = f32(math.sqrt(128 / group))
    values = [f32(f32(v) * scale) for v in VALUES[bits]]
    boundaries = [f32(f32(b) * scale) for b in BOUNDARIES[bits]]
    return [-v for v in reversed(values)] + values, [-b for b in reversed(boundaries[1:])] + boundaries


def rotate(x: list[float], first: str, second: str) -> list[float]:
    n = len(x)
    x = [sign(first, i) * v for i, v in enumerate(x)]
    half = 1
    while half < n:
        for start in range(0, n, 2 * half):
            for i in range(start, start + half):
                x[i], x[i + half] = f32(x[i] + x[i + half]), f32(x[i] - x[i + half])
        half *= 2
    factor = f32(1 / math.sqrt(n))
    return [f32(sign(second, i) * factor * v) for i, v in enumerate(x)]


def root_of_squares(x: list[float]) -> float:
    total = 0.0
    for v in x:
        total = f32(total + f32(v * v))
    return f32(math.sqrt(total))


def encode(x: list[float], bits: int) -> bytes:
    """One block of 64, 96, 128 or 192 finite values."""
    group = len(x)
    values, boundaries = tables(bits, group)
    x = [f32(v) for v in x]
    norm = root_of_squares(x)
    inverse = f32(1 / norm) if norm > f32(1e-10) else 0.0
    x = [f32(v * inverse) for v in x]
    part = ROTATED_PART[group]
    x = [v for start in range(0, group, part) for v in rotate(x[start : start + part], S1, S2)]
    index = [sum(b <= v for b in boundaries) for v in x]
    length = root_of_squares([values[i] for i in index])
    stored = f32(norm / length) if length > f32(1e-10) else norm
    return struct.pack("<e", min(stored, 65504.0)) + pack(index, bits)


def pack(index: list[int], bits: int) -> bytes:
    low_bits = 4 if bits == 4 else 2
    per_byte = 8 // low_bits
    low, high = bytearray(len(index) // per_byte), bytearray(len(index) // 8)
    for j, i in enumerate(index):
        low[j // per_byte] |= (i & (2**low_bits - 1)) << low_bits * (j % per_byte)
        high[j // 8] |= (i >> 2 & 1) << j % 8
    return bytes(low + high) if bits == 3 else bytes(low)


def decode(block: bytes, bits: int, group: int) -> list[float]:
    """The values of one block in original axes."""
    values, _ = tables(bits, group)
    (norm,) = struct.unpack("<e", block[:2])
    qs = block[2:]
    if bits == 4:
        index = [qs[j // 2] >> 4 * (j % 2) & 15 for j in range(group)]
    else:
        index = [qs[j // 4] >> 2 * (j % 4) & 3 for j in range(group)]
    if bits == 3:
        signs = qs[group // 4 :]
        index = [i | (signs[j // 8] >> j % 8 & 1) << 2 for j, i in enumerate(index)]
    x = [f32(values[i] * norm) for i in index]
    part = ROTATED_PART[group]
    return [v for start in range(0, group, part) for v in rotate(x[start : start + part], S2, S1)]
