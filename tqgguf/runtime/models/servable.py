"""Whether `run` takes a model, asked before any weight is read. A GGUF's answer needs no MLX; of a folder, without MLX,
only its header is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import MissingMLXError
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.folder_loading import check_folder
from tqgguf.formats.models.loading import check_model, reading_vocabulary
from tqgguf.runtime.generation.chat import ChatTemplate
from tqgguf.runtime.missing_mlx import needs_mlx
from tqgguf.runtime.tokenizers.folder_tokenizer import load_folder_tokenizer
from tqgguf.runtime.tokenizers.gguf_tokenizer import load_tokenizer
from tqgguf.runtime.tokenizers.text_tokenizer import TextTokenizer


def check_servable(model: GGUFFile | Path) -> Sequence[LayerShape] | None:
    """The sizes of the caches that `run` would make, of an open GGUF or the folder of that path; None: not known
    without MLX.

    FormatError, RequestError: those with which `run` refuses the model where it is asked for nothing else.
    """
    shapes: Sequence[LayerShape] | None
    tokenizer: TextTokenizer
    if isinstance(model, Path):
        shapes, tokenizer = _folder(model)
    else:
        shapes = check_model(model).layer_shapes()
        tokenizer = reading_vocabulary(model, lambda: load_tokenizer(model.metadata))
    template = ChatTemplate.of(tokenizer, enable_thinking=True)
    if template.explicit:
        template.render([{"role": "user", "content": "?"}])
    return shapes


def _folder(folder: Path) -> tuple[Sequence[LayerShape] | None, TextTokenizer]:
    try:
        with needs_mlx("tqgguf run"):
            from tqgguf.runtime.models.mlx_folder import OpenFolder
    except MissingMLXError:
        check_folder(folder)
        return None, load_folder_tokenizer(folder)
    opened = OpenFolder(folder)
    return opened.config.layer_shapes(), opened.tokenizer
