"""Metadata is asked for by type: the value, or one line that says what was expected and what was found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import I64, U8, U64, Typed, build_gguf

from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.reader import GGUFFile, open_gguf

GETTERS = {
    "count": ("uint", 3), "bias": ("integer", -3), "rate": ("real", 0.5), "on": ("flag", True), "name": ("text", "ä"),
    "counts": ("uints", [1, 2]), "biases": ("integers", [-1, 2]), "scores": ("floats", [0.5, -1.0]),
    "tokens": ("texts", ["a", "ä"]),
}  # fmt: skip
TYPED_METADATA = {
    "count": 3, "bias": -3, "rate": 0.5, "on": True, "name": "ä", "counts": Typed(U8, [1, 2]),
    "biases": Typed(I64, [-1, 2]), "scores": [0.5, -1.0], "tokens": ["a", "ä"],
}  # fmt: skip


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[GGUFFile]:
    odd = {
        "infinite": float("inf"), "latin1": b"\xe4", "latin1 tokens": ["a", b"\xe4"], "huge": Typed(U64, [1, 1 << 63]),
    }  # fmt: skip
    path = tmp_path / "typed.gguf"
    path.write_bytes(build_gguf({**TYPED_METADATA, **odd}))
    with open_gguf(path) as file:
        yield file


@pytest.mark.parametrize("key", GETTERS)
def test_typed_access_gives_the_value(key: str, typed: GGUFFile) -> None:
    getter, value = GETTERS[key]
    found = getattr(typed, getter)(key)
    assert getattr(typed, getter)(key, None) is not None
    if isinstance(found, np.ndarray):
        assert found.flags.aligned and found.flags.writeable
        found = found.tolist()
    assert found == value


@pytest.mark.parametrize("getter", sorted({getter for getter, _ in GETTERS.values()}))
def test_typed_access_refuses_other_types_and_absence(getter: str, typed: GGUFFile) -> None:
    fitting = {"uint": {"count"}, "integer": {"count", "bias"}, "uints": {"counts"}, "integers": {"counts", "biases"}}
    own = {key for key, (name, _) in GETTERS.items() if name == getter}
    for key in set(TYPED_METADATA) - fitting.get(getter, own):
        with pytest.raises(GgufError, match=rf"'{key}'.*expected.*at byte \d+") as caught:
            getattr(typed, getter)(key)
        expected = "metadata-value" if (getter, key) in {("uint", "bias"), ("uints", "biases")} else "metadata-type"
        assert caught.value.code == expected
        with pytest.raises(GgufError):
            getattr(typed, getter)(key, None)  # a default is for absence, not for a wrong type
    with pytest.raises(GgufError, match=r"'no\.such\.key' is missing, expected ") as caught:
        getattr(typed, getter)("no.such.key")
    assert caught.value.code == "metadata-missing"
    assert getattr(typed, getter)("no.such.key", None) is None


@pytest.mark.parametrize(
    ("getter", "key", "message"),
    [
        ("real", "infinite", "expected a finite number, found inf"),
        ("text", "latin1", r"expected UTF-8, found '\\udce4'"),
        ("texts", "latin1 tokens", r"expected UTF-8, found '\\udce4' in element 1"),
        ("integers", "huge", "expected integers below 2\\^63, found 9223372036854775808"),
    ],
)
def test_values_of_the_right_type_that_cannot_be_used_are_refused(
    getter: str, key: str, message: str, typed: GGUFFile
) -> None:
    with pytest.raises(GgufError, match=message) as caught:
        getattr(typed, getter)(key)
    assert caught.value.code == "metadata-value"


def test_a_wrong_type_names_the_type_found(typed: GGUFFile) -> None:
    with pytest.raises(GgufError, match=r"metadata key 'tokens' is ARRAY of STRING, expected an integer \(at byte "):
        typed.uint("tokens")


def test_many_strings_are_read_fast_and_right(tmp_path: Path) -> None:
    words = ["", "a", "Ġthe", "größe", "🦙", "x" * 40, "ab", "\x00"]
    tokens = [words[i % 8] + str(i) * (i % 3 == 0) for i in range(262_144)]
    data = build_gguf({"tokenizer.ggml.tokens": tokens, "after": 7})
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(data)
    start = time.thread_time()
    with open_gguf(path) as file:
        seconds = time.thread_time() - start
        assert file.texts("tokenizer.ggml.tokens") == tokens
        assert file.uint("after") == 7
    assert seconds < 0.9, f"{seconds:.2f} s for 262,144 strings"
