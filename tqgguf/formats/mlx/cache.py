"""Prompt caches of mlx-lm (`mlx_lm.cache_prompt`, `save_prompt_cache`): safetensors files, as records.

Two layouts, told apart by their metadata, whose keys are paths into lists:

* current (mlx-lm 0.32): metadata 0.<name> what the user said, 1.<layer> class names, 2.<n>.0 and 2.<n>.1 which tensors
  are numbers ("scalar") or absent ("none"). A layer's state is keys, values and all its numbers; arrays can be longer
  than what they hold.
* before (up to 0.31): metadata 0.<layer>[.<n>] the numbers as texts, 1.<name> what the user said, 2.<layer> class
  names. A layer's state is keys and values, cut to what they hold.

Tensors are `<layer>.<part>`, of a quantised cache `<layer>.<part>.<0 codes, 1 scales, 2 biases>`; arrays
[1, n_kv_heads, tokens, head_dim]. What they mean for a snapshot is `mlx.to_snapshot`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.gguf.finite import first_non_finite, no_progress
from tqgguf.formats.mlx.affine import BITS, GROUP_SIZES
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.safetensors import SafetensorsFile
from tqgguf.formats.wording import shown

Layout = Literal["current", "before"]
LAYOUTS: Final[tuple[Layout, ...]] = ("current", "before")

KV, QUANTIZED, ROTATING = "KVCache", "QuantizedKVCache", "RotatingKVCache"

NUMBERS: Final[dict[str, dict[Layout, tuple[str, ...]]]] = {
    KV: {"current": ("offset",), "before": ()},
    QUANTIZED: {"current": ("offset", "group_size", "bits"), "before": ("offset", "group_size", "bits")},
    ROTATING: {
        "current": ("offset", "keep", "max_size", "index"),
        "before": ("keep", "max_size", "offset", "index"),
    },
}
"""Of each class that is read: its numbers in the order of the file."""

MAX_LAYERS: Final = 1 << 12
MAX_NUMBER: Final = 1 << 24  # tokens: beyond any context, and no gigabytes of unknown ids for a file of a few bytes
_DTYPES: Final[dict[str, np.dtype]] = {name: np.dtype(kind) for name, kind in
    (("F16", "<f2"), ("BF16", "<u2"), ("F32", "<f4"), ("U32", "<u4"), ("I32", "<i4"))}  # fmt: skip
FLOATS: Final[dict[str, str]] = {"F16": "f16", "BF16": "bf16", "F32": "f32"}
"""Dtypes of values, and the cache types that hold them."""
_GGML_TYPES: Final = {"F32": 0, "F16": 1, "BF16": 30}


@dataclass(frozen=True)
class MlxArray:
    """A tensor: dtype as safetensors names it; data in its shape, BF16 as the uint16 of its bits."""

    dtype: str
    data: NDArray[Any]
    name: str
    offset: int


@dataclass(frozen=True)
class MlxLayer:
    """One layer's cache. keys, values: one array each, of a quantised cache codes, scales and biases; () where nothing
    is held. numbers: see NUMBERS.
    """

    kind: str
    keys: tuple[MlxArray, ...]
    values: tuple[MlxArray, ...]
    numbers: Mapping[str, int]

    @property
    def offset(self) -> int:
        """Tokens that the cache has seen."""
        return self.numbers["offset"]

    @property
    def n_held(self) -> int:
        """Tokens that the arrays hold."""
        return min(self.offset, self.keys[0].data.shape[2]) if self.keys else 0


@dataclass(frozen=True)
class MlxCache:
    """metadata: what the user said beside the cache (`model`, `tokenizer_config`)."""

    path: str
    layout: Layout
    layers: tuple[MlxLayer, ...]
    metadata: Mapping[str, str]


def is_mlx_cache(metadata: Mapping[str, str]) -> bool:
    """Whether a safetensors file with these metadata is a prompt cache of mlx-lm."""
    return _layout(metadata) is not None


def read_mlx_cache(file: SafetensorsFile) -> MlxCache:
    """The prompt cache in a file. DefectError: it is none, or the first thing that is wrong with it."""
    for defect in judge_mlx_cache(file):
        raise defect
    return outline_mlx_cache(file)


def outline_mlx_cache(file: SafetensorsFile) -> MlxCache:
    """The same without a look at values. Layers of classes that are not read here hold nothing."""
    layout = _layout(file.metadata)
    if layout is None:
        raise _other_format(file)
    layers = tuple(
        _Layer(file, layout, i, kind).read() if kind in NUMBERS else MlxLayer(kind, (), (), {})
        for i, kind in enumerate(_classes(file.metadata, layout))
    )
    user = "0." if layout == "current" else "1."
    metadata = {key.removeprefix(user): value for key, value in file.metadata.items() if key.startswith(user)}
    return MlxCache(file.path, layout, layers, metadata)


def _other_format(file: SafetensorsFile) -> DefectError:
    message = f"expected a prompt cache of mlx-lm, found metadata {shown(dict(file.metadata))}"
    return DefectError("other-format", file.path, message, offset=0)


def judge_mlx_cache(file: SafetensorsFile, progress: Callable[[int], None] = no_progress) -> Iterator[DefectError]:
    """All that is wrong with a file of which `is_mlx_cache` is true, by layer; values last, and of layers whose arrays
    are sound. progress: as of `first_non_finite`.
    """
    layout = _layout(file.metadata)
    if layout is None:
        yield _other_format(file)
        return
    classes = _classes(file.metadata, layout)
    for name, tensor in file.items():
        number = name.partition(".")[0]
        if not re.fullmatch(r"[0-9]{1,5}", number) or int(number) >= len(classes):
            message = f"array {shown(name)} belongs to none of the {len(classes)} layers whose classes are named"
            yield DefectError("mlx-cache-metadata", file.path, message, offset=tensor.offset, tensor=name)
    layers: dict[int, MlxLayer] = {}
    for i, kind in enumerate(classes):
        try:
            layers[i] = _Layer(file, layout, i, kind).read()
        except DefectError as defect:
            yield defect
    offsets = {layer.offset for layer in layers.values()}
    if len(offsets) > 1:
        found = ", ".join(map(str, sorted(offsets)))
        message = f"expected all layers to hold the same tokens, found offsets {found}"
        yield DefectError("mlx-cache-offset", file.path, message, expected="one offset", found=found)
    for i, layer in layers.items():
        for array in (*layer.keys, *layer.values):
            if array.dtype in FLOATS:
                yield from _non_finite(file.path, f"layer {i} ({layer.kind})", array, layer.n_held, progress)


def _non_finite(
    path: str, where: str, array: MlxArray, n_held: int, progress: Callable[[int], None]
) -> Iterator[DefectError]:
    """The first value of an array that is not finite, among those of the tokens that it holds."""
    _, n_heads, capacity, width = array.data.shape
    token_bytes = width * array.data.itemsize
    for head in range(n_heads):
        begin = head * capacity * token_bytes
        bad = first_non_finite(array.data, begin, n_held * token_bytes, _GGML_TYPES[array.dtype], progress)
        if bad is not None:
            found = f"bits 0x{bad.bits:x} in head {head}, row {bad.position // token_bytes}"
            yield DefectError(
                "mlx-cache-non-finite",
                path,
                f"{where}: array {shown(array.name)}: expected finite values, found {found}",
                offset=array.offset + begin + bad.position,
                tensor=array.name,
                expected="finite values",
                found=found,
            )
            return  # one for each array


def _layout(metadata: Mapping[str, str]) -> Layout | None:
    if metadata.get("2.0") == "" and re.fullmatch(r"\w+", metadata.get("1.0", "")):
        return "current"
    return "before" if re.fullmatch(r"\w+Cache", metadata.get("2.0", "")) else None


def _classes(metadata: Mapping[str, str], layout: Layout) -> list[str]:
    """The class names of the layers, up to the first that is missing."""
    prefix = "1." if layout == "current" else "2."
    names: list[str] = []
    while len(names) < MAX_LAYERS and f"{prefix}{len(names)}" in metadata:
        names.append(metadata[f"{prefix}{len(names)}"])
    return names


class _Layer:
    """Reads and checks one layer."""

    def __init__(self, file: SafetensorsFile, layout: Layout, index: int, kind: str) -> None:
        self.file, self.layout, self.index, self.kind = file, layout, index, kind

    def read(self) -> MlxLayer:
        if self.kind not in NUMBERS:
            known = ", ".join(NUMBERS)
            raise self._error("mlx-cache-class", f"expected a cache of class {known}, found {shown(self.kind)}")
        keys, values = self._arrays(0), self._arrays(1)
        numbers = self._numbers(keys)
        layer = MlxLayer(self.kind, keys, values, numbers)
        if bool(keys) != bool(values) or (layer.offset > 0 and not keys):
            raise self._error("mlx-cache-array", "expected keys and values of the tokens that it counts, found none")
        if keys:
            self._check_shapes(layer)
        return layer

    def _arrays(self, part: int) -> tuple[MlxArray, ...]:
        """Keys or values; () where there are none."""
        name = f"{self.index}.{part}"
        names = [f"{name}.{i}" for i in range(3)] if self.kind == QUANTIZED and f"{name}.0" in self.file else [name]
        if len(names) == 1 and (name not in self.file or self.file[name].shape == (0,)):
            return ()
        dtypes = [("U32",), tuple(FLOATS), tuple(FLOATS)] if self.kind == QUANTIZED else [tuple(FLOATS)]
        if len(names) != len(dtypes):
            raise self._error("mlx-cache-array", "expected codes, scales and biases, found one array", name)
        return tuple(self._array(n, kinds) for n, kinds in zip(names, dtypes, strict=True))

    def _array(self, name: str, dtypes: tuple[str, ...]) -> MlxArray:
        if name not in self.file:
            raise self._error("mlx-cache-array", f"array {name} is missing")
        tensor = self.file[name]
        if tensor.dtype not in dtypes or len(tensor.shape) != 4 or tensor.shape[0] != 1 or 0 in tensor.shape[1:]:
            expected = f"{' or '.join(dtypes)} [1, n_kv_heads, tokens, n]"
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise self._error("mlx-cache-array", f"expected {expected}, found {found}", name, expected, found)
        data = np.frombuffer(tensor.data, _DTYPES[tensor.dtype]).reshape(tensor.shape)
        return MlxArray(tensor.dtype, data, name, tensor.offset)

    def _numbers(self, keys: tuple[MlxArray, ...]) -> dict[str, int]:
        names = NUMBERS[self.kind][self.layout]
        read = self._scalar if self.layout == "current" else self._text
        numbers = {name: read(i) for i, name in enumerate(names)}
        numbers.setdefault("offset", keys[0].data.shape[2] if keys else 0)
        for name, allowed in (("bits", BITS), ("group_size", GROUP_SIZES)):
            if name in numbers and numbers[name] not in allowed:
                expected = f"one of {', '.join(map(str, allowed))}"
                raise self._error("mlx-cache-number", f"{name}: expected {expected}, found {numbers[name]}")
        if self.kind == ROTATING and not 0 <= numbers["keep"] <= numbers["max_size"] > 0:
            found = f"keep {numbers['keep']} and max_size {numbers['max_size']}"
            raise self._error("mlx-cache-number", f"expected 0 <= keep <= max_size, found {found}")
        return numbers

    def _scalar(self, i: int) -> int:
        """A number that is a tensor without dimensions."""
        name = f"{self.index}.{i + 2}"
        tensor = self.file.get(name)
        if tensor is None or tensor.dtype != "I32" or tensor.shape:
            found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise self._error("mlx-cache-number", f"{name}: expected a number I32, found {found}")
        return self._count(name, int(np.frombuffer(tensor.data, "<i4")[0]), tensor.offset)

    def _text(self, i: int) -> int:
        """A number that is a text of the metadata."""
        name = f"0.{self.index}.{i}"
        text = self.file.metadata.get(name, "")
        if not re.fullmatch(r"[0-9]{1,10}", text):
            raise self._error("mlx-cache-number", f"metadata {name}: expected a number, found {shown(text)}")
        return self._count(name, int(text), None)

    def _count(self, name: str, value: int, offset: int | None) -> int:
        if not 0 <= value <= MAX_NUMBER:
            message = f"{name}: expected 0 to {MAX_NUMBER}, found {value}"
            raise self._error("mlx-cache-number", message, None, f"0 to {MAX_NUMBER}", value, offset)
        return value

    def _check_shapes(self, layer: MlxLayer) -> None:
        heads, capacity = layer.keys[0].data.shape[1:3]
        for array in (*layer.keys, *layer.values):
            if array.data.shape[1:3] != (heads, capacity):
                found = f"{list(array.data.shape[1:3])}"
                message = f"expected {heads} heads of {capacity} tokens as keys have, found {found}"
                raise self._error("mlx-cache-array", message, array.name, [heads, capacity], found)
        if layer.kind != ROTATING and layer.offset > capacity:
            message = f"it counts {layer.offset} tokens, and its arrays hold {capacity}"
            raise self._error("mlx-cache-number", message, layer.keys[0].name, f"at most {capacity}", layer.offset)
        if layer.kind == ROTATING and layer.numbers["index"] > capacity:
            message = f"index: expected at most {capacity}, the tokens of its arrays, found {layer.numbers['index']}"
            raise self._error("mlx-cache-number", message, layer.keys[0].name)
        for arrays in (layer.keys, layer.values) if layer.kind == QUANTIZED else ():
            words, scales, biases = (array.data.shape[3] for array in arrays)
            bits, group_size = layer.numbers["bits"], layer.numbers["group_size"]
            if words * 32 != scales * group_size * bits or biases != scales or arrays[1].dtype != arrays[2].dtype:
                found = f"{words} words, {scales} scales and {biases} biases"
                message = f"expected {bits} bits in groups of {group_size}, found {found} in a row"
                raise self._error("mlx-cache-array", message, arrays[0].name)

    def _error(
        self,
        code: str,
        message: str,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        offset: int | None = None,
    ) -> DefectError:
        if offset is None and tensor is not None and tensor in self.file:
            offset = self.file[tensor].offset
        text = f"layer {self.index} ({self.kind}): {message}"
        return DefectError(code, self.file.path, text, offset=offset, tensor=tensor, expected=expected, found=found)
