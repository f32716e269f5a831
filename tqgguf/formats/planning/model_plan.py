"""The plan of one model on one machine: weights, workspace, what every cache costs, which types to use.

`memory_plan` has the arithmetic; here headers are read and a choice is made. No weight is read, so that a model may be
larger than the machine. Whether `run` takes the model is known to whoever asks for a plan (`ServedCheck`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from sys import platform

from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.cache_spec import PRESETS, CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.file_kind import check_is_model
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf
from tqgguf.formats.inspection.facts import DEFAULT_CONTEXT
from tqgguf.formats.inspection.folder import read_folder
from tqgguf.formats.inspection.model import ModelFacts, PerLayer, model_facts
from tqgguf.formats.models.model_path import model_path
from tqgguf.formats.planning.memory_plan import (
    MOST_CONTEXT,
    CachePlan,
    Workspace,
    cache_plan,
    estimate_workspace,
)
from tqgguf.formats.planning.weight_sizes import Device, Widened, file_bytes, folder_bytes, held_bytes, widened

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
    """Bytes and tokens. refusal: why `run` does not take the model. weights: as held on the device; file_weights: as in
    the file; widened: what takes more than in the file. room: left for a cache; negative where weights and workspace
    alone do not fit. wanted: the context that `choice` is for; choice: the row to use, None where no cache fits or run
    refuses the model. impossible: labels of types that the model's heads cannot have.
    """

    path: str
    n_files: int
    refusal: TqggufError | None
    about: ModelFacts
    ask: Ask
    weights: int
    file_weights: int
    widened: tuple[Widened, ...]
    workspace: Workspace
    room: int
    contexts: tuple[int, ...]
    rows: tuple[CachePlan, ...]
    impossible: tuple[str, ...]
    wanted: int
    choice: CachePlan | None
    notes: tuple[str, ...]
    rope_scale_is_a_flag: bool = True
    """Whether `run --rope-scale` stretches positions; of a folder, config.json does."""

    @property
    def failure(self) -> TqggufError | None:
        """Why nothing is proposed: `run` refuses the model, or nothing fits. None too where only the sizes of the
        model's cache are not known.
        """
        if self.refusal is None and self.choice is None and (self.rows or self.room <= 0):
            return RequestError("No cache fits: take more memory, a smaller model, or a smaller -ub.")
        return self.refusal


def default_device() -> Device:
    """Where MLX would compute: a GPU on a Mac and where its package for NVIDIA is installed. MLX is not imported."""
    return "gpu" if platform == "darwin" or any(_is_installed(name) for name in _GPU_PACKAGES) else "cpu"


ServedCheck = Callable[[GGUFFile | Path], Sequence[LayerShape] | None]
"""The sizes of the caches that `run` would make for an open GGUF, or the folder of that path; None: not known. Raises
the TqggufError with which run refuses the model."""


def plan_model(path: str | os.PathLike[str], ask: Ask, check: ServedCheck) -> ModelPlan:
    """FormatError: no model; RequestError: types that were asked for by name and do not fit the heads of a model that
    run takes, or no path of a model (see `model_path`).
    """
    name = model_path(path)
    model = _of_folder(name, ask, check) if os.path.isdir(name) else _of_gguf(name, ask, check)
    about, shapes, refusal = model.about, model.shapes, model.refusal
    workspace = _workspace(about, ask.chunk)
    room = ask.memory - model.weights - workspace.total
    trained = about.context_length or DEFAULT_CONTEXT
    contexts = tuple(sorted(ask.contexts)) if ask.contexts else _contexts(trained)
    rows, impossible = _rows(shapes, ask, contexts, room, strict=ask.specs is not None and refusal is None)
    wanted = max(contexts)
    return ModelPlan(
        model.path,
        model.n_files,
        refusal,
        about,
        ask,
        model.weights,
        model.file_weights,
        model.widened,
        workspace,
        room,
        contexts,
        rows,
        impossible,
        wanted,
        None if refusal is not None else _choice(rows, wanted, ask.specs is not None),
        (*model.notes, *_notes(about, shapes, contexts, ask.device, model.rope_scale_is_a_flag)),
        model.rope_scale_is_a_flag,
    )


@dataclass(frozen=True)
class _Model:
    """What of a plan does not depend on caches; fields as of `ModelPlan`."""

    path: str
    n_files: int
    refusal: TqggufError | None
    about: ModelFacts
    shapes: Sequence[LayerShape]
    weights: int
    file_weights: int
    widened: tuple[Widened, ...]
    notes: tuple[str, ...]
    rope_scale_is_a_flag: bool = True


def _of_gguf(path: str, ask: Ask, check: ServedCheck) -> _Model:
    with open_gguf(path, even_cut=True) as file:
        check_is_model(file.path, file.metadata, file.tensors)
        about, shapes, notes = model_facts(file)
        return _Model(
            file.path,
            len(file.paths),
            _asked(check, file)[1],
            about,
            shapes,
            held_bytes(file, ask.device),
            file_bytes(file),
            widened(file, ask.device),
            notes if file.cut is None else (*notes, file.cut.bare),
        )


def _of_folder(path: str, ask: Ask, check: ServedCheck) -> _Model:
    found = read_folder(path)
    file_weights = sum(tensor.n_bytes or 0 for tensor in found.tensors)
    held, grown = folder_bytes(found.facts.n_parameters, file_weights, ask.device)
    shapes, refusal = _asked(check, Path(path))
    notes = found.notes
    if shapes is None:
        shapes = found.shapes
    else:  # config.json's notes tell what it leaves open of the shapes
        n_others = (found.facts.n_layers or 0) - len(shapes)
        notes = (f"{n_others} layers keep a state of another kind, which is not counted",) if n_others > 0 else ()
    return _Model(path, len(found.files), refusal, found.facts, shapes, held, file_weights, grown, notes, False)


def _asked(check: ServedCheck, model: GGUFFile | Path) -> tuple[Sequence[LayerShape] | None, TqggufError | None]:
    """What `check` answers, or raises."""
    try:
        return check(model), None
    except TqggufError as error:
        return None, error


def _contexts(trained: int) -> tuple[int, ...]:
    """The model's context, a quarter of it, a quarter of that ..."""
    found = [trained // _CONTEXT_STEP**i for i in range(_MOST_CONTEXTS)]
    return tuple(sorted(n for n in found if n >= min(_LEAST_CONTEXT, trained)))


def _rows(
    shapes: Sequence[LayerShape], ask: Ask, contexts: Sequence[int], room: int, *, strict: bool
) -> tuple[tuple[CachePlan, ...], tuple[str, ...]]:
    if not shapes:
        return (), ()
    rows, impossible = [], []
    for label, spec in ask.specs or _every_type():
        try:
            rows.append(cache_plan(label, spec, shapes, contexts, room, MOST_CONTEXT))
        except RequestError:
            if strict:
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


def _notes(
    about: ModelFacts, shapes: Sequence[LayerShape], contexts: Sequence[int], device: Device, by_flag: bool
) -> Sequence[str]:
    """by_flag: whether positions are stretched by a flag of `run`."""
    stretched = "--rope-scale" if by_flag else "rope_scaling in config.json"
    notes = []
    trained = about.context_length
    if trained and max(contexts) > trained:
        notes.append(f"the model was trained for {trained:,} tokens; run goes beyond only with {stretched}")
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
