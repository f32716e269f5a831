"""`tqgguf run`: what its command line asks for.

Its parameters, and what becomes of flags that it does not implement, stand in the tables of flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import typer

from tqgguf.cli.arguments import SortedArguments
from tqgguf.cli.run_request import Purpose, RunRequest
from tqgguf.cli.verb_flags import VerbCommand, fields_of, sorted_arguments, stretched_freq_scale, takes_flags
from tqgguf.formats.blocks.cache_spec import PRESETS
from tqgguf.formats.errors import Problems, RequestError
from tqgguf.formats.missing_mlx import needs_mlx
from tqgguf.text.sampling_params import SamplingParams, sampler_names

_DEFAULT, _SAMPLING = RunRequest(), SamplingParams()
_SWITCH: dict[str, bool | None] = {"on": True, "off": False, "auto": None}

EXAMPLES = (
    'tqgguf run -p "What is the capital of France?" --temp 0',
    "tqgguf run -m model.gguf -f question.txt -ctk turbo4 -ctv turbo3 -n 100",
    "tqgguf run -m model.gguf -ctk turbo4 -ctv turbo3 -c 8192    # a chat",
    "tqgguf run -m model.gguf -f book.txt --prompt-cache book.kv.gguf -n 50    # the second time it is read at once",
)


class RunCommand(VerbCommand):
    """A typer command that takes llama-completion's whole command line."""

    verb = "run"
    examples: ClassVar[Sequence[str]] = EXAMPLES


@takes_flags("run", _DEFAULT, _SAMPLING)
def run(ctx: typer.Context, **values: Any) -> None:
    """Answer a prompt, or chat, from a GGUF model whose KV cache lies in compressed blocks.

    Takes llama-completion's flags: those below work, others are noted or refused with the reason.
    """
    serve(ctx, "answer")


def serve(ctx: typer.Context, purpose: Purpose) -> NoReturn:
    """Do what a verb with `run`'s parameters was called for, and end it."""
    request = request_from(ctx.params, sorted_arguments(ctx), purpose)
    with needs_mlx(ctx.command_path):
        from tqgguf.cli import run_command  # lazily: it brings MLX in, for which --help and refusals must not wait

    raise typer.Exit(run_command.run(request))


def request_from(values: Mapping[str, Any], given: SortedArguments, purpose: Purpose = "answer") -> RunRequest:
    """The request that typer's values (by parameter name) and the sorted argument vector make.

    RequestError with a message for each value that is not possible.
    """
    problems = Problems()
    made: dict[str, Any] = {}
    with problems.noting():
        made["sampling"] = _sampling(values)
    with problems.noting():
        made["rope_freq_scale"] = stretched_freq_scale(values)
    with problems.noting():
        request = RunRequest(
            **fields_of(
                RunRequest,
                values,
                **_preset_types(values["preset"], given.given),
                reverse_prompts=tuple(values["reverse_prompts"] or ()),
                reasoning=_SWITCH[values["reasoning"]],
                purpose=purpose,
                # documents are kept as they are; llama.cpp's escapes are for prompts on a command line
                escape=values["escape"] and (purpose != "keep" or "--escape" in given.given),
                given=given.given,
                notices=given.notices + _flash_attention_notice(values["flash_attention"]),
                **made,
            )
        )
    problems.check()
    return request


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    problems, stages, biases = Problems(), _SAMPLING.samplers, list[tuple[int, float]]()
    with problems.noting():
        if values["sampler_seq"] is not None:
            stages = sampler_names(values["sampler_seq"], letters=True)
        elif values["samplers"] is not None:
            stages = sampler_names(values["samplers"])
    for text in values["logit_bias"] or ():
        with problems.noting():
            biases.append(_bias(text))
    breakers = _breakers(values["dry_sequence_breakers"])
    converted = {"logit_bias": tuple(biases), "samplers": stages, "dry_sequence_breakers": breakers}
    with problems.noting():
        made = SamplingParams(**fields_of(SamplingParams, values, **converted))
    problems.check()
    return made


def _breakers(given: Sequence[str] | None) -> tuple[str, ...]:
    """llama.cpp's reading: any that is given takes the place of the usual ones, and "none" of those before it."""
    if not given:
        return _SAMPLING.dry_sequence_breakers
    after_none = given[len(given) - given[::-1].index("none") :] if "none" in given else given
    return tuple(after_none)


def _preset_types(preset: str | None, given: frozenset[str]) -> dict[str, str]:
    """The types of a preset, by field, where the command line does not name them."""
    types = zip(("k", "v"), PRESETS[preset] if preset else (), strict=False)
    return {f"type_{side}": name for side, name in types if f"--cache-type-{side}" not in given}


def _flash_attention_notice(word: str) -> tuple[str, ...]:
    if word == "auto":
        return ()
    why = "attention is always of that kind" if word == "on" else "it only refuses a quantised V"
    return (f"-fa {word}: no effect here, {why}",)


def _bias(text: str) -> tuple[int, float]:
    """`15043+1` or `15043-inf`, as llama.cpp writes a logit bias."""
    parts = re.fullmatch(r"\s*([0-9]{1,9})\s*([+-])(.+)", text)
    try:
        if parts is None:
            raise ValueError
        return int(parts[1]), float(parts[2] + parts[3].strip())
    except ValueError:
        raise RequestError(f"--logit-bias: expected TOKEN+AMOUNT or TOKEN-AMOUNT, found {text!r}") from None
