"""The MLX runtime. Importing any part of it first gives mlx a fast BLAS, which must happen before mlx is imported."""

from tqgguf.runtime.attention.blas import load_fast_blas

load_fast_blas()
