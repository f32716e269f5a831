"""What `tqgguf convert` does with a prompt cache: open the one file, write the other, say what was made."""

from __future__ import annotations

import os
from pathlib import Path

from tqgguf.cli.convert_ends import CACHE_KINDS, End
from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.cli.figures import size
from tqgguf.cli.json_text import json_text
from tqgguf.cli.product import name_product
from tqgguf.cli.progress import say
from tqgguf.formats.atomic import check_target, refuse_source
from tqgguf.formats.carriers.table import (
    CARRIERS,
    Foreign,
    Target,
    check_replaceable,
    open_carrier,
    write_carrier,
)
from tqgguf.formats.errors import RequestError
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.json_file import read_json
from tqgguf.formats.llama.from_snapshot import ExportOptions
from tqgguf.formats.llama.to_snapshot import ImportOptions
from tqgguf.formats.mlx.from_snapshot import MlxExportOptions
from tqgguf.formats.mlx.to_snapshot import ROPE_ORDERS, MlxImportOptions
from tqgguf.formats.models.model_path import model_path
from tqgguf.formats.models.outline import ModelOutline, outline_of_gguf
from tqgguf.formats.snapshots.fit import check_model
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.wording import readable


def convert_cache(request: ConvertRequest, source: End, target: End) -> int:
    """Serve the request and return the exit status. What can be refused is refused before anything is written."""
    kind, source_kind = CACHE_KINDS[target], CACHE_KINDS[source]
    _check_places(request)
    outline = _outline(request.model)
    foreign = Foreign(
        outline,
        request.head_dim or 0,
        ImportOptions(request.profile, request.rotated, request.generation, request.sequence),
        MlxImportOptions(traditional=_asked_order(request)),
    )
    snapshot = open_carrier(request.source, foreign)
    if outline is not None and outline.fingerprint is not None:
        shapes = [layer.shape for layer in outline.layers]
        name, vocabulary = readable(request.source), outline.n_vocab
        check_model(name, snapshot, outline.architecture, outline.fingerprint, shapes, vocabulary, native=False)
    write_carrier(request.target, snapshot, kind, _target(request, source_kind))
    _tell(request, snapshot, source_kind, kind)
    return 0


def _check_places(request: ConvertRequest) -> None:
    check_target(request.target)
    refuse_source(request.target, [request.source])
    check_replaceable(request.target)


def _outline(model: str | None) -> ModelOutline | None:
    if model is None:
        return None
    model = model_path(model)
    if os.path.isdir(model):
        raise RequestError(f"-m {model}: expected the model's GGUF, found a folder")
    with open_gguf(model) as file:
        return outline_of_gguf(file)


def _target(request: ConvertRequest, source_kind: FileKind) -> Target:
    """Flags about llama.cpp files are about SRC if that is one, and only else about DST."""
    own = source_kind is FileKind.SNAPSHOT
    return Target(
        request.type_k,
        request.type_v,
        request.requantise,
        ExportOptions(
            profile=request.profile,
            v_trans=request.v_trans,
            rotated=request.rotated if own else None,
            generation=request.generation if own else None,
        ),
        MlxExportOptions(
            bits=request.bits or 0,
            group_size=MlxExportOptions.group_size if request.group_size is None else request.group_size,
            traditional=_written_order(request),
            metadata=None if request.mlx_model is None else {"model": request.mlx_model, "tokenizer_config": "{}"},
        ),
    )


def _asked_order(request: ConvertRequest) -> bool | None:
    """Whether RoPE turns neighbouring channels in the file of mlx-lm, if --rope-order says so."""
    return None if request.rope_order is None else ROPE_ORDERS[request.rope_order]


def _written_order(request: ConvertRequest) -> bool | None:
    """The same of a file to be written: as in the model of --mlx-model, if that is a folder that says so."""
    config = Path(request.mlx_model or "") / "config.json"
    if request.rope_order is not None or request.mlx_model is None or not config.is_file():
        return _asked_order(request)
    return True if read_json(config).get("rope_traditional") is True else None


def _tell(request: ConvertRequest, snapshot: Snapshot, source_kind: FileKind, kind: FileKind) -> None:
    n_bytes = os.path.getsize(request.target)
    if request.json_output:
        print(
            json_text(
                {
                    "source": readable(request.source),
                    "source_kind": source_kind.value,
                    "target": readable(request.target),
                    "target_kind": kind.value,
                    "tokens": len(snapshot.tokens),
                    "cells": snapshot.n_cells,
                    "layers": len(snapshot.layers),
                    "bytes": n_bytes,
                },
            )
        )
        return
    say(
        f"{readable(request.source)} ({CARRIERS[source_kind].name}) to {readable(request.target)} "
        f"({CARRIERS[kind].name}): {snapshot.n_cells:,} tokens, {len(snapshot.layers)} layers, {size(n_bytes)}"
    )
    name_product(request.target)
