"""The overview of `tqgguf inspect`: what a person wants to know of a file, on a screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from tqgguf.cli.figures import aligned, size
from tqgguf.cli.printable import printable
from tqgguf.formats.file_kind import FileKind, gguf_purpose
from tqgguf.formats.inspection.cache import CalibrationFacts, CodecUse, MlxCacheFacts, SnapshotFacts
from tqgguf.formats.inspection.facts import KV_STEP, Inspection
from tqgguf.formats.inspection.model import ModelFacts, PerLayer, RopeFacts, TokenizerFacts
from tqgguf.formats.llama.reader import StateSummary, StreamSummary
from tqgguf.formats.wording import readable

Facts = Iterator[tuple[str, str]]
_HASH_DIGITS = 12
_MISSING = "-"
_MOST_CHARACTERS = 60
"""Of a text that a stranger wrote."""


def lines(found: Inspection, width: int | None) -> list[str]:
    """width: of the terminal, to wrap to; None leaves each fact its line."""
    files = f" in {len(found.files)} files" if len(found.files) > 1 else ""
    head = f"{printable(readable(found.path))}: {found.kind}, {found.container}, {size(found.n_bytes)}{files}"
    facts = [(label, text) for label, text in _facts(found) if text]
    facts += [("note", note) for note in found.notes]
    label_width = max((len(label) for label, _ in facts), default=0) + 2
    body = [line for label, text in facts for line in _wrapped(label.ljust(label_width), printable(text), width)]
    return [head, *body, *_types(found), *_costs(found)]


def _wrapped(label: str, text: str, width: int | None) -> list[str]:
    if width is None:
        return [label + text]
    return textwrap.wrap(
        label + text, max(width, 40), subsequent_indent=" " * len(label), break_long_words=False, break_on_hyphens=False
    )


def _facts(found: Inspection) -> Facts:
    about = found.about
    if isinstance(about, ModelFacts):
        yield from _model(about)
    elif isinstance(about, SnapshotFacts):
        yield from _snapshot(about)
    elif isinstance(about, CalibrationFacts):
        yield from _calibration(about)
    elif isinstance(about, StateSummary):
        yield from _state(about)
    elif isinstance(about, MlxCacheFacts):
        yield from _mlx_cache(about)
    elif found.kind is FileKind.GGUF:
        values = {key: entry.value for key, entry in found.metadata.items()}
        yield "purpose", gguf_purpose(values, ())
        yield "architecture", str(values.get("general.architecture", ""))
    if found.metadata:
        entries, tensors = _count(len(found.metadata), "entry"), _count(len(found.tensors), "tensor")
        yield "metadata", f"{entries} (--metadata), {tensors} (--tensors)"


def _model(m: ModelFacts) -> Facts:
    yield "name", _joined(m.name, m.size_label, m.license and f"license {m.license}")
    yield (
        "architecture",
        _joined(
            m.architecture or "not stated",
            m.n_layers is not None and _count(m.n_layers, "layer"),
            m.hidden_size is not None and f"{m.hidden_size:,} wide",
            m.feed_forward is not None and f"feed forward {_per_layer(m.feed_forward)}",
            m.n_experts and f"{m.n_experts} experts, {m.n_experts_used or '?'} at a time",
        ),
    )
    yield "parameters", _parameters(m)
    yield "quantised as", m.file_type or ""
    yield "attention", _attention(m)
    yield "window", _window(m)
    yield "context", f"{m.context_length:,} tokens" if m.context_length else ""
    yield "RoPE", _rope(m.rope)
    if m.tokenizer is not None:
        yield "tokenizer", _tokenizer(m.tokenizer)
        special = m.tokenizer.special.items()
        yield "special tokens", ", ".join(f"{name} {token.id} {token.text or ''}".strip() for name, token in special)


def _parameters(m: ModelFacts) -> str:
    if not m.n_parameters:
        return ""
    tied = {True: "the output is the embedding", False: "an output layer of its own", None: ""}[m.tied_embeddings]
    return _joined(f"{_short(m.n_parameters)} ({m.n_parameters:,})", tied)


def _attention(m: ModelFacts) -> str:
    if not m.n_heads:
        return ""
    dims = m.head_dim_k is not None and f"{m.head_dim_k} values each" + (
        f" in K, {m.head_dim_v} in V" if m.head_dim_v not in (None, m.head_dim_k) else ""
    )
    fewer = m.n_kv_layers is not None and m.n_kv_layers != m.n_layers and f"KV caches in {m.n_kv_layers} layers"
    kv_heads = m.n_kv_heads and _heads(m.n_kv_heads, "KV head")
    return _joined(_heads(m.n_heads, "head"), kv_heads, dims, fewer)


def _heads(n: PerLayer, noun: str) -> str:
    return _count(n, noun) if isinstance(n, int) else f"{_per_layer(n)} {noun}s"


def _window(m: ModelFacts) -> str:
    if not m.window or m.n_window_layers == 0:
        return ""
    where = f"in {m.n_window_layers} of {m.n_kv_layers} layers" if m.n_window_layers else ""
    return f"{m.window:,} keys {where}".strip()


def _rope(rope: RopeFacts) -> str:
    if rope.base is None and rope.dims is None:
        return ""
    factor = f" by {rope.factor:g}" if rope.factor else ""
    return _joined(
        rope.base is not None and f"base {rope.base:,.9g}",
        rope.base_window is not None and f"{rope.base_window:,.9g} in window layers",
        rope.dims is not None and f"{rope.dims} values of a head",
        rope.scaling and rope.scaling != "none" and f"scaled {rope.scaling}{factor}",
        rope.original_context and f"trained for {rope.original_context:,} tokens before",
        rope.has_factors and "a factor for each pair",
    )


def _tokenizer(t: TokenizerFacts) -> str:
    return _joined(
        t.model or "not stated",
        t.pre and f"pre-tokenizer {t.pre}",
        t.n_tokens and _count(t.n_tokens, "token"),
        t.n_merges and _count(t.n_merges, "merge"),
        t.adds_bos and "adds BOS",
        t.adds_eos and "adds EOS",
        f"chat template of {t.chat_template:,} characters" if t.chat_template else "no chat template",
    )


def _snapshot(s: SnapshotFacts) -> Facts:
    yield "model", _joined(s.model, s.architecture)
    yield (
        "tokens",
        _joined(
            f"{s.n_tokens:,}",
            s.n_cells != s.n_tokens and f"{s.n_cells:,} of them with keys and values",
            s.prompt_tokens and f"{s.prompt_tokens:,} evaluated as prompt",
            s.chunk and f"on a grid of {s.chunk}",
        ),
    )
    heads = " or ".join(_count(n, "KV head") for n in s.n_kv_heads)
    windows = s.n_window_layers and f"{s.n_window_layers} of them see a window"
    yield "layers", _joined(f"{s.n_layers}", heads, windows)
    for side in ("k", "v"):
        uses = [use for use in s.codecs if use.side == side]
        yield side.upper(), "; ".join(_codec(use, len(uses) > 1) for use in uses)
    if set(s.balance) - {"off"}:
        modes = ", ".join(f"{mode} in {_count(n, 'layer')}" for mode, n in s.balance.items())
        yield "balance of K", _joined(modes, s.n_calibrated and f"scale from a calibration in {s.n_calibrated}")
    yield "exact prefix", _count(s.n_prefix, "token") if s.n_prefix else ""
    yield "bytes", f"{size(s.n_bytes)}, as f16 {size(s.f16_bytes)} ({s.f16_bytes / max(s.n_bytes, 1):.2f}x)"
    yield "", ", ".join(f"{part.replace('_', ' ')} {size(n)}" for part, n in s.parts.items())
    yield "fingerprint", _hashes(s.fingerprint) if s.fingerprint else "none, the model is not named"
    yield "origin", ", ".join(f"{key} {value}" for key, value in s.origin.items() if isinstance(value, (str, int)))


def _codec(use: CodecUse, counted: bool) -> str:
    codec = use.codec
    padded = codec.stored_dim != codec.head_dim and f"padded to {codec.stored_dim}"
    rotation = codec.rotation != "none" and f"rotated ({codec.rotation}, {codec.rotation_size})"
    generation = codec.generation and f"codebook generation {codec.generation}"
    layers = counted and f"in {_count(use.n_layers, 'layer')}"
    return _joined(codec.cache_type, f"heads of {codec.head_dim}", padded, rotation, generation, layers)


def _calibration(c: CalibrationFacts) -> Facts:
    yield "model", _joined(c.model, c.architecture)
    if c.measured_with:
        yield "measured with", c.measured_with
    yield "made from", f"{c.n_tokens:,} tokens of {c.text} (SHA-256 {c.text_sha256[:_HASH_DIGITS]}...)"
    shapes = ", ".join(f"{_count(heads, 'KV head')} of {dim}" for heads, dim in c.shapes)
    yield "channel scale", f"{_count(c.n_layers, 'layer')}, {shapes}, from {c.scale[0]:.3g} to {c.scale[1]:.3g}"
    yield "fingerprint", _hashes(c.fingerprint)


def _state(s: StateSummary) -> Facts:
    yield "architecture", s.architecture or "not in such files"
    packed = s.packed and "in the server's packed list"
    yield "tokens", _joined(f"{s.n_tokens:,}", packed)
    several = len({stream.memory for stream in s.streams}) < len(s.streams)
    for i, stream in enumerate(s.streams):
        yield f"{stream.memory} memory" + (f" {i}" if several else ""), _stream(stream)
        yield "  K", _types_of_layers(stream.types_k, stream.row_bytes_k)
        transposed = "channel by channel" if stream.v_trans else ""
        yield "  V", _joined(_types_of_layers(stream.types_v, stream.row_bytes_v), transposed)
    yield "trailing", f"{s.trailing:,} bytes behind the last memory" if s.trailing else ""


def _mlx_cache(c: MlxCacheFacts) -> Facts:
    yield "written by", c.layout
    yield "said beside it", "; ".join(f"{name}: {_cut(value)}" for name, value in c.metadata.items())
    ids = "their ids are in the file" if c.has_tokens else "their ids are not in the file"
    yield (
        "tokens",
        _joined(
            " or ".join(f"{n:,}" for n in c.n_tokens),
            c.n_held < max(c.n_tokens, default=0) and f"{c.n_held:,} of them held",
            ids,
        ),
    )
    yield "layers", _joined(f"{c.n_layers}", ", ".join(f"{n} {kind}" for kind, n in c.classes.items()))
    yield "window", " or ".join(f"{n:,} keys" for n in c.windows)
    heads = " or ".join(_count(n, "KV head") for n in c.n_kv_heads)
    dims = [" or ".join(map(str, dims)) for dims in (c.head_dims_k, c.head_dims_v)]
    yield (
        "heads",
        heads and _joined(heads, f"{dims[0]} values each" + (f" in K, {dims[1]} in V" if dims[0] != dims[1] else "")),
    )
    yield "values", ", ".join(f"{name} in {_count(n, 'layer')}" for name, n in c.types.items())
    yield "bytes", f"{size(c.n_bytes)}, arrays with their spare room"


def _stream(stream: StreamSummary) -> str:
    at = "" if stream.positions is None else f"positions {stream.positions[0]} to {stream.positions[1]}"
    sequences = len(stream.sequences) != 1 and _count(len(stream.sequences), "sequence")
    return _joined(
        _count(stream.n_cells, "cell"), at, sequences, _count(stream.n_layers, "layer"), size(stream.n_bytes)
    )


def _types_of_layers(types: dict[str, int], row_bytes: tuple[int, ...]) -> str:
    rows = sorted(set(row_bytes))
    named = ", ".join(name if len(types) == 1 else f"{name} in {n} layers" for name, n in types.items())
    return _joined(named, rows and f"rows of {' or '.join(f'{n:,}' for n in rows)} bytes")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _hashes(fingerprint: object) -> str:
    parts = fingerprint.items() if isinstance(fingerprint, dict) else ()
    return ", ".join(f"{part} {str(value)[:_HASH_DIGITS]}" for part, value in parts)


def _types(found: Inspection) -> list[str]:
    totals = found.types()
    if not totals:
        return []
    data = sum(total.n_bytes or 0 for total in totals)
    rows = [
        [
            total.type,
            f"{total.n_tensors:,}",
            f"{total.n_values:,}",
            "?" if total.n_bytes is None else size(total.n_bytes),
            _MISSING if total.n_bytes is None else f"{total.n_bytes / max(data, 1):.1%}",
        ]
        for total in totals
    ]
    return ["", *aligned([["tensors of type", "count", "values", "bytes", "share"], *rows])]


def _costs(found: Inspection) -> list[str]:
    if not found.costs:
        return []
    f16 = next(cost for cost in found.costs if cost.cache_type == "f16")
    rows = [
        [
            cost.cache_type,
            *(_MISSING if n is None else size(n) for n in (cost.growth, cost.total)),
            _MISSING if not cost.total or not f16.total else f"{cost.total / f16.total:.1%}",
        ]
        for cost in found.costs
    ]
    heads = ["KV cache, K and V", f"{KV_STEP:,} tokens more", f"{found.n_context:,} tokens", "of f16"]
    impossible = [cost.cache_type for cost in found.costs if cost.growth is None]
    note = f"-: {', '.join(impossible)} cannot hold heads of this size" if impossible else ""
    return ["", *aligned([heads, *rows]), *([note] if note else [])]


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _per_layer(value: PerLayer) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{min(value):,} to {max(value):,} (by layer)"


def _count(n: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{n:,} {noun if n == 1 else plural}"


def _short(n: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return str(n)
