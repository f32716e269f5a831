"""What `tqgguf eval --needle` does: hide numbers in the text, ask every cache for them, print which were found."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqgguf.cli import needle_table
from tqgguf.cli.about import about_model, about_program
from tqgguf.cli.eval_request import EvalRequest
from tqgguf.cli.exit_status import INTERRUPTED
from tqgguf.cli.interrupt import Interrupt
from tqgguf.cli.json_text import json_text
from tqgguf.cli.measuring import asked_model, calibrated, chunk_of, load, measured_text
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.formats.blocks.kv_size import LayerShape
from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.config import resolve_context
from tqgguf.measuring.cache_pairs import CachePair
from tqgguf.measuring.evaluation.caches import REFERENCE, CacheOptions, can_hold, specs_of
from tqgguf.measuring.evaluation.needle import NeedleRow, NeedleTest, least_length, needle_prompts
from tqgguf.runtime.kv.settings import check_cache_types
from tqgguf.runtime.models.model_opening import open_asked
from tqgguf.text.text_tokenizer import TextTokenizer


def find_needles(request: EvalRequest) -> int:
    """Serve the request and return the exit status; 130 if it was interrupted, after the cells finished by then."""
    for notice in request.notices:
        say(notice)
    text, source = measured_text(request.text_file)
    opening = open_asked(asked_model(request, request.calibration))
    opened = opening.opened
    n_ctx = resolve_context(opened.config, request.n_ctx)
    layers = opened.config.layer_shapes()
    options = CacheOptions(request.exact_first, request.balance)
    rows = _rows(request, options, layers)
    chosen = calibrated(opening, specs_of(request.pairs, options))
    for line in opened.tokenizer.warnings:
        say(line)
    rows = [NeedleRow(row.label, row.spec, chosen.channel_scales) for row in rows]
    lengths = _lengths(request, opened.tokenizer, n_ctx)
    prompts = needle_prompts(opened.tokenizer, text, lengths, request.depths, request.seed, source)
    loaded = load(opening, request.verbose)
    test = NeedleTest(loaded, rows, prompts, chunk_of(request))
    interrupted = _run(test)
    if request.json_output:
        about = {
            "model": about_model(opened),
            "text": source,
            "seed": request.seed,
            "chunk": test.chunk,
            "kv_calibration": chosen.path,
            "interrupted": interrupted,
            **about_program(),
        }
        print(json_text({**about, "needles": needle_table.as_json(test)}), flush=True)
    elif test.cells:
        print("\n".join(needle_table.lines(test)), flush=True)
    if interrupted:
        say(f"interrupted: {len(test.cells)} of {len(prompts)} needles were asked for")
    return INTERRUPTED if interrupted else 0


def _lengths(request: EvalRequest, tokenizer: TextTokenizer, n_ctx: int) -> list[int]:
    """The lengths to try. Of the default ones, those without room for a needle are left out."""
    lengths = request.needle_lengths_of(n_ctx)
    if request.needle_lengths is not None:
        return lengths
    least = {length: least_length(tokenizer, length, request.depths, request.seed) for length in lengths}
    kept = [length for length in lengths if length >= least[length]]
    if not kept:
        raise RequestError(f"-c: expected {least[n_ctx]} tokens or more for a needle, found {n_ctx}")
    if left := [length for length in lengths if length not in kept]:
        say(f"lengths of {' and '.join(map(str, left))} tokens are left out: a needle needs {least[left[-1]]}")
    return kept


def _rows(request: EvalRequest, options: CacheOptions, layers: Sequence[LayerShape]) -> list[NeedleRow]:
    """f16, and the pairs after it. Of the default pairs, those that cannot be asked are left out."""
    first = CachePair(REFERENCE, REFERENCE)
    rows = [NeedleRow(first.label, CacheOptions().spec(first))]
    for pair in request.pairs:
        reason = can_hold(pair, layers) if pair.is_ours else "only caches of ours answer as run does"
        if reason is not None and "--cache-types" not in request.given:
            say(f"{pair.label} is left out: {reason}")
        elif not pair.is_ours:
            raise RequestError(f"--cache-types {pair.label}: {reason}; leave it out with --needle")
        elif pair.label != first.label:
            spec = options.spec(pair)
            check_cache_types(layers, spec)
            rows.append(NeedleRow(pair.label, spec))
    return rows


def _run(test: NeedleTest) -> bool:
    """Ask, with progress on stderr and a line for each finished cell. Whether it was interrupted."""
    line = ProgressLine("asking", "tokens")
    started, told = time.perf_counter(), 0

    def tell() -> None:
        nonlocal told
        if len(test.cells) > told:
            told = len(test.cells)
            line.end()
            say(f"needle {told} of {len(test.prompts)}: {time.perf_counter() - started:.0f} s")

    with Interrupt() as interrupt:

        def progress(done: int, total: int) -> None:
            tell()
            line.update(done, total)
            interrupt.check()

        try:
            test.run(progress)
            interrupt.check()
        except KeyboardInterrupt:
            return True
        finally:
            line.end()
    tell()
    return False
