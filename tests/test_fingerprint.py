"""A model is known by what it computes: by no more, and by no less."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_builder import U64, Typed, build_gguf, quantised, write_split
from tiny_folders import write_folder, write_json
from tiny_models import TinyModel, model_metadata, model_tensors, write_tiny

from tqgguf.formats.errors import FormatError, TqggufError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.models.fingerprint import PARTS, Fingerprint, fingerprint_folder, fingerprint_gguf, read_fingerprint
from tqgguf.formats.safetensors import open_safetensors

MODEL = TinyModel("llama", n_layers=1, hidden_size=64, n_heads=2, n_kv_heads=1, intermediate_size=64)


def of_file(path: Path) -> Fingerprint:
    with open_gguf(path) as file:
        return fingerprint_gguf(file)


def of_changed(tmp_path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Any:
    return of_file(write_tiny(tmp_path / "changed.gguf", MODEL, metadata, tensors))


@pytest.fixture
def original(tmp_path: Path) -> Fingerprint:
    return of_file(write_tiny(tmp_path / "original.gguf", MODEL))


def hash_of(part: str, pieces: Iterable[bytes]) -> str:
    """By the words of the module: a line that names version and part, then every piece after its length."""
    whole = b"".join(len(piece).to_bytes(8, "little") + piece for piece in pieces)
    return hashlib.sha256(f"tqgguf fingerprint 1: {part}\n".encode() + whole).hexdigest()


def pieces_of(entries: dict[str, Any]) -> Iterable[bytes]:
    for key, value in sorted(entries.items()):
        yield json.dumps(key).encode()
        if not isinstance(value, list):
            yield json.dumps(value).encode()
        elif isinstance(value[0], str):
            yield f'["s",{len(value)}]'.encode()
            yield struct.pack(f"<{len(value)}q", *map(len, value))
            yield "".join(value).encode()
        else:
            yield f'["i",{len(value)}]'.encode()
            yield struct.pack(f"<{len(value)}q", *value)


def test_its_four_hashes_are_these(original: Fingerprint) -> None:
    """They stand in files: another way to compute them needs another version."""
    metadata = model_metadata(MODEL)
    sizes = {"block_count": 1, "embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 2}
    sizes |= {"attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 64}
    epsilon = float(np.float32(1e-6))
    words = {k: v for k, v in metadata.items() if k.startswith("tokenizer.ggml")}
    tensors: dict[str, Any] = model_tensors(MODEL)
    weights: list[bytes] = []
    for name, values in sorted(tensors.items()):
        data = values.tobytes()
        weights += [f'["{name}",{list(values.shape)},0,{len(data)}]'.replace(" ", "").encode()]
        weights += [data[:4096], data[-4096:]]
    assert original == Fingerprint(
        weights=hash_of("weights", weights),
        hyperparameters=hash_of(
            "hyperparameters",
            pieces_of({"architecture": "llama", "attention.layer_norm_rms_epsilon": epsilon, **sizes}),
        ),
        rope=hash_of("rope", pieces_of({"freq_base": 10000.0, "dimension_count": 64})),
        tokenizer=hash_of("tokenizer", pieces_of(words)),
    )
    both = original.weights + original.hyperparameters
    assert original.identity == hashlib.sha256(both.encode()).hexdigest()[:32]


def test_shards_and_the_merged_file_are_one_model(tmp_path: Path, original: Fingerprint) -> None:
    tensors = list(model_tensors(MODEL).items())
    shards = [dict(tensors[:3]), dict(tensors[3:4]), dict(tensors[4:])]
    for path in write_split(tmp_path, "split", model_metadata(MODEL), shards):
        assert of_file(path) == original


def test_order_names_and_places_of_things_do_not_count(tmp_path: Path, original: Fingerprint) -> None:
    metadata = dict(reversed(model_metadata(MODEL).items()))
    metadata |= {"general.name": "another", "general.alignment": 128, "general.author": "somebody"}
    metadata |= {"llama.context_length": 9, "tokenizer.chat_template": "{{ x }}", "quantize.imatrix.file": "x"}
    metadata["llama.block_count"] = Typed(U64, metadata["llama.block_count"])
    path = tmp_path / "other.gguf"
    path.write_bytes(build_gguf(metadata, dict(reversed(model_tensors(MODEL).items()))))
    assert of_file(path) == original


def changed_weight(at: int) -> dict[str, Any]:
    values = model_tensors(MODEL)["token_embd.weight"].copy()
    values.reshape(-1).view(np.uint8)[at] ^= 1
    return {"token_embd.weight": values}


@pytest.mark.parametrize("at", [0, 4095, -4096, -1])
def test_one_bit_in_either_end_of_a_tensor_makes_other_weights(tmp_path: Path, original: Fingerprint, at: int) -> None:
    assert original.differences(of_changed(tmp_path, tensors=changed_weight(at))) == ("weights",)


def test_a_tensor_of_another_name_shape_or_type_makes_other_weights(tmp_path: Path, original: Fingerprint) -> None:
    values = model_tensors(MODEL)["token_embd.weight"]
    for tensors in (
        {"token_embd.weight": values.reshape(values.shape[0] // 2, -1)},
        {"token_embd.weight": values.view(np.int32)},
        {"token_embd.weight": quantised(values, "Q8_0")},
        {"token_embd.weight": None, "token_embs.weight": values},
        {"rope_freqs.weight": np.ones(4, np.float32)},
    ):
        assert original.differences(of_changed(tmp_path, tensors=tensors)) == ("weights",)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"llama.rope.freq_base": 10001.0}, "rope"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, "rope"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-5}, "hyperparameters"),
        ({"llama.attention.sliding_window": 64}, "hyperparameters"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer"),
        ({"tokenizer.ggml.merges": ["h e"]}, "tokenizer"),
        ({"tokenizer.ggml.token_type": np.ones(288, np.int32)}, "tokenizer"),
    ],
    ids=str,
)
def test_what_differs_is_named(tmp_path: Path, original: Fingerprint, changes: dict[str, Any], part: str) -> None:
    assert original.differences(of_changed(tmp_path, changes)) == (part,)


def test_strings_of_an_array_do_not_run_into_each_other(tmp_path: Path) -> None:
    one, other = (of_changed(tmp_path, {"tokenizer.ggml.merges": merges}) for merges in (["ab", "c"], ["a", "bc"]))
    assert one.differences(other) == ("tokenizer",)


def test_rope_parameters_that_the_user_gives_count_as_the_files(tmp_path: Path) -> None:
    stretched = of_file(write_tiny(tmp_path / "stretched.gguf", replace(MODEL, rope_base=5e5)))
    with open_gguf(write_tiny(tmp_path / "plain.gguf", MODEL)) as file:
        assert fingerprint_gguf(file, {"freq_base": 5e5}) == stretched


def test_it_can_be_written_and_read_back(tmp_path: Path, original: Fingerprint) -> None:
    path = tmp_path / "with.gguf"
    path.write_bytes(build_gguf(original.entries()))
    with open_gguf(path) as file:
        assert read_fingerprint(file) == original


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tqgguf.fingerprint.version": 2}, "expected a model's fingerprint of version 1, found version 2"),
        ({"tqgguf.fingerprint.rope": "abc"}, "'tqgguf.fingerprint.rope': expected 64 hexadecimal digits, found 'abc'"),
        ({"tqgguf.fingerprint.rope": 7}, "tqgguf.fingerprint.rope"),
        ({"tqgguf.fingerprint.weights": None}, "tqgguf.fingerprint.weights"),
    ],
    ids=str,
)
def test_a_damaged_one_is_refused(tmp_path: Path, original: Fingerprint, changes: dict[str, Any], said: str) -> None:
    entries = {key: value for key, value in {**original.entries(), **changes}.items() if value is not None}
    path = tmp_path / "with.gguf"
    path.write_bytes(build_gguf(entries))
    with open_gguf(path) as file, pytest.raises(FormatError) as error:
        read_fingerprint(file)
    assert said in str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "folder")


def test_a_folder_in_shards_is_the_same_model(folder: Path) -> None:
    before = fingerprint_folder(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    names = sorted(weights)
    for i, part in enumerate((names[::2], names[1::2])):
        mx.save_safetensors(str(folder / f"model-0000{i + 1}-of-00002.safetensors"), {n: weights[n] for n in part})
    (folder / "model.safetensors").unlink()
    assert fingerprint_folder(folder) == before


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", {**config, **changes})

    return change


def change_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


def change_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    write_json(path, {**json.loads(path.read_text()), "chat_template": "{{ x }}"})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (change_weight, ("weights",)),
        (change_config(rms_norm_eps=1e-6), ("hyperparameters",)),
        (change_config(text_config={"sliding_window": 5}), ("hyperparameters",)),
        (change_config(rope_theta=5.0), ("rope",)),
        (change_config(rope_scaling={"type": "linear", "factor": 2.0}), ("rope",)),
        (change_tokenizer, ("tokenizer",)),
        (change_template, ()),
        (change_config(transformers_version="9", max_position_embeddings=9), ()),
    ],
)
def test_what_differs_between_folders_is_named(
    folder: Path, change: Callable[[Path], None], parts: tuple[str, ...]
) -> None:
    before = fingerprint_folder(folder)
    change(folder)
    assert before.differences(fingerprint_folder(folder)) == parts
    assert set(parts) <= set(PARTS)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "expected a safetensors header, found 0 bytes"),
        (b"\xff" * 64, "expected a safetensors header"),
        ((5).to_bytes(8, "little") + b"{not}", "expected a header in JSON"),
        ((2).to_bytes(8, "little") + b"[]", "expected an object as header, found a list"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "tensor 'w': expected dtype, shape and data_offsets"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError) as error:
        open_safetensors(path)
    assert said in str(error.value)


@pytest.mark.parametrize("offsets", [[0, 9], [5, 4], [-1, 4], [0, 4, 8], [0, 4.0], [0, True], None])
def test_data_outside_a_safetensors_file_is_refused(tmp_path: Path, offsets: Any) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FormatError, match="tensor 'w'"):
        open_safetensors(path)


def test_a_folder_without_its_files_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TqggufError, match=r"expected a tokenizer\.json in the model folder, found none"):
        fingerprint_folder(folder)
