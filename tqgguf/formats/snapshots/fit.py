"""Whether a snapshot belongs to a model and can be held by the cache that was asked for; nothing is changed here.

Every refusal names the field, what was expected and what was found. What the cache should be if nothing was asked for
is the file's own: `spec_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tqgguf.formats.blocks.cache_spec import BALANCE_MODES, CacheSpec, LayerTypes
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES, LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.fingerprint import Fingerprint
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, Snapshot
from tqgguf.formats.wording import shown

_PART_NAMES = {
    "weights": "weights",
    "hyperparameters": "hyperparameters",
    "rope": "RoPE parameters",
    "tokenizer": "tokenizer",
}


def check_model(
    path: str,
    snapshot: Snapshot,
    architecture: str,
    fingerprint: Fingerprint,
    shapes: Sequence[LayerShape],
    n_vocab: int,
    *,
    native: bool = True,
) -> None:
    """RequestError unless the snapshot is this model's, of which `shapes` are the layers that have keys and values.

    A snapshot without a fingerprint (an import) is held against architecture and shapes alone. native: its rows must be
    coded as caches here hold them.
    """
    if snapshot.fingerprint is not None:
        differing = snapshot.fingerprint.differences(fingerprint)
        if differing:
            parts = " and ".join(_PART_NAMES[part] for part in differing)
            raise RequestError(
                f"{path}: made with another model ({shown(snapshot.model)}): expected this model's {parts}, found "
                "others; evaluate the prompt with this model into another file"
            )
    elif snapshot.architecture not in ("", architecture):
        raise RequestError(
            f"{path}: architecture: expected {architecture} as the model has, found {shown(snapshot.architecture)}"
        )
    if snapshot.tokens.size and snapshot.tokens.max() >= n_vocab:
        raise RequestError(
            f"{path}: tokens: expected ids below {n_vocab}, the model's vocabulary, found {snapshot.tokens.max()}"
        )
    if not snapshot.layers and not snapshot.n_cells:
        return
    if len(snapshot.layers) != len(shapes):
        raise RequestError(f"{path}: layers: expected {len(shapes)} as the model has, found {len(snapshot.layers)}")
    for layer, shape in zip(snapshot.layers, shapes, strict=True):
        _check_layer(path, layer, shape)
        if native:
            _check_codecs(path, layer)


def _check_layer(path: str, layer: LayerSnapshot, shape: LayerShape) -> None:
    where = f"{path}: layer {layer.layer}"
    fields = (
        ("KV heads", shape.n_kv_heads, layer.n_kv_heads),
        ("head size of K", shape.head_dim_k, layer.k.codec.head_dim),
        ("head size of V", shape.head_dim_v, layer.v.codec.head_dim),
        ("window", shape.window or "none", layer.window or "none"),
    )
    for name, expected, found in fields:
        if expected != found:
            raise RequestError(f"{where}: {name}: expected {expected} as the model has, found {found}")


def _check_codecs(path: str, layer: LayerSnapshot) -> None:
    for side in SIDES:
        codec = layer.side(side).codec
        if not codec.is_native(side):
            form = [f"rotation {codec.rotation}"]
            form += [f"padded to {codec.stored_dim} values"] if codec.stored_dim != codec.head_dim else []
            form += [f"codebook generation {codec.generation}"] if codec.generation else []
            raise RequestError(
                f"{path}: layer {layer.layer}, {side.upper()}: {codec.cache_type} as another engine codes it "
                f"({', '.join(form)}), which a cache here cannot hold; re-encode it with `tqgguf convert --requantise`"
            )


def check_cache(path: str, snapshot: Snapshot, spec: CacheSpec, n_layers: int, n_ctx: int) -> None:
    """RequestError unless a cache of `spec` for a model of `n_layers` and a context of n_ctx tokens can hold it."""
    if snapshot.n_cells > n_ctx:
        raise RequestError(
            f"{path}: holds {snapshot.n_cells} tokens, expected at most {n_ctx}, the size of the context; raise -c"
        )
    resolved = spec.resolve(n_layers)
    for layer in snapshot.layers:
        if layer.layer >= n_layers:
            raise RequestError(f"{path}: layer {layer.layer}: expected less than {n_layers}, the model's layers")
        _check_types(f"{path}: layer {layer.layer}", layer.types, resolved[layer.layer])


def _check_types(where: str, found: LayerTypes, expected: LayerTypes) -> None:
    fields = (
        ("-ctk", "type of K", expected.type_k, found.type_k),
        ("-ctv", "type of V", expected.type_v, found.type_v),
        ("--kv-balance", "balance of K", expected.balance, found.balance),
        ("--cache-exact-first", "exact prefix", expected.n_prefix, found.n_prefix),
    )
    for flag, name, wanted, there in fields:
        if wanted != there:
            raise RequestError(
                f"{where}: {name}: expected {wanted}, found {there}; leave {flag} out to take what the file has, or "
                "evaluate the prompt into another file"
            )


def spec_of(snapshot: Snapshot, n_layers: int) -> CacheSpec:
    """The request whose cache holds the snapshot; `check_cache` says whether there is one."""
    if not snapshot.layers:
        return CacheSpec()
    spec = CacheSpec(_text(snapshot, "k"), _text(snapshot, "v"), snapshot.layers[0].n_prefix)
    candidates = [replace(spec, balance=balance) for balance in (None, *BALANCE_MODES)]
    return next((spec for spec in candidates if _resolves_to(spec, snapshot, n_layers)), spec)


def _resolves_to(spec: CacheSpec, snapshot: Snapshot, n_layers: int) -> bool:
    types = spec.resolve(n_layers)
    return all(layer.layer < n_layers and types[layer.layer] == layer.types for layer in snapshot.layers)


def _text(snapshot: Snapshot, side: Side) -> str:
    """The types of all layers as -ctk and -ctv have them: the usual one, then the exceptions."""
    types = {layer.layer: layer.types.of(side) for layer in snapshot.layers}
    usual = Counter(types.values()).most_common(1)[0][0]
    return ",".join([usual, *(f"{layer}:{name}" for layer, name in types.items() if name != usual)])
