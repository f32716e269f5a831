"""What `tqgguf eval` does with a request: read the text, load the model, evaluate, print."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from tqgguf.cli.about import about_model, about_program
from tqgguf.cli.eval_outcome import REPORT_FILES, as_text, write_report
from tqgguf.cli.eval_request import EvalRequest
from tqgguf.cli.exit_status import INTERRUPTED
from tqgguf.cli.interrupt import Interrupt
from tqgguf.cli.measuring import asked_model, calibrated, chunk_of, load, measured_text
from tqgguf.cli.model_flags import DEFAULT_CHUNKS
from tqgguf.cli.page import report_folder
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.cli.ranges import ALL_CHUNKS
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.config import resolve_context
from tqgguf.measuring.cache_pairs import CachePair
from tqgguf.measuring.evaluation.caches import (
    PLAIN_OPTIONS,
    CacheOptions,
    Candidate,
    can_hold,
    candidate,
    reference,
    specs_of,
)
from tqgguf.measuring.evaluation.compare import Evaluation, Plan, count_windows, cut_windows, spread
from tqgguf.runtime.models.calibration_choice import ChosenCalibration
from tqgguf.runtime.models.model_opening import ModelOpening, open_asked


def evaluate(request: EvalRequest) -> int:
    """Serve the request and return the exit status; 130 if it was interrupted, after what had been measured by then.

    What can be refused is refused before any weight is read.
    """
    for notice in request.notices:
        say(notice)
    folder = None if request.report is None else report_folder(request.report, REPORT_FILES)
    text, source = measured_text(request.text_file)
    opening = open_asked(asked_model(request, request.calibration))
    opened, config = opening.opened, opening.opened.config
    n_ctx = resolve_context(config, request.n_ctx)
    layers = config.layer_shapes()
    chosen = _calibration(request, opening)
    candidates = _candidates(request, layers, n_ctx, chosen)
    for warning in opened.tokenizer.warnings:
        say(warning)
    wanted = request.n_chunks if "--chunks" in request.given and request.n_chunks != ALL_CHUNKS else None
    windows = cut_windows(opened.tokenizer, text, n_ctx, wanted, source, is_spread=not request.like_llama)
    if "--chunks" not in request.given:
        windows = windows[:DEFAULT_CHUNKS] if request.like_llama else spread(windows, DEFAULT_CHUNKS)
    plan = Plan(windows, n_ctx // 2 if request.like_llama else 0, chunk_of(request))
    if not plan.n_scored:
        wanting = "3 or more with --like-llama" if request.like_llama else "2 or more"
        raise RequestError(f"-c: expected a window of {wanting}, so that a token is scored, found {n_ctx}")
    loaded = load(opening, request.verbose)
    say(f"text: {source}; {count_windows(len(windows), n_ctx)}, {plan.n_scored:,} of them scored")
    evaluation = Evaluation(loaded, candidates, plan)
    interrupted = _run(evaluation, plan)
    results = evaluation.results()
    n_scored = results[0].statistics.n_tokens
    about = {
        "model": about_model(opened),
        "text": source,
        "n_ctx": n_ctx,
        "n_windows": len(windows),
        "n_scored": n_scored,
        "first_scored": plan.first_scored,
        "chunk": plan.chunk,
        "kv_calibration": chosen.path,
        "interrupted": interrupted,
        **about_program(),
    }
    if request.json_output or n_scored:
        print(as_text(results, about, request.json_output), flush=True)
    if folder is not None and n_scored:
        say(f"report: {write_report(folder, results, about, request.words)}")
    if interrupted:
        say(f"interrupted: {n_scored:,} of {plan.n_scored:,} tokens were scored")
    return INTERRUPTED if interrupted else 0


def _calibration(request: EvalRequest, opening: ModelOpening) -> ChosenCalibration:
    """Where the channel scale of K is from; said if it is from a sidecar."""
    specs = [
        spec for pair in request.pairs for options in _options(request, pair) for spec in specs_of([pair], options)
    ]
    chosen = calibrated(opening, specs)
    if chosen.path is not None:
        say(f"channel scale of K: {chosen.path}")
    return chosen


def _candidates(
    request: EvalRequest, layers: Sequence[LayerShape], n_ctx: int, chosen: ChosenCalibration
) -> list[Candidate]:
    """The f16 cache and what is compared with it. Of the default pairs, those that the model's heads cannot have go."""
    first = reference(layers, n_ctx)
    rows = [first]
    for pair in request.pairs:
        reason = can_hold(pair, layers) if "--cache-types" not in request.given else None
        if reason is not None:
            say(f"{pair.label} is left out: {reason}")
        elif pair.label != first.label:
            options = [replace(o, channel_scales=chosen.channel_scales) for o in _options(request, pair)]
            rows += [candidate(pair, layers, n_ctx, o) for o in options]
    if len(rows) == 1:
        raise RequestError("--cache-types: nothing is left to compare with f16")
    return rows


def _options(request: EvalRequest, pair: CachePair) -> list[CacheOptions]:
    """How the caches of a pair are made, a row for each: judged without a tail first, then as `run` has it."""
    if request.like_llama:
        options = PLAIN_OPTIONS
        if request.exact_first is not None:
            options = replace(options, n_prefix=request.exact_first)
        return [replace(options, balance=request.balance or options.balance)]
    as_run = CacheOptions(n_prefix=request.exact_first, balance=request.balance)
    return [replace(as_run, tail=False), as_run] if request.no_tail and pair.has_blocks else [as_run]


def _run(evaluation: Evaluation, plan: Plan) -> bool:
    """Evaluate, with progress on stderr. Whether it was interrupted."""
    n_windows = len(plan.windows)
    line = ProgressLine("evaluating", "tokens")
    started = time.perf_counter()
    finished = 0

    with Interrupt() as interrupt:

        def progress(done: int, total: int) -> None:
            nonlocal finished
            line.update(done, total)
            now = done * n_windows // total
            if now > finished:
                finished = now
                seconds = time.perf_counter() - started
                line.end()
                left = f", about {seconds / now * (n_windows - now):.0f} s left" if now < n_windows else ""
                say(f"window {now} of {n_windows}: {seconds:.0f} s{left}")
            interrupt.check()

        try:
            evaluation.run(progress)
            interrupt.check()
        except KeyboardInterrupt:
            return True
        finally:
            line.end()
    return False
