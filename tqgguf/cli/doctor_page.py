"""The page of `tqgguf doctor --report`: what to use, what each layer suffers, how to repeat it; one file that needs no
network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqgguf.cli import doctor_table
from tqgguf.cli.eval_table import bits, kld, number
from tqgguf.cli.page import command, html_page, paragraph, plot, plots, small, wide_table
from tqgguf.cli.plots import as_svg, few_ticks, log_scale, look_of, new_axes
from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.blocks.codec import Side
from tqgguf.measuring.evaluation.dominance import is_clearly_less
from tqgguf.measuring.evaluation.examination import Examination, Proposal

_F16_BITS = BLOCK_TYPES["f16"].bits
_PROPOSALS = (
    "Tried on other text than was measured, with every key from blocks; all on the same tokens, the least KLD first. "
    "KLD: mean KL divergence of the next token's distribution from that of the f16 cache, in nats; ± is one standard "
    "error. Same top: how often the likeliest token is the same."
)

_SIDES: Sequence[tuple[Side, str]] = (("k", "V"), ("v", "K"))
"""Each side, and the other one as readers know it."""


def page(found: Examination, about: Mapping[str, Any], words: Sequence[str]) -> str:
    """The whole page, HTML. `about`: settings by name, as in the JSON. `words`: the command line."""
    parts = []
    if found.proposals:
        parts += ["<h2>Proposals</h2>", wide_table(_proposals(found), "figures long"), small(_PROPOSALS)]
    caption = "Squared error of the layer's attention with {} in that type and {} in f16, of its squared norm."
    drawn = [
        plot(f"Error of {side.upper()} by layer", error_by_layer(found, side), caption.format(side.upper(), other))
        for side, other in _SIDES
    ]
    parts += [plots(drawn), "<h2>Layers</h2>", wide_table(doctor_table.errors(found))]
    parts += [small(doctor_table.ERRORS), small(doctor_table.CONSTANT)]
    return html_page(f"Cache types for {about['model']['file']}", verdict(found), parts, about, "doctor", words)


def verdict(found: Examination) -> list[str]:
    """What to use, and what must be known before it is believed, as paragraphs of HTML."""
    known = [paragraph(line) for line in map(str.strip, doctor_table.warnings(found)) if line]
    if not found.proposals:
        return [paragraph(doctor_table.headline(found)), *known]
    best, *others = found.proposals
    s, stored = best.result.statistics, best.recommendation.bits[1]
    n_ctx = found.budget.contexts[1]
    told = (
        f"With the types below the cache takes {stored / _F16_BITS:.0%} of f16's memory at {n_ctx:,} tokens, and the "
        f"likeliest next token stays the same for {s.same_top:.1%} of the tokens ({bits(stored)} bits per value, "
        f"KLD {number(s.kld)})."
    )
    alike = [
        f"<p>{_command(other)} does as well within the standard errors: {bits(other.recommendation.bits[1])} bits per "
        f"value, KLD {number(other.result.statistics.kld)}.</p>"
        for other in others
        if not is_clearly_less(s, other.result.statistics)
    ]
    return [paragraph(told), f"<p>{_command(best)}</p>", *alike, *known]


def _command(proposal: Proposal) -> str:
    return command(doctor_table.flags(proposal).split())


def _proposals(found: Examination) -> list[Sequence[str]]:
    contexts = list(dict.fromkeys(found.budget.contexts))
    rows: list[Sequence[str]] = [("types", *(f"bits at {n:,}" for n in contexts), "KLD", "same top")]
    for proposal in found.proposals:
        stored = dict(zip(found.budget.contexts, proposal.recommendation.bits, strict=True))
        s = proposal.result.statistics
        figures = (*(bits(stored[n]) for n in contexts), kld(s), f"{s.same_top:.2%}")
        rows.append((doctor_table.flags(proposal), *figures))
    return rows


def error_by_layer(found: Examination, side: Side) -> str:
    """A line for each type."""
    figure, axes = new_axes("layer", "error of attention (%)")
    numbers = [layer.layer for layer in found.layers]
    by_type = {
        name: [100 * layer.errors[side][name] for layer in found.layers] for name in found.layers[0].errors[side]
    }
    above = [error for errors in by_type.values() for error in errors if error > 0]
    if above:
        log_scale(axes.yaxis, min(above), max(above))
    for i, (name, errors) in enumerate(by_type.items()):
        axes.plot(numbers, errors, linewidth=1, label=name, **look_of(i))
    few_ticks(axes)
    return as_svg(figure, axes, f"Error of {side.upper()} by layer")
