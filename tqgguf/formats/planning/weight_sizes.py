"""How many bytes a model's weights take while the model runs, by its header alone.

On a CPU matrices stay in the file, mapped, and count as the file has them; everything else is float32. On a GPU they
count as MLX packs them, or as float16, which is what they take on a Mac; on NVIDIA most take what the file has, which
is less. What is data's matter (a scale that MLX's form cannot hold) is not known here. A folder's are float32 on a CPU
and what its files have on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.mlx.forms import F32_BYTES, MLX_FORMS

Device = Literal["cpu", "gpu"]

HALF_BYTES = 2

FORMS: Mapping[float, str] = {HALF_BYTES: "16-bit floats", F32_BYTES: "32-bit floats"}
"""Bytes of a value -> the form that it is held in."""
_PACKED_FORM = "numbers that MLX packs"

ROW_GROUPS: Mapping[str, int] = {
    **dict.fromkeys(("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), 32),
    **dict.fromkeys(("Q4_K", "Q5_K", "Q6_K"), 256),
}
"""By ggml type what a row's length must divide into for the C library to multiply it where it lies in the file."""

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Widened:
    """Tensors that take more bytes in memory than in the file. what: their type; form: as what they are held. n_bytes:
    in the file; held: in memory.
    """

    what: str
    form: str
    n_bytes: int
    held: int


def held_bytes(file: GGUFFile, device: Device) -> int:
    """Bytes of all tensors as the runtime holds them on a device; a type that cannot be sized counts nothing."""
    return sum(held for _, held in _held(file, device))


def widened(file: GGUFFile, device: Device) -> tuple[Widened, ...]:
    """What makes weights larger in memory than in the file, the most bytes first."""
    in_file: Counter[tuple[str, str]] = Counter()
    in_memory: Counter[tuple[str, str]] = Counter()
    for info, held in _held(file, device):
        if info.n_bytes and held > info.n_bytes:
            what = f"{info.type_name} of experts" if len(info.shape) > 2 else info.type_name
            key = what, FORMS.get(held / info.n_values, _PACKED_FORM)
            in_file[key] += info.n_bytes
            in_memory[key] += held
    rows = (Widened(*key, in_file[key], in_memory[key]) for key in in_file)
    return tuple(sorted(rows, key=lambda row: row.n_bytes - row.held))


def folder_bytes(n_values: int, n_bytes: int, device: Device) -> tuple[int, tuple[Widened, ...]]:
    """What `held_bytes` and `widened` say of a GGUF, of a folder with so many values in so many bytes of its files."""
    held = n_values * F32_BYTES if device == "cpu" else n_bytes
    row = Widened("the folder's weights", FORMS[F32_BYTES], n_bytes, held)
    return held, (row,) if held > n_bytes else ()


def _held(file: GGUFFile, device: Device) -> Iterator[tuple[TensorInfo, int]]:
    tensors = file.tensors.values()
    if device == "gpu":
        half = _is_half(tensors)
        yield from ((info, _on_gpu(info, half)) for info in tensors)
    else:
        looked_up = {_EMBEDDING} if _OUTPUT in file.tensors else set()
        yield from ((info, _on_cpu(info, info.name in looked_up)) for info in tensors)


def file_bytes(file: GGUFFile) -> int:
    """Bytes of all tensors in the file, without padding."""
    return sum(info.n_bytes or 0 for info in file.tensors.values())


def _is_half(tensors: Iterable[TensorInfo]) -> bool:
    """Whether all matrices are of one half type, in which the whole model then runs."""
    types = {info.type_name for info in tensors if len(info.shape) == 2}
    return types in ({"F16"}, {"BF16"})


def _on_gpu(info: TensorInfo, half: bool) -> int:
    if len(info.shape) == 2 and info.type_name in MLX_FORMS:
        return MLX_FORMS[info.type_name].n_bytes(info.n_values)
    is_half = half or (len(info.shape) == 2 and info.type_name != "F32")
    return info.n_values * (HALF_BYTES if is_half else F32_BYTES)


def _on_cpu(info: TensorInfo, looked_up: bool) -> int:
    stays = len(info.shape) == 2 and info.shape[-1] % ROW_GROUPS.get(info.type_name, info.shape[-1] + 1) == 0
    if (stays or looked_up) and info.n_bytes is not None:
        return info.n_bytes
    return info.n_values * F32_BYTES
