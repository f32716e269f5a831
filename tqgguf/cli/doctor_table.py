"""What an examination found: tables and proposals for a terminal, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tqgguf.cli.eval_table import bits, finite, kld
from tqgguf.cli.figures import aligned
from tqgguf.measuring.evaluation.examination import Examination, Proposal
from tqgguf.measuring.evaluation.recommendation import FEW_BITS, WINDOWS_OF_EVIDENCE

ERRORS = "Error of each layer's attention with K or V in that type, the other in f16 (squared, of its squared norm)."
CONSTANT = "Constant: the share of the energy of its keys that does not change within a page of 128 tokens."


def lines(found: Examination) -> Iterator[str]:
    """The whole report for a terminal: what each layer suffers, warnings, and the proposals with their figures."""
    yield ERRORS
    yield CONSTANT
    yield from aligned(errors(found))
    yield ""
    yield from warnings(found)
    yield headline(found)
    for proposal in found.proposals:
        yield f"  {flags(proposal)}"
        yield f"      {figures(found, proposal)}"


def errors(found: Examination) -> list[Sequence[str]]:
    """The table of all layers, its header first."""
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
    return [heads, *rows]


def headline(found: Examination) -> str:
    """What the proposals below it have in common, or that there are none."""
    limit = f"{found.budget.bits:g} bits per value at {_contexts(found)}"
    if not found.proposals:
        return f"Nothing fits into {limit}: raise --bpv."
    return f"Within {limit}, tried on {measured(found):,} other tokens with every key from blocks, the least KLD first:"


def flags(proposal: Proposal) -> str:
    """The proposal as flags of run."""
    spec = proposal.recommendation.spec
    return f"-ctk {spec.type_k} -ctv {spec.type_v}"


def figures(found: Examination, proposal: Proposal) -> str:
    """Its bits at each context, and its loss."""
    at = dict(zip(found.budget.contexts, proposal.recommendation.bits, strict=True))
    stored = ", ".join(f"{bits(x)} bits at {n:,} tokens" for n, x in at.items())
    s = proposal.result.statistics
    return f"{stored}; KLD {kld(s)}, same top {s.same_top:.2%}"


def measured(found: Examination) -> int:
    """Tokens that were measured."""
    return found.budget.contexts[0]


def _contexts(found: Examination) -> str:
    n_measured, n_ctx = found.budget.contexts
    return f"{n_ctx:,} tokens" if n_ctx == n_measured else f"{n_measured:,} tokens (measured) and at {n_ctx:,} (wanted)"


def warnings(found: Examination) -> Iterator[str]:
    """What a reader must know before any proposal: dangerous keys, and what was measured too little; an empty line
    behind each.
    """
    yield from _dangerous(found)
    if found.unproven:
        layers = ", ".join(map(str, found.unproven))
        wanted = WINDOWS_OF_EVIDENCE * found.widest_window
        yield (
            f"Layers {layers} see the whole context, the others a window of {found.widest_window:,} tokens. "
            f"{measured(found):,} measured tokens say too little of their far keys: they get more than {FEW_BITS} "
            f"bits. From {wanted:,} tokens on (--measure {wanted}) fewer are considered."
        )
        yield ""


def _dangerous(found: Examination) -> Iterator[str]:
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


def contexts(found: Examination) -> dict[str, Any]:
    """What the figures and the budget refer to, by name."""
    n_measured, n_ctx = found.budget.contexts
    return {"n_ctx": n_ctx, "n_measured": n_measured, "budget": found.budget.bits}


def as_json(found: Examination) -> dict[str, Any]:
    """All figures by name, unrounded. bits_per_value: at n_ctx tokens, bits_measured: at n_measured."""
    return {
        **contexts(found),
        "layers": [{**asdict(layer), "dangerous": layer.is_dangerous} for layer in found.layers],
        "unproven_layers": list(found.unproven),
        "proposals": [
            {
                "flags": flags(proposal),
                "type_k": proposal.recommendation.spec.type_k,
                "type_v": proposal.recommendation.spec.type_v,
                "bits_per_value": proposal.recommendation.bits[1],
                "bits_measured": proposal.recommendation.bits[0],
                **finite(asdict(proposal.result.statistics)),
            }
            for proposal in found.proposals
        ],
    }
