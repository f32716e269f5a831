"""What is said where MLX is wanted and not installed. Knows neither MLX nor who wants it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqgguf.formats.errors import MissingMLXError, words_of

PACKAGES = ("mlx", "mlx_lm")


def how_to_install(platform: str) -> str:
    """The command that installs MLX on a platform, as sys.platform names it."""
    if platform == "darwin":
        return "pip install mlx mlx-lm"
    return "pip install 'mlx-lm[cpu]' (the extra cpu of tqgguf brings it), or 'mlx-lm[cuda13]' for an NVIDIA GPU"


@contextmanager
def needs_mlx(what: str) -> Iterator[None]:
    """Turn an import of MLX that fails inside into MissingMLXError, which says that `what` needs it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        raise MissingMLXError(
            f"{what} needs MLX, which cannot be imported ({words_of(error)}); "
            f"install it with: {how_to_install(sys.platform)}"
        ) from error
