"""`tqgguf run`: its options, as typer shows and parses them.

Flags that this verb does not implement never reach typer: `RunCommand` sorts the argument vector by the table in
`llama_flags` first. Each parameter below bears the name of the field it fills in RunRequest or SamplingParams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from tqgguf.cli import options
from tqgguf.cli.arguments import SortedArguments
from tqgguf.cli.llama_flags import FLAGS
from tqgguf.cli.options import KV_HEADING, MODEL_HEADING
from tqgguf.cli.run_request import Purpose, RunRequest
from tqgguf.cli.verb import OUTPUT, VerbCommand, fields_of, option, sorted_arguments, stretched_freq_scale
from tqgguf.formats.blocks.block_types import CACHE_TYPE_NAMES
from tqgguf.formats.blocks.cache_spec import PRESETS
from tqgguf.formats.errors import Problems, RequestError
from tqgguf.formats.missing_mlx import needs_mlx
from tqgguf.text.sampling_params import SamplingParams, sampler_names

_DEFAULT = RunRequest()
_SAMPLING = SamplingParams()
_SWITCH: dict[str, bool | None] = {"on": True, "off": False, "auto": None}
_TYPES = ", ".join(CACHE_TYPE_NAMES)
_PRESETS = ", ".join(f"{name} is {k}/{v}" for name, (k, v) in PRESETS.items())

EXAMPLES = (
    'tqgguf run -p "What is the capital of France?" --temp 0',
    "tqgguf run -m model.gguf -f question.txt -ctk turbo4 -ctv turbo3 -n 100",
    "tqgguf run -m model.gguf -ctk turbo4 -ctv turbo3 -c 8192    # a chat",
    "tqgguf run -m model.gguf -f book.txt --prompt-cache book.kv.gguf -n 50    # the second time it is read at once",
)

_PROMPT, _CHAT = "Prompt", "Chat"
_SAMPLE = "Sampling (as in llama.cpp)"


class RunCommand(VerbCommand):
    """A typer command that takes llama-completion's whole command line."""

    flags = FLAGS
    examples: ClassVar[Sequence[str]] = EXAMPLES


def run(
    ctx: typer.Context,
    # model and evaluation
    model: options.Model = None,
    n_ctx: Annotated[
        int, option(MODEL_HEADING, "Tokens of context, as 8192 or 8k; 0: the model's own.", "-c", "--ctx-size")
    ] = _DEFAULT.n_ctx,
    n_predict: Annotated[
        int,
        option(
            MODEL_HEADING,
            "Tokens to generate; -1: until the model ends, -2: until the context is full.",
            "-n",
            "--predict",
            "--n-predict",
        ),
    ] = _DEFAULT.n_predict,
    n_batch: options.BatchSize = _DEFAULT.n_batch,
    n_ubatch: Annotated[
        int,
        option(MODEL_HEADING, "Prompt tokens evaluated at a time, in whole pages of 128.", "-ub", "--ubatch-size"),
    ] = _DEFAULT.n_ubatch,
    rope_scaling: options.RopeScaling = "linear",
    rope_scale: options.RopeScale = 0.0,
    rope_freq_base: options.RopeFreqBase = _DEFAULT.rope_freq_base,
    rope_freq_scale: options.RopeFreqScale = _DEFAULT.rope_freq_scale,
    threads: options.Threads = _DEFAULT.threads,
    # KV cache
    type_k: Annotated[
        str,
        option(
            KV_HEADING,
            f"Cache type of K: {_TYPES}; by layer: turbo3,0-1:q8_0,-1:q8_0.",
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
        ),
    ] = _DEFAULT.type_k,
    type_v: Annotated[
        str, option(KV_HEADING, "Cache type of V, likewise.", "-ctv", "--cache-type-v", metavar="TYPE")
    ] = _DEFAULT.type_v,
    preset: Annotated[
        str | None,
        option(
            KV_HEADING,
            f"Types for K and V: {_PRESETS}. -ctk and -ctv count for more.",
            "--cache-preset",
            metavar=f"[{'|'.join(PRESETS)}]",
        ),
    ] = None,
    flash_attention: Annotated[
        str,
        option(KV_HEADING, "Always on; off refuses a quantised V.", "-fa", "--flash-attn", metavar="[on|off|auto]"),
    ] = _DEFAULT.flash_attention,
    balance: options.Balance = _DEFAULT.balance,
    exact_first: options.ExactFirst = _DEFAULT.exact_first,
    calibration: options.Calibration = _DEFAULT.calibration,
    prompt_cache: Annotated[
        str | None,
        option(
            KV_HEADING,
            "Keep the evaluated prompt in this file; the next run that begins alike takes it up, and one without a "
            "prompt goes on with it. A file that is missing or empty (0 bytes) is made.",
            "--prompt-cache",
            metavar="FILE",
        ),
    ] = None,
    prompt_cache_all: Annotated[
        bool, option(KV_HEADING, "Keep what is generated in it too.", "--prompt-cache-all")
    ] = False,
    prompt_cache_ro: Annotated[
        bool, option(KV_HEADING, "Take it up, and never write it.", "--prompt-cache-ro")
    ] = False,
    prompt_cache_profile: Annotated[
        str | None,
        option(
            KV_HEADING,
            "Whose llama.cpp wrote it, where the file does not say; names as for convert --profile.",
            "--prompt-cache-profile",
            metavar="NAME",
        ),
    ] = None,
    kv_workspace: Annotated[
        int | None,
        option(
            KV_HEADING,
            "On a GPU: MiB that a layer's decoded pages may take at a time (one KV head at least). Default: 1024.",
            "--kv-workspace",
        ),
    ] = None,
    kv_kernel_rows: Annotated[
        int | None,
        option(
            KV_HEADING,
            "On a GPU: rows of a step up to which attention reads blocks without decoding them first. "
            "Default: 8, with CUDA 32.",
            "--kv-kernel-rows",
        ),
    ] = None,
    strict_kv: Annotated[
        bool, option(KV_HEADING, "Fail where attention cannot read blocks, instead of decoding them.", "--strict-kv")
    ] = False,
    # prompt
    prompt: Annotated[
        str | None,
        option(_PROMPT, "The prompt. Without one, stdin is it, or a terminal chats.", "-p", "--prompt", metavar="TEXT"),
    ] = None,
    prompt_file: Annotated[
        str | None, option(_PROMPT, "A UTF-8 file with the prompt; - for stdin.", "-f", "--file", metavar="FILE")
    ] = None,
    binary_file: Annotated[
        str | None, option(_PROMPT, "Likewise, with the newline at its end.", "-bf", "--binary-file", metavar="FILE")
    ] = None,
    system_prompt: Annotated[
        str | None, option(_PROMPT, "The system prompt of a chat.", "-sys", "--system-prompt", metavar="TEXT")
    ] = None,
    system_prompt_file: Annotated[
        str | None, option(_PROMPT, "A UTF-8 file with it.", "-sysf", "--system-prompt-file", metavar="FILE")
    ] = None,
    escape: Annotated[
        bool,
        option(
            _PROMPT,
            r"Process \n, \t, \\ and the like in prompts, in files too. Default: so.",
            "-e",
            "--escape/--no-escape",
            show_default=False,
        ),
    ] = _DEFAULT.escape,
    display_prompt: Annotated[
        bool | None,
        option(
            _PROMPT,
            "Print the prompt first. Default: only where no chat template is applied.",
            "--display-prompt/--no-display-prompt",
        ),
    ] = _DEFAULT.display_prompt,
    # chat
    conversation: Annotated[
        bool | None,
        option(
            _CHAT,
            "Chat on after the first answer; or continue the prompt without a chat template. "
            "Default: answer the prompt once, in the model's template if it has one.",
            "-cnv/-no-cnv",
            "--conversation/--no-conversation",
        ),
    ] = _DEFAULT.conversation,
    single_turn: Annotated[bool, option(_CHAT, "End after one answer.", "-st", "--single-turn")] = False,
    multiline_input: Annotated[
        bool, option(_CHAT, "A message ends at a line that ends in a backslash.", "-mli", "--multiline-input")
    ] = False,
    reverse_prompts: Annotated[
        list[str] | None,
        option(_CHAT, "End an answer at this text (repeatable).", "-r", "--reverse-prompt", metavar="TEXT"),
    ] = None,
    chat_template: Annotated[
        str | None, option(_CHAT, "Jinja source instead of the model's template.", "--chat-template", metavar="JINJA")
    ] = None,
    chat_template_file: Annotated[
        str | None, option(_CHAT, "A file with it.", "--chat-template-file", metavar="FILE")
    ] = None,
    reasoning: Annotated[
        str,
        option(_CHAT, "Tell the template to think or not.", "-rea", "--reasoning", metavar="[on|off|auto]"),
    ] = "auto",
    # sampling
    temp: Annotated[
        float, option(_SAMPLE, "Temperature; 0: the likeliest token.", "--temp", "--temperature")
    ] = _SAMPLING.temp,
    top_k: Annotated[int, option(_SAMPLE, "Keep the k likeliest; 0: all.", "--top-k")] = _SAMPLING.top_k,
    top_p: Annotated[
        float, option(_SAMPLE, "Keep the likeliest up to this probability; 1: all.", "--top-p")
    ] = _SAMPLING.top_p,
    min_p: Annotated[
        float, option(_SAMPLE, "Keep what is this times as likely as the likeliest; 0: all.", "--min-p")
    ] = _SAMPLING.min_p,
    typical_p: Annotated[
        float, option(_SAMPLE, "Keep the locally typical up to this; 1: all.", "--typical", "--typical-p")
    ] = _SAMPLING.typical_p,
    top_n_sigma: Annotated[
        float,
        option(_SAMPLE, "Keep within n standard deviations of the top logit; 0: all.", "--top-nsigma", "--top-n-sigma"),
    ] = _SAMPLING.top_n_sigma,
    xtc_probability: Annotated[
        float, option(_SAMPLE, "How often to leave out the obvious; 0: never.", "--xtc-probability")
    ] = _SAMPLING.xtc_probability,
    xtc_threshold: Annotated[
        float, option(_SAMPLE, "What counts as obvious; above 0.5: nothing.", "--xtc-threshold")
    ] = _SAMPLING.xtc_threshold,
    dynatemp_range: Annotated[
        float, option(_SAMPLE, "Temperature by entropy, this much up and down.", "--dynatemp-range")
    ] = _SAMPLING.dynatemp_range,
    dynatemp_exp: Annotated[float, option(_SAMPLE, "Exponent of that.", "--dynatemp-exp")] = _SAMPLING.dynatemp_exp,
    repeat_penalty: Annotated[
        float, option(_SAMPLE, "Penalty on recent tokens; 1: none.", "--repeat-penalty")
    ] = _SAMPLING.repeat_penalty,
    repeat_last_n: Annotated[
        int, option(_SAMPLE, "How many tokens are recent.", "--repeat-last-n")
    ] = _SAMPLING.repeat_last_n,
    presence_penalty: Annotated[
        float, option(_SAMPLE, "Subtracted from recent tokens.", "--presence-penalty")
    ] = _SAMPLING.presence_penalty,
    frequency_penalty: Annotated[
        float, option(_SAMPLE, "Subtracted once per occurrence.", "--frequency-penalty")
    ] = _SAMPLING.frequency_penalty,
    dry_multiplier: Annotated[
        float, option(_SAMPLE, "DRY: what going on with a repetition costs; 0: nothing.", "--dry-multiplier")
    ] = _SAMPLING.dry_multiplier,
    dry_base: Annotated[
        float, option(_SAMPLE, "DRY: times this for each token of the repetition.", "--dry-base")
    ] = _SAMPLING.dry_base,
    dry_allowed_length: Annotated[
        int, option(_SAMPLE, "DRY: the shortest repetition that costs.", "--dry-allowed-length")
    ] = _SAMPLING.dry_allowed_length,
    dry_penalty_last_n: Annotated[
        int, option(_SAMPLE, "DRY: among how many tokens it is looked for.", "--dry-penalty-last-n")
    ] = _SAMPLING.dry_penalty_last_n,
    dry_sequence_breakers: Annotated[
        list[str] | None,
        option(
            _SAMPLE,
            r"DRY: a text that no repetition reaches across (repeatable), or none. Default: \n : \" *.",
            "--dry-sequence-breaker",
            metavar="TEXT",
        ),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        option(_SAMPLE, "TOKEN+AMOUNT or TOKEN-AMOUNT; -inf bans (repeatable).", "-l", "--logit-bias", metavar="BIAS"),
    ] = None,
    samplers: Annotated[
        str | None,
        option(
            _SAMPLE, f"Stages in order, a ; between: {' '.join(_SAMPLING.samplers)}.", "--samplers", metavar="NAMES"
        ),
    ] = None,
    sampler_seq: Annotated[
        str | None,
        option(_SAMPLE, "The same by letters: edskypmxt.", "--sampler-seq", "--sampling-seq", metavar="LETTERS"),
    ] = None,
    seed: Annotated[int, option(_SAMPLE, "Random seed; -1 picks one and reports it.", "-s", "--seed")] = _SAMPLING.seed,
    ignore_eos: Annotated[bool, option(_SAMPLE, "Never end by itself.", "--ignore-eos")] = False,
    # output
    json_output: Annotated[
        bool, option(OUTPUT, "Print one JSON object instead of text; an error is one too.", "--json")
    ] = False,
    perf: Annotated[
        bool, option(OUTPUT, "Report speed and memory on stderr. Default: so.", "--perf/--no-perf", show_default=False)
    ] = _DEFAULT.perf,
    quiet: Annotated[
        bool, option(OUTPUT, "On stderr nothing but errors and warnings.", "-q", "--quiet")
    ] = _DEFAULT.quiet,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
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
    named = values["samplers"]
    if values["sampler_seq"] is not None:
        named = ";".join(sampler_names(values["sampler_seq"], letters=True))
    return SamplingParams(
        **fields_of(
            SamplingParams,
            values,
            logit_bias=tuple(_bias(text) for text in values["logit_bias"] or ()),
            samplers=_SAMPLING.samplers if named is None else sampler_names(named),
            dry_sequence_breakers=_breakers(values["dry_sequence_breakers"]),
        )
    )


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
