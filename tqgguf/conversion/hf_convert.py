"""A Hugging Face checkpoint (config.json, safetensors, tokenizer) as a GGUF, as llama.cpp's converter makes it.

Names of tensors are gguf-py's; rows of queries and keys are reordered and norms shifted as the architecture's row says.
Weights are read, encoded and written a run of rows at a time.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from numpy.typing import NDArray

from tqgguf.conversion.files import Plan, PlannedTensor, judge_planned, make_plan
from tqgguf.conversion.gguf_to_gguf import STEPS_KEY
from tqgguf.conversion.hf_architectures import Checkpoint, find_checkpoint
from tqgguf.conversion.hf_files import stored_tensors
from tqgguf.conversion.hf_parameters import add_parameters, number, rope_factors
from tqgguf.conversion.hf_shapes import Shapes
from tqgguf.conversion.hf_vocabulary import add_vocabulary
from tqgguf.conversion.row_encoding import Encode, bytes_of, encoded_runs
from tqgguf.conversion.weight_rules import FILE_TYPES, Choice, ModelFacts, choose
from tqgguf.formats.cursor import Buffer
from tqgguf.formats.errors import FormatError, UnsupportedModelError, words_of
from tqgguf.formats.gguf.reader import TensorInfo
from tqgguf.formats.gguf.types import MetadataType, ValueType, ggml_type_name
from tqgguf.formats.gguf.write import Piece, entry
from tqgguf.formats.json_file import read_json
from tqgguf.formats.mapped_file import forget_pages
from tqgguf.formats.models.folder_defaults import completed, is_tied
from tqgguf.formats.models.folder_features import check_features
from tqgguf.formats.models.folder_files import check_folder_files
from tqgguf.formats.models.folder_keys import language_part
from tqgguf.formats.models.folder_rope import GGUF, chosen_rope
from tqgguf.formats.safetensors import SafeTensor
from tqgguf.formats.wording import shown

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_F32 = 0
_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Of Llama's class: settings -> the matrices that have a bias by them."""
_GUESSED = {"BF16": "bf16"}  # of the first matrix -> type of the weights where none is named; else f16


def plan_checkpoint(folder: str, target: str, wanted: str | None = None, max_bytes: int = 0, step: str = "") -> Plan:
    """Plan a GGUF of the checkpoint in `folder`.

    wanted: a type of FILE_TYPES; None: bf16 for checkpoints of that type, else f16. max_bytes: as make_plan. step: the
    provenance to be noted; the type is added. FormatError: files are missing or damaged; UnsupportedModelError: an
    architecture, a tokenizer or a tensor that is not converted.
    """
    path = Path(folder)
    config_path = str(path / "config.json")
    check_folder_files(path)
    config = read_json(path / "config.json")
    row = find_checkpoint(config, config_path)
    config = _completed(row, language_part(config, config_path), config_path)
    check_features(row.family, config, config_path, GGUF)
    stored = stored_tensors(path)
    if is_tied(row.family, config, "lm_head.weight" in stored, config_path):
        stored.pop("lm_head.weight", None)  # where it is there, the class does not use it
    if wanted is None:
        first = next((tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1), "F32")
        wanted = _GUESSED.get(first, "f16")
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[row.architecture])
    with _silent_gguf():
        n_tokens = add_vocabulary(writer, row, config, path)
        tensors = _planned_tensors(path, row, config, stored, wanted, n_tokens)
        _add_description(writer, path, tensors)
    add_parameters(writer, row, config, config_path)
    writer.add_file_type(FILE_TYPES[wanted])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    steps = entry(STEPS_KEY, MetadataType(ValueType.ARRAY, ValueType.STRING), [f"{step}, weights to {wanted}"])
    entries = (*_entries(writer, folder), steps)
    judge_planned(folder, entries, tensors)
    return make_plan(target, entries, tensors, max_bytes)


@contextlib.contextmanager
def _silent_gguf() -> Iterator[None]:
    """gguf-py wonders aloud about names and tokens, on stderr."""
    loggers = [logging.getLogger(name) for name in ("gguf", "metadata")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _completed(row: Checkpoint, config: Mapping[str, Any], path: str) -> dict[str, Any]:
    try:
        return completed(row.family, config)
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise FormatError(
            f"{path}: sizes are missing or none that can be: {type(error).__name__}: {words_of(error)}"
        ) from error


def _planned_tensors(
    folder: Path,
    row: Checkpoint,
    config: Mapping[str, Any],
    stored: Mapping[str, SafeTensor],
    wanted: str,
    n_tokens: int,
) -> list[PlannedTensor]:
    path = str(folder / "config.json")
    n_layers, n_heads = number(config, "num_hidden_layers", path), number(config, "num_attention_heads", path)
    n_kv_heads = number(config, "num_key_value_heads", path)
    table = gguf.get_tensor_name_map(row.architecture, n_layers)
    names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in stored}
    unknown = [name for name, found in names.items() if found is None]
    if unknown:
        raise UnsupportedModelError(
            f"{folder}: tensor {unknown[0]} has no place in a GGUF of {gguf.MODEL_ARCH_NAMES[row.architecture]} "
            f"({len(unknown)} such tensors)"
        )
    found_names = {found for found in names.values() if found is not None}
    facts = ModelFacts(
        gguf.MODEL_ARCH_NAMES[row.architecture], n_layers, 0, n_heads // n_kv_heads, "output.weight" not in found_names
    )
    _check_biases(config, found_names, n_layers, row, path)
    _check_once(folder, names)
    _check_complete(folder, found_names, n_layers)
    shapes = Shapes(config, path)
    turns_pairs = config.get("rope_traditional") is True  # as in the folders that convert makes of GGUFs for mlx-lm
    planned = []
    factors = rope_factors(config, chosen_rope(row.family, config, path), path) if row.is_llama else None
    if factors is not None:
        planned.append(_made("rope_freqs.weight", factors))
    for name, tensor in stored.items():
        new_name, shape, order = names[name], tensor.shape, None
        assert new_name is not None
        what = f"{folder}: tensor {name}"
        shapes.check(what, new_name, shape)
        if len(shape) not in (1, 2):
            raise UnsupportedModelError(f"{what}: expected a vector or a matrix, found {list(shape)}")
        if row.rope_pairs and not turns_pairs and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            order = _pairs(shape[0], n_heads if "q_proj" in name else n_kv_heads, name, folder)
        if new_name in ("token_embd.weight", "output.weight"):
            if shape[0] < n_tokens or (shape[0] > n_tokens and not row.is_gemma):
                raise FormatError(f"{what}: expected {n_tokens} rows, one a token, found {shape[0]}")
            shape = (n_tokens, *shape[1:])
        info = TensorInfo(new_name, shape, _F32, int(np.prod(shape)), None, 0, 0)
        chosen = choose(info, wanted, facts)
        offset = row.norm_offset if name.endswith("norm.weight") else 0.0
        planned.append(_planned(what, info, tensor, chosen, order, offset))
    return planned


def _planned(
    what: str, info: TensorInfo, tensor: SafeTensor, chosen: Choice, order: NDArray[np.intp] | None, offset: float
) -> PlannedTensor:
    return PlannedTensor(
        name=info.name,
        shape=info.shape,
        type_name=tensor.dtype,
        ggml_type=chosen.ggml_type,
        source_bytes=tensor.data.nbytes,
        n_bytes=bytes_of(chosen.ggml_type, info.n_values),
        read=partial(_read, what, info.shape, tensor, chosen.ggml_type, order, offset),
        is_copied=ggml_type_name(chosen.ggml_type) == tensor.dtype,
        reason=chosen.reason,
    )


def _made(name: str, values: NDArray[np.float32]) -> PlannedTensor:
    """A tensor that the checkpoint does not have."""

    def read(encode: Encode | None) -> Iterator[tuple[int, Piece]]:
        yield 0, values.tobytes()

    return PlannedTensor(name, values.shape, "config.json", _F32, 0, values.nbytes, read, True)


def _read(
    what: str,
    shape: tuple[int, ...],
    tensor: SafeTensor,
    ggml_type: int,
    order: NDArray[np.intp] | None,
    offset: float,
    encode: Encode | None,
) -> Iterator[tuple[int, Piece]]:
    """A tensor's data in its new type. order: which row comes where; offset: what is added to a vector."""
    stored: NDArray[Any] = np.frombuffer(tensor.data, _DTYPES[tensor.dtype]).reshape(tensor.shape)
    if stored.ndim == 1:
        values = _floats(stored if order is None else stored[order], tensor.dtype)
        shifted = values + values.dtype.type(offset) if offset else values  # in its own precision, as torch does it
        for _, piece in encoded_runs((1, shape[0]), ggml_type, lambda rows: shifted[None], encode, what):
            yield tensor.data.nbytes, piece
        return

    def rows_of(rows: slice) -> NDArray[Any]:
        return _floats(stored[rows] if order is None else stored[order[rows]], tensor.dtype)

    n_read = 0
    for rows, piece in encoded_runs((shape[0], shape[1]), ggml_type, rows_of, encode, what):
        n_more = tensor.data.nbytes - n_read if rows.stop == shape[0] else (rows.stop - rows.start) * stored.strides[0]
        yield n_more, piece
        if order is None:  # else rows that are still to come lie there too
            _forget(tensor, n_read, n_read + n_more)
        n_read += n_more
    _forget(tensor, 0, n_read)


def _forget(tensor: SafeTensor, start: int, stop: int) -> None:
    forget_pages(cast(Buffer, tensor.data.obj), tensor.offset + start, tensor.offset + stop)


def _floats(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float16 or float32, contiguous; bfloat16 becomes float32."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(stored)


def _pairs(n_rows: int, n_heads: int, name: str, folder: Path) -> NDArray[np.intp]:
    """Where a head's rows come from: halves of a head become neighbours."""
    if n_rows % (2 * n_heads):
        raise FormatError(f"{folder}: tensor {name}: expected {n_heads} heads of an even size, found {n_rows} rows")
    return np.arange(n_rows).reshape(n_heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _check_biases(config: Mapping[str, Any], names: set[str], n_layers: int, row: Checkpoint, path: str) -> None:
    """FormatError where biases are there and not used by the class, or the reverse."""
    for key, parts in _BIASES.items():
        if row.family not in ("llama", "mistral"):
            continue
        wanted = bool(config.get(key, False))
        for name in (f"blk.{i}.{part}.bias" for i in range(n_layers) for part in parts):
            if (name in names) != wanted:
                found = "one" if name in names else "none"
                raise FormatError(
                    f"{path}: {key} is {str(wanted).lower()}: expected {('no', 'a')[wanted]} bias {name}, found {found}"
                )


def _check_once(folder: Path, names: Mapping[str, str | None]) -> None:
    """FormatError where two tensors of the checkpoint have the same place. names: places by the checkpoint's names."""
    holders: dict[str | None, str] = {}
    for name, place in names.items():
        other = holders.setdefault(place, name)
        if other != name:
            raise FormatError(f"{folder}: expected one tensor for {place}, found {shown(other)} and {shown(name)}")


def _check_complete(folder: Path, names: set[str], n_layers: int) -> None:
    """FormatError where a layer lacks a tensor that another one has, or a part is missing that every model has."""
    suffixes = {name.split(".", 2)[2] for name in names if name.startswith("blk.")}
    expected = ["token_embd.weight", "output_norm.weight"]
    expected += [f"blk.{i}.{suffix}" for i in range(n_layers) for suffix in sorted(suffixes)]
    missing = [name for name in expected if name not in names]
    if missing or not suffixes:
        what = missing[0] if missing else "blk.0"
        raise FormatError(f"{folder}: no tensor for {what} ({len(missing)} of {len(expected)}): weights are incomplete")


def _add_description(writer: gguf.GGUFWriter, folder: Path, tensors: list[PlannedTensor]) -> None:
    """general.*: what gguf-py finds in the model card and makes of the folder's name."""
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), 0)
    total, shared, expert, n_experts = writer.get_total_parameter_count()
    try:
        metadata = gguf.Metadata.load(None, folder, None, total)
        metadata.name = metadata.name or folder.resolve().name
        metadata.size_label = metadata.size_label or gguf.size_label(total, shared, expert, n_experts)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
    except Exception as error:  # a model card can be anything
        raise FormatError(f"{folder}: README.md or its like cannot be read: {words_of(error)}") from error


def _entries(writer: gguf.GGUFWriter, folder: str) -> Iterator[bytes]:
    """What was added, as bytes. FormatError: a value that came from a file of the folder is of another type."""
    for key, held in writer.kv_data[0].items():
        value, kind = held.value, ValueType(int(held.type))
        try:
            element = None
            if kind is ValueType.ARRAY:
                found = held.sub_type if held.sub_type is not None else gguf.GGUFValueType.get_type(value[0])
                element = ValueType(int(found))
            made = entry(key, MetadataType(kind, element), value)
        except (AttributeError, IndexError, OverflowError, TypeError, ValueError, struct.error) as error:
            where = "README.md, generation_config.json or their like"
            raise FormatError(f"{folder}: {where}: expected {kind.name} for {key}, found {shown(value)}") from error
        yield made
