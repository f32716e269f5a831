"""What `tqgguf bench` does with a request: measure memory, load the model, measure speed and answers, print."""

from __future__ import annotations

from dataclasses import replace

from tqgguf.cli import bench_table
from tqgguf.cli.about import about_model, about_program
from tqgguf.cli.bench_request import BenchRequest
from tqgguf.cli.exit_status import INTERRUPTED
from tqgguf.cli.interrupt import Interrupt
from tqgguf.cli.json_text import json_text
from tqgguf.cli.measuring import asked_model, calibrated, chunk_of, load, measured_text
from tqgguf.cli.page import report_folder, write_texts
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.formats.bench_record import BenchRecord
from tqgguf.formats.cores import cores
from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.planning.machine_memory import machine_bytes
from tqgguf.measuring.bench.match import PROMPT_TOKENS, measure_matches
from tqgguf.measuring.bench.memory import MemoryPlan, measure_memory
from tqgguf.measuring.bench.modes import modes_of
from tqgguf.measuring.bench.speed import SpeedPlan, measure_speeds
from tqgguf.measuring.cache_pairs import CachePair, parse_pairs
from tqgguf.measuring.evaluation.caches import REFERENCE, CacheOptions, can_hold, specs_of
from tqgguf.measuring.evaluation.compare import cut_windows, spread
from tqgguf.runtime.models.model_opening import open_asked

PAGE_FILE, JSON_FILE, CSV_FILE = "bench.html", "bench.json", "bench.csv"


def bench(request: BenchRequest) -> int:
    """Serve the request and return the exit status; 130 if it was interrupted, after what had been measured by then.

    What can be refused is refused before any weight is read.
    """
    for notice in (*request.notices, *request.depth_notices):
        say(notice)
    folder = None if request.report is None else report_folder(request.report, (PAGE_FILE, JSON_FILE, CSV_FILE))
    bench_ = _Bench(request)
    interrupted = bench_.run()
    record = bench_.record
    record.about["interrupted"] = interrupted
    if record.has_figures or request.form == "json":
        print(bench_table.as_text(record, request.form), flush=True)
    if folder is not None and record.has_figures:  # an earlier report is not lost to an interrupt
        from tqgguf.cli.bench_page import page  # lazily: it takes matplotlib in

        texts = {
            PAGE_FILE: page(record, request.words),
            JSON_FILE: json_text(record.as_json(), indent=1) + "\n",
            CSV_FILE: bench_table.as_csv(record),
        }
        write_texts(folder, texts)
        say(f"report: {folder / PAGE_FILE}")
    if interrupted:
        what = (
            "these are the figures that were measured by then" if record.has_figures else "nothing was measured by then"
        )
        say(f"interrupted: {what}")
    return INTERRUPTED if interrupted else 0


class _Bench:
    def __init__(self, request: BenchRequest) -> None:
        self.request = request
        self.opening = open_asked(asked_model(request, request.calibration))
        self.opened = opened = self.opening.opened
        self.chunk = chunk_of(request)
        self.plan = SpeedPlan(
            request.prompt_list,
            request.answer_list,
            request.depth_list,
            request.repetitions,
            self.chunk,
            request.seed,
        )
        if self.plan.n_ctx > opened.config.context_length and not opened.config.rope_overridden:
            raise RequestError(
                f"-d, -p, -n: {self.plan.n_ctx:,} tokens stand together; expected at most "
                f"{opened.config.context_length:,}, for which the model was trained, or stretched positions "
                "(--rope-scale)"
            )
        self.notes: list[str] = []
        self.layers = opened.config.layer_shapes()
        self.pairs = self._pairs()
        options = CacheOptions(request.exact_first, request.balance)
        chosen = calibrated(self.opening, specs_of(self.pairs, options))
        options = replace(options, channel_scales=chosen.channel_scales)
        self.modes = modes_of(self.pairs, self.layers, max(self.plan.n_ctx, 1), options)
        self.prompts, source = self._match_prompts()
        for warning in opened.tokenizer.warnings:
            say(warning)
        self.record = BenchRecord(
            [mode.label for mode in self.modes],
            {
                "model": about_model(opened),
                "n_prompt": request.prompt_list,
                "n_answer": request.answer_list,
                "n_depth": request.depth_list,
                "repetitions": request.repetitions,
                "seed": request.seed,
                "chunk": self.chunk,
                "threads": request.threads if request.threads > 0 else cores(),
                "match": {
                    "text": source,
                    "prompts": len(self.prompts),
                    "prompt_tokens": PROMPT_TOKENS,
                    "answer_tokens": request.n_match,
                },
                "kv_calibration": chosen.path,
                "command": list(request.words),
                "machine": {"cores": cores(), "memory": machine_bytes()},
                **about_program(),
            },
            notes=self.notes,
        )

    def _pairs(self) -> tuple[CachePair, ...]:
        """f16 and what is compared with it. Of the default pairs, those that the model's heads cannot have go."""
        kept = []
        for pair in (*parse_pairs(REFERENCE), *self.request.pairs):
            reason = None if self.request.names_types else can_hold(pair, self.layers)
            if reason is not None:
                self._note(f"{pair.label} is left out: {reason}")
            else:
                kept.append(pair)
        return tuple(dict.fromkeys(kept))

    def _match_prompts(self) -> tuple[list[list[int]], str | None]:
        """Windows spread over the text, and what to call it. None are cut where the model's context is too short."""
        request = self.request
        if not request.n_match:
            return [], None
        text, source = measured_text(request.text_file)
        wanted = PROMPT_TOKENS + request.n_match
        trained = self.opened.config.context_length
        if wanted > trained and not self.opened.config.rope_overridden:
            if "--match" in request.given:
                raise RequestError(
                    f"--match: prompts and answers take {wanted:,} tokens; the model's context is {trained:,}"
                )
            self.notes.append(
                f"answers are not compared: that takes {wanted:,} tokens of context, the model has {trained:,}"
            )
            return [], None
        windows = cut_windows(
            self.opened.tokenizer, text, PROMPT_TOKENS, None, source, flags="--match-prompts, -f"
        )  # fmt: skip
        return [window.tolist() for window in spread(windows, request.n_match_prompts)], source

    def run(self) -> bool:
        """Measure everything into the record. Whether it was interrupted."""
        with Interrupt() as interrupt:
            try:
                if not self.request.no_memory and self.plan.tests:
                    self._measure_memory(interrupt)
                loaded = load(self.opening, self.request.verbose)
                line = ProgressLine("measuring", "tokens")
                total = self.plan.n_tokens(len(self.modes))
                total += len(self.modes) * len(self.prompts) * (PROMPT_TOKENS + self.request.n_match)
                done = 0

                def tick(n: int) -> None:
                    nonlocal done
                    done += n
                    line.update(min(done, total), total)
                    interrupt.check()

                try:
                    measure_speeds(loaded, self.modes, self.plan, self.record.speeds, tick)
                    matches = self.record.matches
                    measure_matches(loaded, self.modes, self.prompts, self.request.n_match, self.chunk, matches, tick)
                    interrupt.check()
                finally:
                    line.end()
            except KeyboardInterrupt:
                return True
        return False

    def _note(self, text: str) -> None:
        """Say it, and keep it with the figures."""
        self.notes.append(text)
        say(text)

    def _leave_out(self, label: str, reason: str) -> None:
        """A cache that this machine cannot serve: MLX lacks an operation for it, or there is too little memory."""
        self._note(reason)
        kept = [mode for mode in self.modes if mode.label != label or mode is self.modes[0]]
        if len(kept) < len(self.modes):
            self.modes = kept
            self.record.modes[:] = [mode.label for mode in kept]
            self._note(f"{label} is left out")

    def _measure_memory(self, interrupt: Interrupt) -> None:
        line = ProgressLine("measuring memory", "caches")
        longest = max(n for _, n in self.plan.tests)
        request = self.request
        asked = replace(self.opening.ask, path=str(self.opened.path))
        try:
            for i, pair in enumerate(self.pairs):
                line.update(i, len(self.pairs))
                plan = MemoryPlan(
                    asked,
                    pair.label,
                    [depth + longest for depth in self.plan.depths],
                    self.chunk,
                    request.seed,
                    request.exact_first,
                    request.balance,
                )
                try:
                    self.record.memories += measure_memory(plan)
                except TqggufError as error:
                    interrupt.check()
                    self._leave_out(pair.label, str(error))
                interrupt.check()
        finally:
            line.end()
