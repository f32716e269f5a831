"""`tqgguf eval`: what its command line asks for."""

from __future__ import annotations

from typing import Any

import typer

from tqgguf.cli.eval_request import EvalRequest
from tqgguf.cli.verb_flags import VerbCommand, fields_of, sorted_arguments, stretched_freq_scale, takes_flags
from tqgguf.formats.missing_mlx import needs_mlx

EXAMPLES = (
    "tqgguf eval --cache-types turbo4,q4_0 -c 256 --chunks 1    # the default model on tqgguf's own text",
    "tqgguf eval -m model.gguf -f text.txt -c 512 --cache-types q8_0,turbo4/turbo3,mlx-q4 --json",
)


class EvalCommand(VerbCommand):
    """A typer command that takes those of llama-perplexity's flags that concern model, text and evaluation."""

    verb = "eval"
    examples = EXAMPLES


@takes_flags("eval", EvalRequest())
def evaluate(ctx: typer.Context, **values: Any) -> None:
    """Measure what KV cache types cost a model: perplexity, KL divergence from f16, and bits per value.

    Every cache is compared with the f16 cache of the same model over the same text, in one run.
    """
    given = sorted_arguments(ctx)
    values = {**values, "rope_freq_scale": stretched_freq_scale(values)}
    request = EvalRequest(**fields_of(EvalRequest, values, given=given.given, notices=given.notices, words=given.words))
    with needs_mlx("tqgguf eval"):
        # lazily: they bring MLX in, for which --help and refusals must not wait
        from tqgguf.cli import eval_command, needle_command

    serve = needle_command.find_needles if request.needle else eval_command.evaluate
    raise typer.Exit(serve(request))
