"""Fingerprints by the words of spec/fingerprint.md, in plain Python: independent of tqgguf.

GGUF files (version 3, not split) and safetensors are taken apart here by hand. Everything that is fed to a hash is
kept, so that it can be compared piece by piece.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DESCRIPTIVE = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
BYTES_OF = {0: (1, 4), 1: (1, 2), 8: (32, 34)}  # type id -> values and bytes of a block: F32, F16, Q8_0


class Numbers(NamedTuple):
    """An array of numbers or booleans of a GGUF."""

    is_float: bool
    values: tuple[Any, ...]


class Tensor(NamedTuple):
    shape: list[int]
    type: int | str
    data: bytes


def number(value: float) -> str:
    """A binary64 by the table of section 1, from its shortest digits."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    sign = "-" if math.copysign(1, value) < 0 else ""
    if value == 0:
        return f"{sign}0.0"
    n = next(n for n in range(17) if float(f"{value:.{n}e}") == value)
    mantissa, exponent = f"{abs(value):.{n}e}".split("e")
    if 1e-4 <= abs(value) < 1e16:
        plain = format(Decimal(f"{mantissa}e{exponent}"), "f")
        return f"{sign}{plain}" if "." in plain else f"{sign}{plain}.0"
    power = int(exponent)
    return f"{sign}{mantissa}e{'-' if power < 0 else '+'}{abs(power):02}"


def text(value: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
    out = ""
    for character in value:
        if character in short:
            out += short[character]
        elif " " <= character <= "~":
            out += character
        else:
            units = struct.unpack(f"<{len(character.encode('utf-16-le', 'surrogatepass')) // 2}H",
                                  character.encode("utf-16-le", "surrogatepass"))  # fmt: skip
            out += "".join(f"\\u{unit:04x}" for unit in units)
    return f'"{out}"'


def to_json(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{text(key)}:{to_json(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(to_json, value)) + "]"


def value_pieces(value: Any) -> Iterator[bytes]:
    """Section 2."""
    if isinstance(value, Numbers):
        n, letter = len(value.values), "f" if value.is_float else "i"
        yield to_json([letter, n]).encode()
        if value.is_float:
            yield struct.pack(f"<{n}d", *value.values)
        else:
            yield b"".join((int(each) % 2**64).to_bytes(8, "little") for each in value.values)
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        yield to_json(["s", len(value)]).encode()
        yield b"".join(len(each).to_bytes(8, "little") for each in value)
        yield "".join(value).encode("utf-8", "surrogateescape")
    elif isinstance(value, list):
        yield to_json(["l", len(value)]).encode()
        for each in value:
            yield from value_pieces(each)
    else:
        yield to_json(value).encode()


def entry_pieces(entries: Mapping[str, Any]) -> Iterator[bytes]:
    for key in sorted(entries):
        yield to_json(key).encode()
        yield from value_pieces(entries[key])


def weight_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Section 3."""
    for name in sorted(tensors):
        tensor = tensors[name]
        yield to_json([name, tensor.shape, tensor.type, len(tensor.data)]).encode()
        yield tensor.data[:4096]
        yield tensor.data[max(0, len(tensor.data) - 4096) :]


def digest(part: str, pieces: list[bytes]) -> str:
    """Section 1."""
    fed = f"tqgguf fingerprint 1: {part}\n".encode()
    for piece in pieces:
        fed += struct.pack("<Q", len(piece)) + piece
    return hashlib.sha256(fed).hexdigest()


def of_gguf(data: bytes, rope: Mapping[str, float] | None = None) -> dict[str, list[bytes]]:
    """The pieces of each hash of a GGUF. rope: what the user has put in the place of the file's."""
    metadata, tensors = read_gguf(data)
    architecture = metadata["general.architecture"]
    own = {key[len(architecture) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    hyper = {key: value for key, value in own.items() if not key.startswith("rope.") and key != "context_length"}
    turning = {key[len("rope.") :]: value for key, value in own.items() if key.startswith("rope.")}
    words = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template")
    }
    return {
        "weights": list(weight_pieces(tensors)),
        "hyperparameters": list(entry_pieces({"architecture": architecture, **hyper})),
        "rope": list(entry_pieces({**turning, **(rope or {})})),
        "tokenizer": list(entry_pieces(words)),
    }


def of_folder(files: Mapping[str, bytes]) -> dict[str, list[bytes]]:
    """The pieces of each hash of an MLX folder with these files."""
    config = dict(flat(json.loads(files["config.json"])))
    turning = {key: value for key, value in config.items() if "rope" in key or "rotary" in key}
    hyper = {k: v for k, v in config.items() if k not in turning and k.split(".")[-1] not in DESCRIPTIVE}
    words: dict[str, Any] = {"tokenizer.json": hashlib.sha256(files["tokenizer.json"]).hexdigest()}
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    words |= {key: value for key, value in settings.items() if key != "chat_template"}
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        if name.startswith("model") and name.endswith(".safetensors"):
            tensors |= read_safetensors(files[name])
    return {
        "weights": list(weight_pieces(tensors)),
        "hyperparameters": list(entry_pieces(hyper)),
        "rope": list(entry_pieces(turning)),
        "tokenizer": list(entry_pieces(words)),
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a GGUF of version 3 with an alignment of 32."""
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return value

    def string() -> str:
        nonlocal at
        n = take("Q")
        at += n
        return data[at - n : at].decode("utf-8", "surrogateescape")

    readers: dict[int, Callable[[], Any]] = {STRING: string, ARRAY: lambda: array()}
    readers |= {type_id: lambda form=form: take(form) for type_id, form in NUMBERS.items()}  # type: ignore[misc]

    def array() -> Any:
        element, n = take("I"), take("Q")
        values = [readers[element]() for _ in range(n)]
        return Numbers(element in (6, 12), tuple(values)) if element in NUMBERS else values

    assert data[:4] == b"GGUF"
    at = 4
    assert take("I") == 3
    n_tensors, n_entries = take("Q"), take("Q")
    metadata = {string(): readers[take("I")]() for _ in range(n_entries)}
    records = [(string(), [take("Q") for _ in range(take("I"))], take("I"), take("Q")) for _ in range(n_tensors)]
    start = -(-at // 32) * 32
    tensors = {}
    for name, dims, type_id, offset in records:
        size, block = BYTES_OF[type_id]
        first = start + offset
        tensors[name] = Tensor(dims[::-1], type_id, data[first : first + math.prod(dims) // size * block])
    return metadata, tensors


def read_safetensors(data: bytes) -> dict[str, Tensor]:
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    body = data[8 + n :]
    return {
        name: Tensor(said["shape"], said["dtype"], body[slice(*said["data_offsets"])])
        for name, said in header.items()
        if name != "__metadata__"
    }


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
