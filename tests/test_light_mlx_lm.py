"""The program imports mlx-lm's models and not its programs; whoever wants those finds them."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = "from tqgguf.cli.light_mlx_lm import import_models_alone\nimport_models_alone()\nimport sys\n"


def printed(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_loading_a_gguf_imports_no_transformers() -> None:
    code = "import tqgguf.runtime.models.load, tqgguf.runtime.generation.session\nprint('transformers' in sys.modules)"
    assert printed(code) == "False"


@pytest.mark.parametrize(
    "code",
    [
        "import mlx_lm.models.cache\nimport mlx_lm\nprint(mlx_lm.load.__name__)",
        "from mlx_lm.models import llama\nfrom mlx_lm import load\nprint(load.__name__)",
        "from mlx_lm.utils import load\nprint(load.__name__)",
    ],
)
def test_what_the_package_has_is_there_when_it_is_asked_for(code: str) -> None:
    assert printed(code) == "load"


def test_what_it_has_not_is_an_attribute_error() -> None:
    assert printed("import mlx_lm\nprint(hasattr(mlx_lm, 'no_such'), hasattr(mlx_lm, '__wrapped__'))") == "False False"


def test_the_whole_package_has_the_models_that_were_imported_before() -> None:
    code = (
        "from mlx_lm.models.cache import KVCache\nimport mlx_lm\nmlx_lm.load\n"
        "from mlx_lm.models.cache import KVCache as again\nprint(again is KVCache)"
    )
    assert printed(code) == "True"
