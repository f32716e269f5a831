"""Whether `run` takes a model, asked before any weight is read. A GGUF's answer needs no MLX; of a folder, without MLX,
only its header is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.models.folder_loading import check_folder
from tqgguf.formats.models.loading import check_model, reading_vocabulary
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.gguf_tokenizer import load_tokenizer
from tqgguf.text.text_tokenizer import TextTokenizer

Opened = tuple[Sequence[LayerShape] | None, TextTokenizer]
"""The sizes of the caches that `run` would make (None: not known without MLX), and the model's tokenizer."""


def check_servable(model: GGUFFile | Path, by_mlx: Callable[[Path], Opened | None]) -> Sequence[LayerShape] | None:
    """The sizes of the caches that `run` would make, of an open GGUF or the folder of that path; None: not known
    without MLX. by_mlx: opens a folder as `run` does; gives None where MLX is not installed.

    FormatError, RequestError: those with which `run` refuses the model where it is asked for nothing else.
    """
    shapes, tokenizer = _opened(model, by_mlx)
    template = ChatTemplate.of(tokenizer, enable_thinking=True)
    if template.explicit:
        template.render([{"role": "user", "content": "?"}])
    return shapes


def _opened(model: GGUFFile | Path, by_mlx: Callable[[Path], Opened | None]) -> Opened:
    if not isinstance(model, Path):
        return check_model(model).layer_shapes(), reading_vocabulary(model, lambda: load_tokenizer(model.metadata))
    opened = by_mlx(model)
    if opened is None:
        from tqgguf.text.folder_tokenizer import load_folder_tokenizer  # a GGUF needs no library for its tokens

        check_folder(model)
        opened = None, load_folder_tokenizer(model)
    return opened
