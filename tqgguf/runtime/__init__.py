"""The MLX runtime. Importing any part of it first gives mlx a fast BLAS, and has it hand work to an NVIDIA GPU in
smaller parts: both must happen before mlx is imported."""

import os
import sys

from tqgguf.runtime.attention.blas import load_fast_blas

OPS_OF_A_GRAPH = 30
"""Operations after which MLX hands work to an NVIDIA GPU. It takes 100 by itself, so that a decode step of some 300 has
hardly begun on the GPU when the host is done with it (benchmarks/LOG.md)."""

if sys.platform == "linux":
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", str(OPS_OF_A_GRAPH))
load_fast_blas()
