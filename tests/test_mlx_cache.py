"""mlx-lm's prompt caches to snapshots and back, held against mlx-lm itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from llama_builder import build_state
from mlx_cache_files import CURRENT, DAMAGED, SOUND, cache_bytes
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from snapshots import make_layer, make_snapshot
from tiny_models import TinyModel, write_tiny

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.llama.from_snapshot import ExportOptions, export_llama_state
from tqgguf.formats.mlx.affine import BITS, GROUP_SIZES, dequantise, pack_codes, quantise, unpack_codes
from tqgguf.formats.mlx.cache import LAYOUTS, MlxCache, is_mlx_cache, read_mlx_cache
from tqgguf.formats.mlx.from_snapshot import MlxExportOptions, write_mlx_cache
from tqgguf.formats.mlx.to_snapshot import MlxImportOptions, import_mlx_cache, outline_of_mlx_cache
from tqgguf.formats.models.outline import ModelOutline, outline_of_widths
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.safetensors import open_safetensors
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.snapshots.write import write_snapshot
from tqgguf.formats.validation.validate import validate
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import load_model

DATA = Path(__file__).parent / "data"
HEADS, DIM = 2, 64
FLOATS = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}


def filled(cache: Any, n: int, dtype: mx.Dtype = mx.float16, chunk: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Give a cache n tokens in chunks; K and V float32 [tokens, heads, dim] as it was given them."""
    both = [mx.random.normal((1, HEADS, n, DIM), key=mx.random.key(side)).astype(dtype) for side in (0, 1)]
    for i in range(0, n, chunk):
        cache.update_and_fetch(*(x[:, :, i : i + chunk] for x in both))
    return tuple(np.array(x.astype(mx.float32))[0].swapaxes(0, 1) for x in both)


def opened(path: Path) -> MlxCache:
    return read_mlx_cache(open_safetensors(path))


def imported(path: Path, model: ModelOutline | None = None, **options: Any) -> Snapshot:
    cache = opened(path)
    return import_mlx_cache(cache, model or outline_of_mlx_cache(cache), MlxImportOptions(**options))


def values(snapshot: Snapshot, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    held = snapshot.layers[layer]
    return tuple(side.codec.decode(side.rows[0 : side.rows.shape[0]]) for side in (held.k, held.v))


# class -> cache, tokens, tokens at a time, first position that is held, window
CACHES: dict[str, tuple[Any, int, int, int, int | None]] = {
    "KVCache": (KVCache, 300, 64, 0, None),
    "KVCache of one token": (KVCache, 1, 1, 0, None),
    "a window that is not full": (lambda: RotatingKVCache(100), 50, 1, 0, 100),
    "a window in chunks": (lambda: RotatingKVCache(100), 300, 64, 157, 100),
    "a window at once": (lambda: RotatingKVCache(100), 300, 300, 0, 100),
    "a ring": (lambda: RotatingKVCache(100), 330, 1, 230, 100),
    "a ring at its end": (lambda: RotatingKVCache(100), 300, 1, 200, 100),
    "a limit that was not reached": (lambda: RotatingKVCache(1000, 4), 300, 64, 0, None),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CACHES)
def test_caches_of_mlx_lm_hold_the_same_values_as_snapshots(name, dtype, tmp_path):
    make, n, chunk, first, window = CACHES[name]
    caches = [make(), make()]
    expected = [filled(cache, n, FLOATS[dtype], chunk) for cache in caches]
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches, {"model": "m"})
    snapshot = imported(tmp_path / "cache.safetensors")
    write_snapshot(tmp_path / "snapshot.gguf", snapshot)
    for found in (snapshot, open_snapshot(tmp_path / "snapshot.gguf")):
        assert (found.n_cells, found.layers[1].start, found.layers[1].window) == (n, first, window)
        assert found.layers[1].k.codec.cache_type == dtype
        assert all((a == b[first:]).all() for a, b in zip(values(found, 1), expected[1], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CACHES)
def test_what_is_written_is_what_was_read(name, layout, tmp_path):
    make, n, chunk, _, window = CACHES[name]
    cache = make()
    filled(cache, n, chunk=chunk)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [cache], {"model": "m", "note": "n"})
    snapshot = imported(tmp_path / "a.safetensors")
    write_mlx_cache(tmp_path / "b.safetensors", snapshot, MlxExportOptions(layout=layout))
    again = imported(tmp_path / "b.safetensors")
    held = min(n, window) if window else n
    assert again.layers[0].start == n - held
    assert all((a == b[-held:]).all() for a, b in zip(values(again), values(snapshot), strict=True))
    assert opened(tmp_path / "b.safetensors").metadata == {"model": "m", "note": "n", "tokenizer_config": "{}"}


@pytest.mark.parametrize("name", CACHES)
def test_mlx_lm_goes_on_from_what_we_write_as_from_its_own_cache(name, tmp_path):
    make, n, chunk, _, window = CACHES[name]
    own = make()
    filled(own, n, chunk=chunk)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [own], {})
    write_mlx_cache(tmp_path / "b.safetensors", imported(tmp_path / "a.safetensors"))
    (loaded,), metadata = load_prompt_cache(str(tmp_path / "b.safetensors"), return_metadata=True)
    assert json.loads(metadata["tokenizer_config"]) == {}
    assert loaded.offset == own.offset
    for i in range(3):  # a ring's places differ: compare as sets of rows
        token = [mx.random.normal((1, HEADS, 1, DIM), key=mx.random.key(9 + i)).astype(mx.float16)] * 2
        fetched = [np.array(cache.update_and_fetch(*token)[0])[0, 0] for cache in (own, loaded)]
        ordered = [rows[np.lexsort(rows.T)] for rows in fetched]
        width = min(map(len, ordered)) if window else n + i + 1
        assert {row.tobytes() for row in ordered[1]} <= {row.tobytes() for row in ordered[0]}
        assert len(ordered[1]) == width


def test_our_session_goes_on_in_mlx_lm_with_the_same_logits(tmp_path):
    model = load_model(write_tiny(tmp_path / "m.gguf", TinyModel("gemma3", window=64, window_pattern=2, n_layers=3)))
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, 280, 200)]
    session = Session(model, CacheSpec())
    session.prefill(tokens)
    write_mlx_cache(tmp_path / "cache.safetensors", session.snapshot(), MlxExportOptions(metadata={"model": "m"}))
    loaded, metadata = load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
    assert [type(cache).__name__ for cache in loaded] == ["RotatingKVCache", "KVCache", "RotatingKVCache"]
    assert metadata["tqgguf_tokens"].split() == [str(t) for t in tokens]
    for token in (5, 6, 7):
        ours = session.decode(token)
        theirs = np.array(model.logits(model.outputs(mx.array([[token]]), loaded)).astype(mx.float32)).reshape(-1)
        assert np.abs(ours - theirs).max() < 2e-3


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_caches_become_the_values_that_mlx_decodes(bits, tmp_path):
    cache = QuantizedKVCache(group_size=32, bits=bits)
    filled(cache, 40)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache], {})
    snapshot = imported(tmp_path / "cache.safetensors")
    for found, held in zip(values(snapshot), cache.keys_and_values(), strict=True):
        expected = np.array(mx.dequantize(*held, group_size=32, bits=bits))[0].swapaxes(0, 1)
        assert np.abs(found - expected).max() <= 2**-8  # an f16 step of values below 4
    assert (snapshot.origin["bits"], snapshot.origin["group_size"]) == (bits, 32)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_caches_are_written_as_mlx_quantises(bits, tmp_path):
    own = KVCache()
    filled(own, 40)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [own], {})
    snapshot = imported(tmp_path / "a.safetensors")
    write_mlx_cache(tmp_path / "b.safetensors", snapshot, MlxExportOptions(bits=bits, group_size=32))
    (loaded,) = load_prompt_cache(str(tmp_path / "b.safetensors"))
    own.keys, own.values = own.keys[:, :, :40], own.values[:, :, :40]
    expected = own.to_quantized(group_size=32, bits=bits)
    assert (loaded.offset, loaded.bits, loaded.group_size) == (40, bits, 32)
    for found, wanted in zip((*loaded.keys, *loaded.values), (*expected.keys, *expected.values), strict=True):
        assert mx.array_equal(found, wanted).item()


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_affine_quantisation_is_mlxs_bit_by_bit(bits, group_size):
    random = np.random.default_rng([bits, group_size])
    x = (random.standard_normal((3, 5, 256)) * random.choice([1e-3, 1, 50], (3, 5, 1))).astype(np.float32)
    x[0, 0], x[0, 1] = 0, 1.5
    words, scales, biases = (np.array(part) for part in mx.quantize(mx.array(x), group_size=group_size, bits=bits))
    for found, expected in zip(quantise(x, bits, group_size), (words, scales, biases), strict=True):
        assert (found == expected).all()
    assert (pack_codes(unpack_codes(words, bits), bits) == words).all()
    decoded = mx.dequantize(*map(mx.array, (words, scales, biases)), group_size=group_size, bits=bits)
    assert (dequantise(words, scales, biases, bits) == np.array(decoded)).all()


def test_the_layout_before_is_read_from_a_file_of_mlx_lm_0_31(tmp_path):
    snapshot = imported(DATA / "mlx_lm_0.31.3.safetensors")
    assert [(layer.start, layer.window) for layer in snapshot.layers] == [(0, None), (0, None), (6, 5), (0, None)]
    assert (snapshot.n_cells, snapshot.origin["layout"], snapshot.origin["metadata_model"]) == (11, "before", "tiny")
    shape = (2, 11, 32)  # as tests/oracles/mlx_cache_before.py gave them
    for layer in (0, 2, 3):
        for side, found in enumerate(values(snapshot, layer)):
            given = (np.arange(np.prod(shape)) * (7 + 4 * layer + 2 * side) % 1021 / 8).reshape(shape).swapaxes(0, 1)
            assert (found == given[snapshot.layers[layer].start :]).all()
    quantised = values(snapshot, 1)[0]
    given = (np.arange(np.prod(shape)) * 11 % 1021 / 8).reshape(shape).swapaxes(0, 1)
    assert np.abs(quantised - given).max() < 128 / 15
    write_mlx_cache(tmp_path / "again.safetensors", snapshot)
    written = opened(tmp_path / "again.safetensors")
    assert (written.layout, [layer.kind for layer in written.layers]) == (
        "before",
        ["KVCache", "KVCache", "RotatingKVCache", "KVCache"],
    )


def test_tokens_can_be_told_and_travel_with_our_files(tmp_path):
    cache = KVCache()
    filled(cache, 5)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [cache], {})
    assert list(imported(tmp_path / "a.safetensors").tokens) == [-1] * 5
    snapshot = imported(tmp_path / "a.safetensors", tokens=[9, 8, 7, 6, 5, 4])
    assert (list(snapshot.tokens), snapshot.n_cells) == ([9, 8, 7, 6, 5, 4], 5)
    write_mlx_cache(tmp_path / "b.safetensors", snapshot)
    assert list(imported(tmp_path / "b.safetensors").tokens) == [9, 8, 7, 6, 5, 4]
    with pytest.raises(RequestError, match="expected 5 or more tokens, as the cache holds, found 2"):
        imported(tmp_path / "a.safetensors", tokens=[1, 2])


def test_llama_like_models_have_halves_in_mlx_lm_and_neighbours_in_llama_cpp(tmp_path):
    cache = KVCache()
    (k, v) = filled(cache, 5)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [cache], {})
    llama = outline_of_widths("llama", [LayerShape(HEADS, DIM, DIM)])
    snapshot = imported(tmp_path / "a.safetensors", llama, tokens=range(5))
    found_k, found_v = values(snapshot)
    assert (found_k[..., 0::2] == k[..., :32]).all() and (found_k[..., 1::2] == k[..., 32:]).all()
    assert (found_v == v).all()
    state = export_llama_state(snapshot, ExportOptions())
    rows = state.memories[0].streams[0].k[0].data[0:5]
    assert (rows.reshape(-1).view(np.float16).reshape(5, HEADS, DIM) == found_k).all()
    assert state.version == 10 and build_state().data[:4] == b"nsgg"
    write_mlx_cache(tmp_path / "b.safetensors", snapshot)
    (loaded,) = load_prompt_cache(str(tmp_path / "b.safetensors"))
    assert (np.array(loaded.keys)[0].swapaxes(0, 1) == k).all()
    qwen = replace(llama, architecture="qwen3", layers=tuple(replace(x, rope=RopeLayout(DIM)) for x in llama.layers))
    assert (values(imported(tmp_path / "a.safetensors", qwen))[0] == k).all()
    same = imported(tmp_path / "a.safetensors", llama, traditional=True)  # a GGUF's weights, in mlx-lm's classes
    assert (values(same)[0] == k).all()


@pytest.mark.parametrize("traditional", [True, False])
def test_a_file_of_ours_says_in_which_order_its_channels_are(tmp_path: Path, traditional: bool) -> None:
    llama = outline_of_widths("llama", [LayerShape(HEADS, DIM, DIM)])
    cache = KVCache()
    filled(cache, 5)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [cache], {})
    snapshot = replace(imported(tmp_path / "a.safetensors", llama, tokens=range(5)), origin={})
    write_mlx_cache(tmp_path / "b.safetensors", snapshot, MlxExportOptions(traditional=traditional))
    again = imported(tmp_path / "b.safetensors", llama)
    assert (values(again)[0] == values(snapshot)[0]).all()
    assert again.origin["traditional"] is traditional


def test_blocks_are_decoded_only_if_that_is_asked_for(tmp_path):
    snapshot = make_snapshot(300, make_layer(0, 300, "turbo4", "q8_0", balance="full", n_prefix=4))
    with pytest.raises(RequestError, match="K holds blocks of turbo4 that would be decoded to f16"):
        write_mlx_cache(tmp_path / "cache.safetensors", snapshot)
    assert not list(tmp_path.iterdir())
    write_mlx_cache(tmp_path / "cache.safetensors", snapshot, MlxExportOptions(requantise=True))
    exact = make_snapshot(300, make_layer(0, 300, "f16", "f16"))
    for found, expected in zip(values(imported(tmp_path / "cache.safetensors")), values(exact), strict=True):
        assert ((found - expected) ** 2).sum() / (expected**2).sum() < 0.02
        assert (found[256:] == expected[256:]).all()


REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "layout: expected one of current, before": {"layout": "older"},
    "bits: expected one of 0, 2": {"bits": 7},
    "group size: expected one of 32": {"group_size": 16},
    "type of floats: expected one of f16": {"cache_type": "q8_0"},
    "cannot be quantised to 4 bits in groups of 128": {"bits": 4, "group_size": 128},
}


@pytest.mark.parametrize("message", REFUSED_OPTIONS)
def test_options_that_cannot_be_are_refused(message, tmp_path):
    snapshot = make_snapshot(5, make_layer(0, 5, "f16", "f16"))
    with pytest.raises(RequestError) as error:
        write_mlx_cache(tmp_path / "cache.safetensors", snapshot, MlxExportOptions(**REFUSED_OPTIONS[message]))
    assert message in str(error.value)


def test_rows_that_mlx_lm_needs_must_be_there(tmp_path):
    for layer in (make_layer(0, 300, "f16", "f16", start=128), make_layer(0, 300, "f16", "f16", start=256, window=100)):
        with pytest.raises(RequestError, match="mlx-lm needs the tokens from"):
            write_mlx_cache(tmp_path / "cache.safetensors", make_snapshot(300, layer))


def test_dropped_tokens_and_other_caches_are_refused_by_name(tmp_path):
    path = tmp_path / "cache.safetensors"
    dropped = RotatingKVCache(100, keep=4)
    filled(dropped, 300, chunk=1)
    save_prompt_cache(str(path), [dropped], {})
    with pytest.raises(FormatError, match="RotatingKVCache with keep=4 has dropped tokens"):
        imported(path)
    recurrent = ArraysCache(2)
    recurrent[0] = recurrent[1] = mx.zeros((1, 4))
    save_prompt_cache(str(path), [recurrent], {})
    with pytest.raises(DefectError, match=r"layer 0 \(ArraysCache\): expected a cache of class KVCache") as error:
        imported(path)
    assert error.value.code == "mlx-cache-class"
    save_prompt_cache(str(path), [KVCache()], {})
    with pytest.raises(FormatError, match="holds no tokens"):
        imported(path)


def test_files_of_other_models_are_refused(tmp_path):
    cache = KVCache()
    filled(cache, 5)
    save_prompt_cache(str(tmp_path / "a.safetensors"), [cache], {})
    for shapes, message in (
        ([LayerShape(HEADS, DIM, DIM)] * 2, "expected the model's 2 layers, found 1"),
        ([LayerShape(HEADS, 128, DIM)], r"expected \(KV heads, head size of K, of V\) \(2, 128, 64\)"),
    ):
        with pytest.raises(FormatError, match=message):
            imported(tmp_path / "a.safetensors", outline_of_widths("llama", shapes))


def test_weights_are_no_prompt_cache(tmp_path):
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"a": mx.zeros((2, 2))}, {"format": "mlx"})
    assert not is_mlx_cache(open_safetensors(tmp_path / "w.safetensors").metadata)
    with pytest.raises(DefectError, match="expected a prompt cache of mlx-lm"):
        opened(tmp_path / "w.safetensors")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_caches_are_refused_with_their_rule(name, tmp_path):
    metadata, arrays, rule = DAMAGED[name]
    (tmp_path / "c.safetensors").write_bytes(cache_bytes(metadata, arrays))
    with pytest.raises(DefectError) as error:
        opened(tmp_path / "c.safetensors")
    assert error.value.rule.id == rule
    assert "\n" not in str(error.value)


def test_values_that_are_not_finite_are_refused_among_the_tokens_that_are_held(tmp_path):
    path = tmp_path / "c.safetensors"
    for bad, held, is_sound in ((0, 5, False), (6, 5, True), (6, 7, False)):
        cache = KVCache()
        filled(cache, 300)
        cache.keys[0, 1, bad, 3] = float("nan")
        cache.trim(300 - held)
        save_prompt_cache(str(path), [cache], {})
        assert [finding.rule.id for finding in validate(path)] == ([] if is_sound else ["TQ525"])
        if is_sound:
            write_snapshot(tmp_path / "s.gguf", imported(path))
            assert validate(tmp_path / "s.gguf") == []
        else:
            with pytest.raises(DefectError, match=f"expected finite values, found bits .* in head 1, row {bad}"):
                imported(path)


def test_codes_whose_values_no_float_holds_are_refused_by_name(tmp_path):
    cache = QuantizedKVCache(group_size=64, bits=4)
    filled(cache, 3, mx.float32)
    cache.keys = (mx.full(cache.keys[0].shape, 0xFFFFFFFF, mx.uint32), cache.keys[1] * 0 + 3e38, cache.keys[2])
    save_prompt_cache(str(tmp_path / "c.safetensors"), [cache], {})
    with pytest.raises(FormatError, match=r"c\.safetensors: layer 0, K: expected values that f32 holds"):
        write_snapshot(tmp_path / "s.gguf", imported(tmp_path / "c.safetensors"))
    assert not (tmp_path / "s.gguf").exists()


@pytest.mark.parametrize("tokens", ["5 -2 7", "5 97 7", "5 x 7", "5 1e3 7", "5 99999999999 7"])
def test_tokens_that_are_none_are_refused(tokens, tmp_path):
    cache = KVCache()
    filled(cache, 3)
    save_prompt_cache(str(tmp_path / "c.safetensors"), [cache], {"tqgguf_tokens": tokens})
    model = replace(outline_of_widths("llama", [LayerShape(HEADS, DIM, DIM)]), n_vocab=97)
    with pytest.raises(FormatError, match=r"tokens: expected ids of tokens|token 1: expected an id of 0 to 96"):
        imported(tmp_path / "c.safetensors", model)


def test_a_name_with_thousands_of_digits_belongs_to_no_layer(tmp_path):
    (tmp_path / "c.safetensors").write_bytes(cache_bytes(CURRENT, {**SOUND, f"{'1' * 5000}.0": (("F16", 2), (1,))}))
    assert [finding.rule.id for finding in validate(tmp_path / "c.safetensors")] == ["TQ520"]


def test_a_cache_of_zeros_that_is_sound_is_read(tmp_path):
    (tmp_path / "c.safetensors").write_bytes(cache_bytes(CURRENT, SOUND))
    assert opened(tmp_path / "c.safetensors").layers[0].offset == 0
