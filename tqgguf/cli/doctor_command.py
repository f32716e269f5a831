"""What `tqgguf doctor` does with a request: read the text, load the model, examine it, print."""

from __future__ import annotations

from tqgguf.cli import doctor_table
from tqgguf.cli.about import about_model, about_program
from tqgguf.cli.doctor_request import LEAST_TOKENS, DoctorRequest
from tqgguf.cli.json_text import json_text
from tqgguf.cli.measuring import load, measured_text
from tqgguf.cli.model_flags import DEFAULT_MEASURED
from tqgguf.cli.page import report_folder, write_texts
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError
from tqgguf.measuring.evaluation.compare import cut_windows
from tqgguf.measuring.evaluation.examination import examine as examine_model
from tqgguf.measuring.evaluation.examination import proposable_types
from tqgguf.runtime.models.model_opening import ModelAsk, open_asked

PAGE_FILE, JSON_FILE = "doctor.html", "doctor.json"
REPORT_FILES = (PAGE_FILE, JSON_FILE)


def examine(request: DoctorRequest) -> int:
    """Serve the request and return the exit status. What can be refused is refused before any weight is read."""
    for notice in request.notices:
        say(notice)
    folder = None if request.report is None else report_folder(request.report, REPORT_FILES)
    text, source = measured_text(request.text_file)
    opening = open_asked(ModelAsk(request.model, threads=request.threads))
    opened = opening.opened
    trained = opened.config.context_length
    n_ctx = _whole_pages("-c", request.n_ctx, trained, trained)
    n_measured = _whole_pages("--measure", request.n_measured, min(n_ctx, DEFAULT_MEASURED), trained)
    proposable_types(opened.config.layer_shapes())
    tokens, trial = cut_windows(opened.tokenizer, text, n_measured, 2, source, flags="--measure").tolist()
    loaded = load(opening, request.verbose)
    say(f"text: {source}; {n_measured:,} tokens are measured, and {n_measured:,} others to try the proposals on")
    measuring = ProgressLine("measuring", "tokens")
    found = examine_model(loaded, tokens, trial, request.budget, n_ctx, measuring.update)
    measuring.end()
    about = {"model": about_model(opened), "text": source, **doctor_table.contexts(found), **about_program()}
    figures = {**about, **doctor_table.as_json(found)}
    shown = json_text(figures) if request.json_output else "\n".join(doctor_table.lines(found))
    print(shown, flush=True)
    if folder is not None:
        from tqgguf.cli.doctor_page import page  # lazily: it takes matplotlib in

        texts = {PAGE_FILE: page(found, about, request.words), JSON_FILE: json_text(figures, indent=1) + "\n"}
        write_texts(folder, texts)
        say(f"report: {folder / PAGE_FILE}")
    return 0


def _whole_pages(flag: str, asked: int, otherwise: int, trained: int) -> int:
    """What a flag asks for, in whole pages within what a model was trained for; said if that is something else."""
    n_tokens = min(asked or otherwise, trained) // PAGE_TOKENS * PAGE_TOKENS
    if n_tokens < LEAST_TOKENS:
        raise RequestError(f"expected a model with a context of {LEAST_TOKENS} tokens or more, found {trained}")
    if asked and n_tokens != asked:
        say(
            f"{flag} {asked}: whole pages of {PAGE_TOKENS} within the model's context of {trained}, "
            f"so {n_tokens} are used"
        )
    return n_tokens
