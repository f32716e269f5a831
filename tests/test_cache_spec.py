"""A request for a cache says what every layer gets, or is refused in one line."""

from __future__ import annotations

import pytest

from tqgguf.formats.blocks.cache_spec import PRESETS, CacheSpec, LayerTypes
from tqgguf.formats.errors import RequestError


def types_of(text: str, n_layers: int = 6) -> list[str]:
    return [types.type_k for types in CacheSpec(text, "f16").resolve(n_layers)]


def test_one_type_is_every_layers() -> None:
    assert CacheSpec("turbo4", "q8_0").resolve(2) == (LayerTypes("turbo4", "q8_0", "full", 4),) * 2


def test_layers_are_counted_from_either_end_and_later_rules_win() -> None:
    assert types_of("turbo3,0-1:q8_0,-1:q4_0") == ["q8_0", "q8_0", "turbo3", "turbo3", "turbo3", "q4_0"]
    assert types_of("f16,-3--2:turbo4") == ["f16", "f16", "f16", "turbo4", "turbo4", "f16"]
    assert types_of("f16,0-5:q8_0,2:turbo2") == ["q8_0", "q8_0", "turbo2", "q8_0", "q8_0", "q8_0"]
    assert types_of("f16, 1:q8_0, 2 : q4_0") == ["f16", "q8_0", "q4_0", "f16", "f16", "f16"]


def test_balance_follows_each_layers_k_and_the_exact_prefix_is_one_for_all() -> None:
    layers = CacheSpec("q8_0,1:turbo3,2:f16", "q8_0").resolve(3)
    assert [layer.balance for layer in layers] == ["off", "full", "off"]
    assert [layer.n_prefix for layer in layers] == [4, 4, 4]
    layers = CacheSpec("q8_0,2:f16", "q8_0", balance="page").resolve(3)
    assert [(layer.balance, layer.n_prefix) for layer in layers] == [("page", 0), ("page", 0), ("off", 0)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CacheSpec("turbo5"), "unknown cache type 'turbo5', did you mean 'turbo4'"),
        (CacheSpec("f16", "f16,0:q9_0"), "unknown cache type 'q9_0'"),
        (CacheSpec("turbo3,q8_0"), "cache type of K: expected LAYERS:TYPE after the comma, .* found 'q8_0'"),
        (CacheSpec("turbo3,0:"), "expected LAYERS:TYPE .* found '0:'"),
        (CacheSpec("turbo3,0-x:q8_0"), "found '0-x:q8_0'"),
        (CacheSpec("turbo3," + "9" * 5000 + ":q8_0"), "expected LAYERS:TYPE"),
        (CacheSpec("turbo3,\u0661:q8_0"), "expected LAYERS:TYPE"),
        (CacheSpec("turbo3\n,0:q8_0"), "unknown cache type"),
        (CacheSpec("turbo3,0:\nq8_0"), "expected LAYERS:TYPE"),
        (CacheSpec(""), "unknown cache type ''"),
        (CacheSpec("f16", "turbo3,6:q8_0"), "cache type of V: layers 6 of .*: the model has layers 0 to 5"),
        (CacheSpec("turbo3,-7:q8_0"), "layers -7 of .*: the model has layers 0 to 5"),
        (CacheSpec("turbo3,4-2:q8_0"), "layers 4-2 of .*: the model has layers 0 to 5"),
        (CacheSpec("turbo3", n_prefix=129), "exact prefix: expected 0 to 128 tokens, found 129"),
        (CacheSpec("turbo3", balance="half"), "balance of K: expected one of off, page, full, found 'half'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(spec: CacheSpec, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        spec.resolve(6)


def test_presets_are_requests_that_hold() -> None:
    for type_k, type_v in PRESETS.values():
        CacheSpec(type_k, type_v).check()
    assert list(PRESETS) == ["quality", "balanced", "small"]
