"""Before any test module imports mlx: the fast BLAS. Tests run on the CPU wherever they run."""

from __future__ import annotations

import pytest

from tqgguf.runtime.blas import load_fast_blas

try:
    load_fast_blas()
    import mlx.core as mx
except ImportError:  # an installation without MLX still tests formats/
    collect_ignore_glob: list[str] = []
else:
    mx.set_default_device(mx.cpu)


@pytest.fixture(scope="session")
def smollm2():
    """The embedded default model, loaded once for all tests; never to be changed."""
    from tqgguf.runtime.load import embedded_model, open_model

    return open_model(embedded_model()).load()
