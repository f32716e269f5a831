"""A plan as lines of at most 80 columns, names apart, and as one JSON object."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from tqgguf.cli.error_object import own_error
from tqgguf.cli.figures import aligned, size
from tqgguf.cli.printable import printable
from tqgguf.formats.planning.memory_plan import GROWTH_SHARE, MOST_CONTEXT, CachePlan
from tqgguf.formats.planning.model_plan import FIDELITY, LAST_RESORT, ModelPlan, pair_label
from tqgguf.formats.wording import readable

_WIDTH = 80
_MOST_COLUMNS = 5
"""Contexts that stand side by side."""
_ORDER = f" (the first that fits of {', '.join(pair_label(*pair) for pair in FIDELITY[:5])}: least loss first)"
_LITTLE = " at a small loss"
_LOSSY = " (nothing else fits; turbo2 changes answers much: measure it by `tqgguf eval`, or take a shorter context)"
_DEVICES = {"cpu": "a CPU", "gpu": "a GPU"}
_WORTH_SAYING = 20
"""Of so many parts of the weights: what grows by less than one is not explained."""


def lines(plan: ModelPlan, is_machines: bool) -> list[str]:
    """is_machines: nobody said how much memory there is, the machine did."""
    about = plan.about
    of_files = f", {plan.n_files} files" if plan.n_files > 1 else ""
    context = f"trained for {about.context_length:,} tokens" if about.context_length else "context not stated"
    named = ", ".join(filter(None, (about.architecture, about.name, context)))
    work = plan.workspace
    found = []
    if plan.refusal is not None:
        found += [
            f"run refuses this model: {printable(str(plan.refusal))}",
            "The figures below are what it would take.",
        ]
    found += [f"{printable(readable(plan.path))}{of_files}: {printable(named)}"]
    facts = [
        ("memory", f"{size(plan.ask.memory)}{', all of this machine (--memory sets less)' if is_machines else ''}"),
        ("weights", f"{size(plan.weights)} on {_DEVICES[plan.ask.device]}, {size(plan.file_weights)} in the file"),
        *(("", text) for text in _widened(plan)),
        (
            "workspace",
            f"up to {size(work.total)}: {size(work.program)} for the program, {size(work.evaluation)} to evaluate "
            f"{plan.ask.chunk} tokens at a time (-ub)",
        ),
        ("left", _left(plan)),
        *(("note", note) for note in plan.notes),
    ]
    for name, text in facts:
        found += textwrap.wrap(f"{name:<11}{text}", _WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    if plan.rows:
        found += ["", *_tables(plan)]
    if plan.refusal is None and (plan.rows or plan.failure is not None):
        found += ["", *textwrap.wrap(_advice(plan), _WIDTH, break_on_hyphens=False)]
    return found


def as_json(plan: ModelPlan, is_machines: bool) -> dict[str, Any]:
    """All figures by name, in bytes and tokens. max_context: by memory alone, null where there is no end to it. error:
    only where the exit status is not 0.
    """
    return {
        "model": readable(plan.path),
        "architecture": plan.about.architecture,
        "name": plan.about.name,
        "context_length": plan.about.context_length,
        "memory": plan.ask.memory,
        "memory_from": "machine" if is_machines else "--memory",
        "device": plan.ask.device,
        "weights": plan.weights,
        "file_weights": plan.file_weights,
        "widened": [
            {"what": row.what, "form": row.form, "file_bytes": row.n_bytes, "bytes": row.held} for row in plan.widened
        ],
        "workspace": {"chunk": plan.ask.chunk, "total": plan.workspace.total, **asdict(plan.workspace)},
        "left": plan.room,
        "spare_share": GROWTH_SHARE,
        "contexts": list(plan.contexts),
        "types": [_row(plan, row) for row in plan.rows],
        "impossible": list(plan.impossible),
        "wanted_context": plan.wanted,
        "choice": None if plan.choice is None else _row(plan, plan.choice),
        "notes": list(plan.notes),
        **({} if plan.failure is None else own_error(plan.failure)),
    }


def _row(plan: ModelPlan, row: CachePlan) -> dict[str, Any]:
    return {
        "label": row.label,
        "type_k": row.type_k,
        "type_v": row.type_v,
        "kv_bytes": dict(zip(map(str, plan.contexts), row.sizes, strict=True)),
        "fits": _fits(plan, row)[0],
        "max_context": row.longest if row.longest < MOST_CONTEXT else None,
    }


def _widened(plan: ModelPlan) -> list[str]:
    """Why weights take more in memory than in the file, if it is much."""
    grown = [row for row in plan.widened if row.held - row.n_bytes > plan.weights // _WORTH_SAYING]
    if not grown:
        return []
    parts = ", ".join(f"{row.what} ({size(row.n_bytes)}) as {row.form} ({size(row.held)})" for row in grown)
    return [f"more than in the file, because on {_DEVICES[plan.ask.device]} run holds {parts}"]


def _left(plan: ModelPlan) -> str:
    if plan.room <= 0:
        return f"nothing: weights and workspace alone need {size(-plan.room)} more"
    return f"{size(plan.room)} for the KV cache, which keeps up to 1/{GROWTH_SHARE} of itself spare to grow"


def _fits(plan: ModelPlan, row: CachePlan) -> tuple[int, bool]:
    """The longest context, of those that the model can have or that are asked for; whether memory has room for more."""
    most = max(plan.about.context_length or 0, *plan.contexts)
    return min(row.longest, most), row.longest > most


def _tables(plan: ModelPlan) -> list[str]:
    found: list[str] = []
    indices = range(len(plan.contexts))
    groups = [indices[i : i + _MOST_COLUMNS] for i in range(0, len(indices), _MOST_COLUMNS)]
    for group in groups:
        is_last = group is groups[-1]
        heads = ["KV cache, K/V", *(f"{plan.contexts[i]:,}" for i in group), *(["fits"] if is_last else [])]
        rows = []
        for row in plan.rows:
            longest, is_more = _fits(plan, row)
            fits = f"{longest:,}{'+' if is_more else ' '}"
            rows.append([row.label, *(size(row.sizes[i]) for i in group), *([fits] if is_last else [])])
        found += ([""] if found else []) + aligned([heads, *rows])
    if plan.impossible:
        cannot = f"cannot hold heads of this size: {', '.join(plan.impossible)}"
        found += textwrap.wrap(cannot, _WIDTH)
    return found


def _advice(plan: ModelPlan) -> str:
    if plan.choice is None:
        return str(plan.failure)
    fits = _fits(plan, plan.choice)[0]
    n_ctx, trained = min(fits, plan.wanted), plan.about.context_length
    flags = f"-c {n_ctx} -ctk {plan.choice.type_k} -ctv {plan.choice.type_v}"
    if plan.rope_scale_is_a_flag and trained and n_ctx > trained:
        flags += f" --rope-scale {-(-n_ctx // trained)}"
    named = plan.ask.specs is not None
    if fits < plan.wanted:
        return f"{plan.wanted:,} tokens fit in none of these; the longest context{'' if named else _LITTLE}: {flags}"
    is_last = not named and (plan.choice.type_k, plan.choice.type_v) == LAST_RESORT
    why = " (the first of those named)" if named else _LOSSY if is_last else _ORDER
    return f"For {plan.wanted:,} tokens: {flags}{why}"
