"""`save_prompt_cache` and `load_prompt_cache`: caches of `make_prompt_cache` in files, for programs of mlx-lm's kind.

The counterparts in mlx-lm take the same first arguments. Flags and sessions are unknown here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tqgguf.formats.carriers.table import check_replaceable
from tqgguf.formats.errors import RequestError, naming, words_of
from tqgguf.formats.snapshots.fit import check_cache, check_model, spec_of
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import UNKNOWN_TOKEN, Snapshot
from tqgguf.formats.snapshots.write import write_snapshot
from tqgguf.formats.wording import shown
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.cache.make_prompt_cache import make_caches
from tqgguf.runtime.cache.snapshots import capture_layers, restore_layers
from tqgguf.runtime.models.loaded_model import LoadedModel, network_of


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: Sequence[Any],
    *,
    tokens: ArrayLike | None = None,
    model: LoadedModel | None = None,
) -> None:
    """Write what a prompt cache of `make_prompt_cache` holds; mlx-lm's function of this name, for ours.

    tokens: the ids [n] that were evaluated, one for each token held (default: unknown). model: what `load_model` gave;
    the file then says which model it belongs to. RequestError: another number of tokens, ids that are none, caches of
    another kind or not of this model, or a file that is no prompt cache and so is not replaced; FormatError: numbers
    that are not finite; TqggufError: the file cannot be written. A file that was there then stays as it was.
    """
    path = os.fsdecode(file_name)
    if model is not None and not isinstance(model, LoadedModel):
        raise RequestError(f"model: expected what tqgguf.load_model gave, found {type(model).__name__}")
    if not isinstance(cache, Sequence):
        raise RequestError(f"cache: expected a list of caches, one for each layer, found {type(cache).__name__}")
    offsets = {c.offset for c in cache if isinstance(c, BlockKVCache)}
    if len(offsets) != 1:
        raise RequestError(f"expected caches of tqgguf.make_prompt_cache that hold as many tokens, found {offsets}")
    (n_tokens,) = offsets
    ids = np.full(n_tokens, UNKNOWN_TOKEN, np.int32) if tokens is None else _ids(tokens)
    if len(ids) != n_tokens:
        raise RequestError(f"tokens: expected the {n_tokens} that the cache holds, found {len(ids)}")
    config = None if model is None else model.config
    snapshot = Snapshot(
        tokens=ids,
        layers=capture_layers(cache),
        n_cells=n_tokens,
        architecture="" if config is None else config.architecture,
        n_vocab=0 if config is None else config.vocab_size,
        model="" if config is None else config.name,
        fingerprint=None if model is None else model.fingerprint,
    )
    _check_model(path, snapshot, model)
    _check_made_for(cache, model)
    check_replaceable(path)
    write_snapshot(path, snapshot)


def _ids(tokens: ArrayLike) -> NDArray[np.int32]:
    """Ids of tokens as they are kept. RequestError: they are no whole numbers of 32 bits."""
    try:
        ids = np.asarray(tokens).reshape(-1)
    except ValueError as error:  # lists of different lengths
        raise RequestError(f"tokens: expected a list of ids, found otherwise: {words_of(error)}") from error
    if not ids.size:
        return np.empty(0, np.int32)
    limits = np.iinfo(np.int32)
    if ids.dtype.kind not in "iu" or ids.min() < limits.min or ids.max() > limits.max:
        raise RequestError(f"tokens: expected ids, whole numbers up to {limits.max}, found {shown(ids[:8])}")
    return ids.astype(np.int32)


def _check_model(path: str, snapshot: Snapshot, model: LoadedModel | None) -> None:
    """RequestError where a snapshot cannot be of a model whose fingerprint is known."""
    if model is not None and model.fingerprint is not None:
        config = model.config
        shapes = config.layer_shapes()
        check_model(path, snapshot, config.architecture, model.fingerprint, shapes, config.vocab_size)


def _check_made_for(cache: Sequence[Any], model: LoadedModel | None) -> None:
    """RequestError where a layer's cache was made for another model than this, even of the same sizes."""
    if model is None or model.fingerprint is None:
        return
    for made in cache:
        other = made.fingerprint if isinstance(made, BlockKVCache) else None
        differing = () if other is None else other.differences(model.fingerprint)
        if differing:
            raise RequestError(
                f"layer {made.layer}: its cache was made for another model: expected this model's "
                f"{' and '.join(differing)}, found others; give the model that the cache was made for"
            )


def load_prompt_cache(
    file_name: str | os.PathLike[str], model: Any, *, return_tokens: bool = False
) -> list[Any] | tuple[list[Any], list[int]]:
    """A prompt cache for a model that holds what a file holds, to hand to `mlx_lm.generate(..., prompt_cache=...)`.

    model: an mlx-lm model, or what `load_model` gave; the latter is held against the file's fingerprint.
    return_tokens: also the token ids that the cache holds (-1: unknown). FormatError: the file is damaged;
    RequestError: it is another model's; TqggufError: it cannot be read.
    """
    path, network = os.fsdecode(file_name), network_of(model)
    snapshot = open_snapshot(path)
    if isinstance(model, LoadedModel):
        _check_model(path, snapshot, model)
    n_layers = len(network.layers)
    spec = spec_of(snapshot, n_layers)
    check_cache(path, snapshot, spec, n_layers, n_ctx=snapshot.n_cells)
    made = make_caches(network, spec)
    with naming(path):
        restore_layers(snapshot, made)
    return (made, snapshot.tokens[: snapshot.n_cells].tolist()) if return_tokens else made
