"""What validate would reject is not written: the file that was there stays, and one line says why."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import TinyModel, write_tiny

import tqgguf
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.carriers.table import write_carrier
from tqgguf.formats.errors import FormatError, RequestError
from tqgguf.formats.file_kind import FileKind
from tqgguf.formats.validation.validate import validate
from tqgguf.runtime.cache.kv_cache import BlockKVCache
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.loaded_model import LoadedModel

BAD = float("nan"), float("inf"), -float("inf")


@cache
def loaded(seed: int = 0) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return tqgguf.load_model(write_tiny(Path(folder) / "m.gguf", TinyModel(seed=seed)))


def filled(n: int, type_k: str, type_v: str, **settings: Any) -> list[Any]:
    caches = tqgguf.make_prompt_cache(loaded(), type_k, type_v, **settings)
    rng = np.random.default_rng(n)
    for made in caches:
        made.update_and_fetch(*(mx.array(rng.standard_normal((1, 2, n, 64)).astype(np.float32)) for _ in "kv"))
    mx.eval([made.state for made in caches])
    return caches


def put(array: mx.array, value: float, at: int = 5) -> mx.array:
    """The array with a value in the place of another."""
    changed = np.array(array.astype(mx.float32)).reshape(-1)
    changed[at] = value
    return mx.array(changed.reshape(array.shape)).astype(array.dtype)


def rows_of_floats(made: BlockKVCache, side: int, value: float) -> None:
    plane = made.sides[side].plane
    plane.array, plane._held, plane._memory = put(plane.array, value), None, None


def tail(made: BlockKVCache, side: int, value: float) -> None:
    made.sides[side].tail = put(made.sides[side].tail, value, 5000)


def prefix(made: BlockKVCache, side: int, value: float) -> None:
    made.sides[side].prefix = put(made.sides[side].prefix, value)


def norms(made: BlockKVCache, side: int, value: float) -> None:
    plane = made.sides[side].scales
    plane.array, plane._held = put(plane.array, value, 300), None


def means(made: BlockKVCache, side: int, value: float) -> None:
    plane = made.sides[0].means
    plane.array, plane._held = put(plane.array, value), None


def channel_scale(made: BlockKVCache, side: int, value: float) -> None:
    made.sides[0].scale.value = put(made.sides[0].scale.value, value)


def query_squares(made: BlockKVCache, side: int, value: float) -> None:
    made.sides[0].scale.query_squares = put(mx.ones((2, 100, 64)), value)


TURBO, GGML = ("turbo4", "turbo3"), ("q8_0", "q4_0")
SPOILT: list[tuple[Callable[..., None], int, tuple[str, str]]] = [
    *((rows_of_floats, 300, pair) for pair in (("f16", "f16"), ("bf16", "f32"), ("f32", "bf16"))),
    *((of, 300, TURBO) for of in (tail, prefix, norms, means, channel_scale)),
    *((of, 100, TURBO) for of in (tail, prefix, query_squares)),
    *((of, 300, GGML) for of in (tail, norms)),
]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("spoil", "n", "pair"), SPOILT)
def test_numbers_that_no_file_may_hold_are_not_written(
    spoil: Callable[..., None], n: int, pair: tuple[str, str], value: float, side: int, tmp_path: Path
) -> None:
    caches, path = filled(n, *pair), tmp_path / "c.gguf"
    tqgguf.save_prompt_cache(path, caches, model=loaded())
    before = path.read_bytes()
    assert validate(path) == []
    spoil(caches[1], side, value)
    if spoil is query_squares and value == float("inf"):  # which a query beyond float32's squares has
        tqgguf.save_prompt_cache(path, caches)
        assert validate(path) == []
        return
    with pytest.raises(FormatError, match=r"c\.gguf: not written: layer 1, [KV], \w+: .*expected .*found") as error:
        tqgguf.save_prompt_cache(path, caches)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [FileKind.SESSION, FileKind.SEQUENCE, FileKind.SAFETENSORS, FileKind.SNAPSHOT])
def test_other_programs_files_are_not_written_of_such_numbers_either(kind: FileKind, tmp_path: Path) -> None:
    session = Session(loaded(), CacheSpec("f16", "f16"))
    session.prefill(list(range(40)))
    path = tmp_path / "c"
    write_carrier(path, session.snapshot(), kind)
    before = path.read_bytes()
    assert validate(path) == []
    rows_of_floats(session.cache[1], 1, float("nan"))
    with pytest.raises(FormatError, match="c: not written: layer 1, V, rows: token 0: expected finite f16, found bits"):
        write_carrier(path, session.snapshot(), kind)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_model_whose_keys_are_nan_leaves_the_file_that_there_was(tmp_path: Path) -> None:
    for pair in (("f16", "f16"), ("q8_0", "turbo3")):
        caches, path = filled(40, *pair), tmp_path / "c.gguf"
        tqgguf.save_prompt_cache(path, caches)
        before = path.read_bytes()
        for made in caches:
            made.update_and_fetch(mx.full((1, 2, 1, 64), float("nan")), mx.zeros((1, 2, 1, 64)))
        with pytest.raises(FormatError, match=r"not written: layer 0, K, (rows|tail)"):
            tqgguf.save_prompt_cache(path, caches)
        assert path.read_bytes() == before


def test_a_cache_is_not_said_to_be_another_models_of_the_same_sizes(tmp_path: Path) -> None:
    path, other = tmp_path / "c.gguf", loaded(1)
    for caches in (filled(40, *TURBO), [made.copy() for made in filled(40, *TURBO)]):
        with pytest.raises(RequestError, match="made for another model: expected this model's weights, found others"):
            tqgguf.save_prompt_cache(path, caches, model=other)
        assert not path.exists()
    tqgguf.save_prompt_cache(path, filled(40, *TURBO), model=loaded())
    tqgguf.save_prompt_cache(path, tqgguf.load_prompt_cache(path, loaded()), model=loaded())


@pytest.mark.parametrize("strange", [None, 5, "c", filled(3, *GGML)[0]])
def test_what_is_no_list_of_caches_is_refused(strange: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected"):
        tqgguf.save_prompt_cache(tmp_path / "c.gguf", strange)
