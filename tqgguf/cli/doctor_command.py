"""What `tqgguf doctor` does with a request: read the text, load the model, examine it, print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tqgguf.cli.doctor_request import LEAST_TOKENS, DoctorRequest
from tqgguf.cli.eval_table import finite, number
from tqgguf.cli.figures import aligned
from tqgguf.cli.json_text import json_text
from tqgguf.cli.measuring import load, measured_text
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.evaluation.compare import cut_windows
from tqgguf.runtime.evaluation.examination import Examination, Proposal, proposable_types
from tqgguf.runtime.evaluation.examination import examine as examine_model
from tqgguf.runtime.models.load import embedded_model, open_model


def examine(request: DoctorRequest) -> int:
    """Serve the request and return the exit status. What can be refused is refused before any weight is read."""
    for notice in request.notices:
        say(notice)
    text, source = measured_text(request.text_file)
    opened = open_model(request.model or embedded_model())
    n_ctx = _window(request.n_ctx, opened.config.context_length)
    proposable_types(opened.config.layer_shapes())
    tokens, trial = cut_windows(opened.tokenizer, text, n_ctx, 2, source, flags="-c").tolist()
    loaded = load(opened, request.threads, request.verbose)
    measuring = ProgressLine("measuring", "tokens")
    found = examine_model(loaded, tokens, trial, request.budget, measuring.update)
    measuring.end()
    if request.json_output:
        print(json_text(_as_json(found, request.budget, n_ctx)), flush=True)
    else:
        print("\n".join(_lines(found, request.budget)), flush=True)
    return 0


def _window(asked: int, trained: int) -> int:
    """Whole pages within what a model was trained for; said if that is not what was asked for."""
    n_ctx = min(asked or trained, trained) // PAGE_TOKENS * PAGE_TOKENS
    if n_ctx < LEAST_TOKENS:
        raise RequestError(f"expected a model with a context of {LEAST_TOKENS} tokens or more, found {trained}")
    if n_ctx != (asked or trained):
        say(f"-c {asked}: whole pages of {PAGE_TOKENS} within the model's context of {trained}, so {n_ctx} are used")
    return n_ctx


def flags(proposal: Proposal) -> str:
    """The proposal as flags of run."""
    spec = proposal.recommendation.spec
    return f"-ctk {spec.type_k} -ctv {spec.type_v}"


def _lines(found: Examination, budget: float) -> Iterator[str]:
    types = list(found.layers[0].errors["k"])
    heads = ["layer", *(f"K {name}" for name in types), *(f"V {name}" for name in types), "constant"]
    rows = [
        [
            str(layer.layer),
            *(f"{layer.errors[side][name]:.2%}" for side in ("k", "v") for name in types),
            f"{layer.constant_share:.0%}",
        ]
        for layer in found.layers
    ]
    yield "Error of each layer's attention with K or V in that type, the other in f16 (squared, of its squared norm)."
    yield "Constant: the share of the energy of its keys that does not change within a page of 128 tokens."
    yield from aligned([heads, *rows])
    yield ""
    yield from _warnings(found)
    if not found.proposals:
        yield f"Nothing fits into {budget:g} bits per value: raise --bpv."
        return
    yield f"Within {budget:g} bits per value, tried on other text with every key from blocks, the best first:"
    for proposal in found.proposals:
        s = proposal.result.statistics
        yield (
            f"  {flags(proposal)}    {proposal.recommendation.bits:.3f} bits, "
            f"KLD {number(s.kld)} ± {number(s.kld_error)}, same top {s.same_top:.2%}"
        )


def _warnings(found: Examination) -> Iterator[str]:
    if not found.dangerous:
        return
    worst = max(found.dangerous, key=lambda layer: layer.constant_share)
    layers = ", ".join(str(layer.layer) for layer in found.dangerous)
    yield (
        f"Dangerous keys in layers {layers}: constants of norm {worst.constant_norm:.0f} hold up to "
        f"{worst.constant_share:.1%} of their energy, and a block's error is a share of the whole."
    )
    for name, error in worst.plain_errors.items():
        yield (
            f"  K in {name}: error of layer {worst.layer}'s attention {error:.1%} without balance, "
            f"{worst.errors['k'][name]:.1%} as run has it"
        )
    yield "  Leave turbo types balanced, and give other types of K --kv-balance page."
    yield ""


def _as_json(found: Examination, budget: float, n_ctx: int) -> dict[str, Any]:
    return {
        "n_ctx": n_ctx,
        "budget": budget,
        "layers": [{**asdict(layer), "dangerous": layer.is_dangerous} for layer in found.layers],
        "proposals": [
            {
                "flags": flags(proposal),
                "type_k": proposal.recommendation.spec.type_k,
                "type_v": proposal.recommendation.spec.type_v,
                "bits_per_value": proposal.recommendation.bits,
                **finite(asdict(proposal.result.statistics)),
            }
            for proposal in found.proposals
        ],
    }
