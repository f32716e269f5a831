"""`tqgguf convert`: its options, as typer shows and parses them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tqgguf.cli import options
from tqgguf.cli.verb import OUTPUT, ExamplesCommand, option

WEIGHTS = "Of models"
FOREIGN = "Of prompt caches: what foreign files do not say"
TARGET = "Of prompt caches"

EXAMPLES = (
    "tqgguf convert model.gguf small.gguf --type q8_0",
    "tqgguf convert model.gguf parts.gguf --split-max-size 2G    # any of the parts is a SRC again",
    "tqgguf convert model.gguf model-mlx    # a folder for mlx_lm.load",
    "tqgguf convert book.kv.gguf book.session -m model.gguf -ctk q8_0 -ctv q8_0 --requantise    # for llama.cpp",
    "tqgguf convert book.session book.kv.gguf -m model.gguf",
    "tqgguf convert book.kv.gguf book.safetensors --requantise    # for mlx_lm.generate --prompt-cache-file",
)

To = Literal["gguf", "session", "sequence", "mlx-lm"]
Switch = Literal["on", "off"]
RopeOrder = Literal["neighbours", "halves"]


class ConvertCommand(ExamplesCommand):
    """A typer command that takes two files."""

    examples = EXAMPLES


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", hidden=True)],
    target: Annotated[str, typer.Argument(metavar="DST", hidden=True)],
    weight_type: Annotated[
        str | None,
        option(
            WEIGHTS,
            "Type of the weights (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl; K-quants are only read), by "
            "llama-quantize's rules: vectors, norms and routers stay, an output layer gets at least q8_0. "
            "Default: as they are (of a folder: bf16 or f16).",
            "--type",
            metavar="TYPE",
        ),
    ] = None,
    split_max_size: Annotated[
        str | None,
        option(
            WEIGHTS,
            "Split into files of at most so many bytes, as in 2G or 500M. Default: one file.",
            "--split-max-size",
            metavar="N(M|G)",
        ),
    ] = None,
    dry_run: Annotated[
        bool, option(WEIGHTS, "Only say what each tensor would become, and write nothing.", "--dry-run")
    ] = False,
    to: Annotated[
        To | None,
        option(
            OUTPUT,
            "Format of DST. Default: by its name (.gguf; .session, .promptcache; .seq, .slot; .safetensors; a model's "
            "folder for mlx-lm has no ending).",
            "--to",
            metavar="[gguf|session|sequence|mlx-lm]",
        ),
    ] = None,
    type_k: Annotated[
        str | None,
        option(TARGET, "Type of K, as run takes it. Default: as it is.", "-ctk", "--cache-type-k", metavar="TYPE"),
    ] = None,
    type_v: Annotated[
        str | None, option(TARGET, "Type of V, likewise.", "-ctv", "--cache-type-v", metavar="TYPE")
    ] = None,
    requantise: Annotated[
        bool, option(OUTPUT, "Quantise again what is quantised already, where that is needed.", "--requantise")
    ] = False,
    v_trans: Annotated[
        bool | None,
        option(TARGET, "Values transposed, for llama.cpp without flash attention.", "--v-trans/--no-v-trans"),
    ] = None,
    bits: Annotated[
        int | None, option(TARGET, "Quantise for mlx-lm with so many bits. Default: not.", "--kv-bits")
    ] = None,
    group_size: Annotated[
        int | None, option(TARGET, "Values of a group of --kv-bits. Default: 64.", "--kv-group-size")
    ] = None,
    mlx_model: Annotated[
        str | None,
        option(
            TARGET,
            "The model's name or folder as mlx_lm.generate will be given it, which compares the two.",
            "--mlx-model",
            metavar="NAME",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        option(
            FOREIGN,
            "Whose llama.cpp wrote SRC, or is to read DST: mainline, thetom-2026-05, mainline-unrotated. Default: what "
            "SRC says, else mainline.",
            "--profile",
            metavar="NAME",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            FOREIGN, "The model's GGUF: head sizes, RoPE, and what it is known by.", "-m", "--model", metavar="PATH"
        ),
    ] = None,
    head_dim: Annotated[int | None, option(FOREIGN, "Values of a head, without the model.", "--head-dim")] = None,
    rotation: Annotated[
        Switch | None,
        option(
            FOREIGN,
            "Whether quantised ggml types are rotated in the llama.cpp file. Default: as the profile has it.",
            "--kv-rotation",
            metavar="[on|off]",
        ),
    ] = None,
    generation: Annotated[
        int | None,
        option(FOREIGN, "Codebooks of turbo types in the llama.cpp file: 2 or 3.", "--codebook-generation"),
    ] = None,
    rope_order: Annotated[
        RopeOrder | None,
        option(
            FOREIGN,
            "Channels that RoPE turns together in the mlx-lm file. Default: those of the original weights; a folder "
            "that convert made of a llama-like GGUF has neighbours.",
            "--rope-order",
            metavar="[neighbours|halves]",
        ),
    ] = None,
    sequence: Annotated[
        int | None, option(FOREIGN, "Which sequence of a llama.cpp session of several.", "--sequence-id")
    ] = None,
    json_output: Annotated[bool, option(OUTPUT, "Print one JSON object.", "--json")] = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Convert a model or a prompt cache SRC: a GGUF's weights into another type, split, merged, or as a folder for
    mlx-lm; a Hugging Face folder (llama, qwen2, qwen3, gemma3) into a GGUF; a prompt cache into another format or
    other types (our GGUF, llama.cpp's session and sequence files, mlx-lm's safetensors).

    Metadata and tensors that are not quantised are copied as they are, and so are blocks where both formats have
    them; quantising twice has to be asked for. Without -m a llama.cpp file needs --head-dim, and what is written says
    of no model that it belongs to it.
    """
    from tqgguf.cli import convert_command, convert_request  # lazily: --help need not wait for numpy

    raise typer.Exit(
        convert_command.convert(
            convert_request.ConvertRequest(
                source=source,
                target=target,
                to=to,
                type_k=type_k,
                type_v=type_v,
                requantise=requantise,
                v_trans=v_trans,
                bits=bits,
                group_size=group_size,
                profile=profile,
                model=model,
                head_dim=head_dim,
                rotated=None if rotation is None else rotation == "on",
                generation=generation,
                sequence=sequence,
                mlx_model=mlx_model,
                rope_order=rope_order,
                weight_type=None if weight_type is None else weight_type.lower(),
                split_max_size=split_max_size,
                dry_run=dry_run,
                json_output=json_output,
            )
        )
    )
