"""Prompt caches of mlx-lm built by hand, of zeros, sound ones and damaged ones; independent of tqgguf."""

from __future__ import annotations

import json
import math
from typing import Any

CURRENT = {"1.0": "KVCache", "2.0": ""}
BEFORE = {"2.0": "QuantizedKVCache", "0.0.0": "3", "0.0.1": "32", "0.0.2": "4"}
F16, I32, U32 = ("F16", 2), ("I32", 4), ("U32", 4)
KEYS = (F16, (1, 2, 3, 32))
WORDS, SCALES = (U32, (1, 2, 3, 4)), (F16, (1, 2, 3, 1))
SOUND = {"0.0": KEYS, "0.1": KEYS, "0.2": (I32, ())}
QUANTISED = {f"0.{part}.{i}": array for part in (0, 1) for i, array in enumerate((WORDS, SCALES, SCALES))}

# metadata, arrays (zeros), rule
DAMAGED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "no values": (CURRENT, {"0.0": KEYS, "0.2": (I32, ())}, "TQ522"),
    "whole numbers as keys": (CURRENT, {**SOUND, "0.0": (I32, (1, 2, 3, 32))}, "TQ522"),
    "two sequences": (CURRENT, {**SOUND, "0.0": (F16, (2, 2, 3, 32))}, "TQ522"),
    "three dimensions": (CURRENT, {**SOUND, "0.0": (F16, (2, 3, 32))}, "TQ522"),
    "values of other tokens": (CURRENT, {**SOUND, "0.1": (F16, (1, 2, 4, 32))}, "TQ522"),
    "no offset": (CURRENT, {"0.0": KEYS, "0.1": KEYS}, "TQ523"),
    "an offset of floats": (CURRENT, {**SOUND, "0.2": (F16, ())}, "TQ523"),
    "codes alone": (BEFORE, {"0.0.0": WORDS, "0.1.0": WORDS}, "TQ522"),
    "one array": (BEFORE, {"0.0": KEYS, "0.1": KEYS}, "TQ522"),
    "groups of another size": ({**BEFORE, "0.0.1": "64"}, QUANTISED, "TQ522"),
    "bits that are none": ({**BEFORE, "0.0.2": "7"}, QUANTISED, "TQ523"),
    "an offset beyond the arrays": ({**BEFORE, "0.0.0": "4"}, QUANTISED, "TQ523"),
    "an offset that is no number": ({**BEFORE, "0.0.0": "-3"}, QUANTISED, "TQ523"),
    "an absurd offset": ({**BEFORE, "0.0.0": "9999999999"}, QUANTISED, "TQ523"),
    "a layer of no class": (CURRENT, {**SOUND, "1.0": KEYS}, "TQ520"),
    "a class of recurrent layers": ({"1.0": "ArraysCache", "2.0": ""}, {"0.0.0": KEYS}, "TQ521"),
    "layers of different length": (
        {"2.0": "KVCache", "2.1": "KVCache"},
        {"0.0": KEYS, "0.1": KEYS, "1.0": (F16, (1, 2, 4, 32)), "1.1": (F16, (1, 2, 4, 32))},
        "TQ524",
    ),
}


def cache_bytes(metadata: dict[str, str], arrays: dict[str, Any]) -> bytes:
    """A safetensors file of these arrays: name -> ((dtype, bytes of a value), shape)."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, ((dtype, size), shape) in arrays.items():
        end = at + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def non_finite_cache() -> bytes:
    """A quantised cache whose keys' scale of head 1, token 0 is infinite: 6 bytes before the end of the file."""
    arrays = {name: QUANTISED[name] for name in sorted(QUANTISED, key=lambda name: name == "0.0.1")}
    whole = cache_bytes(BEFORE, arrays)
    return whole[:-6] + b"\x00\x7c" + whole[-4:]
