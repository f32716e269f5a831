"""The plan of one model on one machine: weights, workspace, what every cache costs, which types to use.

`memory_plan` has the arithmetic; here a GGUF's header is read and a choice is made. Only headers are read, so that a
model may be larger than the machine. Whether the runtime serves the model's architecture is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from sys import platform

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.cache_spec import PRESETS, CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.formats.file_kind import check_is_model
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.inspection.facts import DEFAULT_CONTEXT
from tqgguf.formats.inspection.model import ModelFacts, PerLayer, model_facts
from tqgguf.formats.models.model_path import model_path
from tqgguf.formats.planning.memory_plan import (
    MOST_CONTEXT,
    CachePlan,
    Workspace,
    cache_plan,
    estimate_workspace,
)
from tqgguf.formats.planning.weight_sizes import Device, file_bytes, held_bytes

FIDELITY: tuple[tuple[str, str], ...] = (
    *(("f16", "f16"), ("q8_0", "q8_0")),
    *PRESETS.values(),
    *((name, name) for name in ("q5_1", "q5_0", "q4_1", "q4_0")),
)
"""Pairs of types in the order in which they are proposed: what fits first is taken. README and docs/measuring.md have
the figures. Those behind the presets are larger, and proposed where a model's heads cannot have turbo types."""

LAST_RESORT = ("turbo2", "turbo2")
"""Proposed where nothing else holds the context; never for a shorter one, so much does it change answers."""

_GPU_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_MOST_CONTEXTS, _CONTEXT_STEP, _LEAST_CONTEXT = 4, 4, 512


@dataclass(frozen=True)
class Ask:
    """What is to be planned. specs: label and types of each row; None: every cache type, and the presets. contexts:
    tokens; None: the model's and parts of it. memory: bytes. chunk: tokens evaluated at a time.
    """

    memory: int
    device: Device
    chunk: int
    specs: tuple[tuple[str, CacheSpec], ...] | None = None
    contexts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ModelPlan:
    """Bytes and tokens. weights: as held on the device; file_weights: as in the file. room: left for a cache; negative
    where weights and workspace alone do not fit. wanted: the context that `choice` is for; choice: the row to use, None
    where no cache fits. impossible: labels of types that the model's heads cannot have.
    """

    path: str
    n_files: int
    about: ModelFacts
    ask: Ask
    weights: int
    file_weights: int
    workspace: Workspace
    room: int
    contexts: tuple[int, ...]
    rows: tuple[CachePlan, ...]
    impossible: tuple[str, ...]
    wanted: int
    choice: CachePlan | None
    notes: tuple[str, ...]


def default_device() -> Device:
    """Where MLX would compute: a GPU on a Mac and where its package for NVIDIA is installed. MLX is not imported."""
    return "gpu" if platform == "darwin" or any(_is_installed(name) for name in _GPU_PACKAGES) else "cpu"


def plan_model(path: str | os.PathLike[str], ask: Ask) -> ModelPlan:
    """FormatError: no model's GGUF; RequestError: types that were asked for by name and do not fit its heads."""
    path = model_path(path)
    if os.path.isdir(path):
        raise RequestError(
            f"{os.fsdecode(path)}: expected a GGUF file, found a folder; `tqgguf inspect` sizes its cache"
        )
    with open_gguf(path, even_cut=True) as file:
        check_is_model(file.path, file.metadata, file.tensors)
        about, shapes, notes = model_facts(file)
        weights, file_weights = held_bytes(file, ask.device), file_bytes(file)
        path, n_files = file.path, len(file.paths)
        if file.cut is not None:
            notes = (*notes, file.cut.bare)
    workspace = _workspace(about, ask.chunk)
    room = ask.memory - weights - workspace.total
    trained = about.context_length or DEFAULT_CONTEXT
    contexts = tuple(sorted(ask.contexts)) if ask.contexts else _contexts(trained)
    rows, impossible = _rows(shapes, ask, contexts, room)
    wanted = max(contexts)
    return ModelPlan(
        path,
        n_files,
        about,
        ask,
        weights,
        file_weights,
        workspace,
        room,
        contexts,
        rows,
        impossible,
        wanted,
        _choice(rows, wanted, ask.specs is not None),
        (*notes, *_notes(about, shapes, contexts, ask.device)),
    )


def _contexts(trained: int) -> tuple[int, ...]:
    """The model's context, a quarter of it, a quarter of that ..."""
    found = [trained // _CONTEXT_STEP**i for i in range(_MOST_CONTEXTS)]
    return tuple(sorted(n for n in found if n >= min(_LEAST_CONTEXT, trained)))


def _rows(
    shapes: Sequence[LayerShape], ask: Ask, contexts: Sequence[int], room: int
) -> tuple[tuple[CachePlan, ...], tuple[str, ...]]:
    if not shapes:
        return (), ()
    rows, impossible = [], []
    for label, spec in ask.specs or _every_type():
        try:
            rows.append(cache_plan(label, spec, shapes, contexts, room, MOST_CONTEXT))
        except RequestError:
            if ask.specs is not None:
                raise
            impossible.append(label)
    return tuple(rows), tuple(impossible)


def _every_type() -> Sequence[tuple[str, CacheSpec]]:
    pairs = dict.fromkeys([(name, name) for name in CACHE_TYPE_NAMES] + list(PRESETS.values()))
    return [(pair_label(k, v), CacheSpec(k, v)) for k, v in pairs]


def pair_label(type_k: str, type_v: str) -> str:
    """One name for a pair, as `--cache-types` takes it."""
    return type_k if type_k == type_v else f"{type_k}/{type_v}"


def _choice(rows: Sequence[CachePlan], wanted: int, is_asked: bool) -> CachePlan | None:
    """The first row by fidelity (of named ones: in their order) that holds the wanted context, else the longest."""
    by_types = {(row.type_k, row.type_v): row for row in rows}
    proposed = list(rows) if is_asked else [by_types[pair] for pair in FIDELITY if pair in by_types]
    last = [] if is_asked or LAST_RESORT not in by_types else [by_types[LAST_RESORT]]
    fitting = next((row for row in proposed + last if row.longest >= wanted), None)
    longest = max(proposed, key=lambda row: row.longest, default=None)
    return fitting or (longest if longest is not None and longest.longest else None)


def _workspace(about: ModelFacts, chunk: int) -> Workspace:
    hidden, heads = about.hidden_size or 0, _most(about.n_heads)
    attention = heads * max(about.head_dim_k or 0, about.head_dim_v or 0)
    return estimate_workspace(chunk, hidden, _most(about.feed_forward), attention, about.vocab_size or 0)


def _most(value: PerLayer | None) -> int:
    return max(value) if isinstance(value, tuple) else value or 0


def _notes(about: ModelFacts, shapes: Sequence[LayerShape], contexts: Sequence[int], device: Device) -> Sequence[str]:
    notes = []
    trained = about.context_length
    if trained and max(contexts) > trained:
        notes.append(f"the model was trained for {trained:,} tokens; run goes beyond only with --rope-scale")
    if device == "gpu":
        notes.append("the workspace was measured on CPUs; a GPU's own buffers are not in it")
    if any(shape.window is not None for shape in shapes):
        notes.append("with --prompt-cache run keeps all pages of layers that see a window, which is not counted")
    return notes


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
