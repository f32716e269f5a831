"""`tqgguf convert`: what its command line asks for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.cli.verb import ExamplesCommand
from tqgguf.cli.verb_flags import fields_of, takes_flags

EXAMPLES = (
    "tqgguf convert model.gguf small.gguf --type q8_0",
    "tqgguf convert model.gguf parts.gguf --split-max-size 2G    # any of the parts is a SRC again",
    "tqgguf convert model.gguf model-mlx    # a folder for mlx_lm.load",
    "tqgguf convert book.kv.gguf book.session -m model.gguf -ctk q8_0 -ctv q8_0 --requantise    # for llama.cpp",
    "tqgguf convert book.session book.kv.gguf -m model.gguf",
    "tqgguf convert book.kv.gguf book.safetensors --requantise    # for mlx_lm.generate --prompt-cache-file",
)


class ConvertCommand(ExamplesCommand):
    """A typer command that takes two files."""

    examples = EXAMPLES


@takes_flags("convert", ConvertRequest)
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", hidden=True)],
    target: Annotated[str, typer.Argument(metavar="DST", hidden=True)],
    **values: Any,
) -> None:
    """Convert a model or a prompt cache SRC: a GGUF's weights into another type, split, merged, or as a folder for
    mlx-lm; a Hugging Face folder (llama, qwen2, qwen3, gemma3) into a GGUF; a prompt cache into another format or
    other types (our GGUF, llama.cpp's session and sequence files, mlx-lm's safetensors).

    Metadata and tensors that are not quantised are copied as they are, and so are blocks where both formats have
    them; quantising twice has to be asked for. Without -m a llama.cpp file needs --head-dim, and what is written says
    of no model that it belongs to it.
    """
    from tqgguf.cli import convert_command  # lazily: --help need not wait for numpy

    rotation, weight_type = values["rotated"], values["weight_type"]
    converted = {
        "rotated": None if rotation is None else rotation == "on",
        "weight_type": None if weight_type is None else weight_type.lower(),
    }
    request = ConvertRequest(**fields_of(ConvertRequest, values, source=source, target=target, **converted))
    raise typer.Exit(convert_command.convert(request))
