"""Where mlx was left with the reference BLAS, numpy's products give what mlx's would."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tqgguf.runtime.layers.cpu_model import NumpyLinear, put_numpy


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 7, 48), (2, 3, 48), (1, 0, 48)])
def test_a_linear_by_numpy_is_the_linear(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(48, 20, bias=bias)
    x = mx.random.normal(shape, key=mx.random.key(1))
    np.testing.assert_allclose(np.array(NumpyLinear(linear)(x)), np.array(linear(x)), atol=1e-5)


def test_only_float32_linears_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.RMSNorm(64))
    model.layers[1].set_dtype(mx.float16)
    put_numpy(model)
    assert [type(layer) for layer in model.layers] == [NumpyLinear, nn.Linear, nn.RMSNorm]


def test_a_model_without_openblas_answers_the_same() -> None:
    code = """
import ctypes, sys
load = ctypes.CDLL
def refuse(name, *settings, **more):  # as if no OpenBLAS were there
    if name and "openblas" in str(name) and "numpy" not in str(name):
        raise OSError(name)
    return load(name, *settings, **more)
ctypes.CDLL = refuse
from tqgguf.cli.main import main
sys.exit(main(["run", "-p", "What is the capital of France?", "--temp", "0", "-v", "-ctk", "turbo4"]))
"""
    environment = {**os.environ, "TQGGUF_CPU": "off"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert "attention by numpy; matmul by numpy" in done.stderr
