"""What `tqgguf calibrate` does with a request: read the text, load the model, measure, write."""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path

from tqgguf.cli.calibrate_request import CalibrateRequest
from tqgguf.cli.interrupt import Interrupt
from tqgguf.cli.measuring import asked_model, chunk_of, load, measured_text
from tqgguf.cli.product import name_product
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.cli.ranges import ALL_CHUNKS
from tqgguf.formats.atomic import check_target
from tqgguf.formats.models.calibration import Calibration, check_replaceable, write_calibration
from tqgguf.formats.models.calibration_files import beside, cached, make_cache_folder
from tqgguf.formats.models.config import resolve_context
from tqgguf.measuring.evaluation.calibration_statistics import calibrate as calibrate_model
from tqgguf.measuring.evaluation.compare import count_windows, cut_windows, spread
from tqgguf.runtime.models.load import OpenModel
from tqgguf.runtime.models.mlx_folder import OpenFolder
from tqgguf.runtime.models.model_opening import open_asked


def calibrate(request: CalibrateRequest) -> int:
    """Serve the request and return the exit status; what can be refused is refused before any weight is read.

    Nothing is written unless all is measured.
    """
    for notice in request.notices:
        say(notice)
    text, source = measured_text(request.text_file)
    opening = open_asked(asked_model(request))
    opened, config = opening.opened, opening.opened.config
    for warning in opened.tokenizer.warnings:
        say(warning)
    path = _target(request, opened)
    asked = request.n_ctx if "--ctx-size" in request.given else min(request.n_ctx, config.context_length)
    n_ctx = resolve_context(config, asked)
    windows = cut_windows(opened.tokenizer, text, n_ctx, None, source)
    n_wanted = len(windows) if request.n_chunks == ALL_CHUNKS else request.n_chunks
    if n_wanted > len(windows) and "--chunks" in request.given:
        say(f"--chunks {n_wanted}: {source} gives {count_windows(len(windows), n_ctx)}")
    windows = spread(windows, n_wanted)
    chunk = chunk_of(request)
    loaded = load(opening, request.verbose)
    say(f"text: {source}; {count_windows(len(windows), n_ctx)}")
    line = ProgressLine("calibrating", "tokens")
    started = time.perf_counter()
    with Interrupt() as interrupt:

        def progress(done: int, total: int) -> None:
            line.update(done, total)
            interrupt.check()

        try:
            scales = calibrate_model(loaded, windows, chunk, progress)
            interrupt.check()
        finally:
            line.end()
    made = Calibration(
        scales=scales,
        fingerprint=opened.fingerprint,
        architecture=config.architecture,
        model=config.name,
        n_tokens=int(windows.size),
        text=source if request.text_file is None else Path(source).name,
        text_sha256=sha256(text.encode()).hexdigest(),
    )
    write_calibration(path, made, replace_anything=request.output is None)
    say(f"channel scale of K: {len(scales)} layers from {windows.size:,} tokens, {time.perf_counter() - started:.0f} s")
    if path.absolute() not in (beside(opened.path), cached(opened.fingerprint)):
        say(f"use it with --kv-calibration {path}, or put it beside the model as {beside(opened.path).name}")
    name_product(path)
    return 0


def _target(request: CalibrateRequest, opened: OpenModel | OpenFolder) -> Path:
    """Where to write, refused before anything is measured if that cannot be."""
    if request.output is None:
        make_cache_folder()
        path = cached(opened.fingerprint)
    else:
        path = Path(request.output)
    check_target(path if request.output is None else request.output)
    if request.output is not None:
        check_replaceable(path)
    return path
