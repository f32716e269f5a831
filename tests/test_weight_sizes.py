"""What the header says of weights' sizes is what a loaded model holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_rows import SERVED, matrix
from mlx.utils import tree_flatten
from tiny_models import TinyModel, model_tensors, write_tiny

from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.formats.mlx.forms import MLX_FORMS
from tqgguf.formats.planning.weight_sizes import ROW_GROUPS, held_bytes
from tqgguf.runtime.layers import weights
from tqgguf.runtime.layers.packed_rows import PackedRows
from tqgguf.runtime.models.load import open_model
from tqgguf.runtime.native.library import load_library
from tqgguf.runtime.native.worth import SLOW_PATHS


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_weights_are_those_that_a_model_holds(kind: str, tied: bool, tmp_path: Path) -> None:
    model = TinyModel(n_layers=1, tied=tied)
    matrices = {name: x for name, x in model_tensors(model).items() if isinstance(x, np.ndarray) and x.ndim == 2}
    changed = {name: matrix(kind, *x.shape) for name, x in matrices.items()}
    opened = open_model(write_tiny(tmp_path / "m.gguf", model, tensors=changed))
    on_gpu = tree_flatten(opened.load(form="packed").model.parameters())
    assert held_bytes(opened.file, "gpu") == sum(array.nbytes for _, array in on_gpu)
    loaded = opened.load().model
    dense = sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))
    in_file = [getattr(module, "_rows", None) for _, module in loaded.named_modules()]
    packed = sum(rows.stored.nbytes for rows in in_file if isinstance(rows, PackedRows))
    library = load_library()
    assert library is not None
    if library.path_name not in SLOW_PATHS:  # on those matrices are float32
        assert held_bytes(opened.file, "cpu") == dense + packed


def test_every_packed_form_can_be_made() -> None:
    assert set(weights._UNPACK) == set(MLX_FORMS)


def test_the_rows_that_stay_in_the_file_are_those_that_the_c_library_serves() -> None:
    library = load_library()
    assert library is not None
    for type_id, ggml in GGML_TYPES.items():
        for n in (32, 48, 256, 288):
            served = n % ROW_GROUPS.get(ggml.name, n + 1) == 0
            assert library.serves_rows(type_id, n) == served, (ggml.name, n)
