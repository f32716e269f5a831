"""What `tqgguf run` does with a request: read the texts, load the model, answer, report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Literal

from tqgguf.cli import report
from tqgguf.cli.about import about_model, about_program
from tqgguf.cli.chat_command import chat, more_context
from tqgguf.cli.error_object import own_error
from tqgguf.cli.exit_status import INTERRUPTED
from tqgguf.cli.interrupt import Interrupt, Terminated
from tqgguf.cli.json_text import json_text
from tqgguf.cli.measuring import asked_grid, asked_model, model_line
from tqgguf.cli.product import name_product
from tqgguf.cli.progress import ProgressLine, say, telling
from tqgguf.cli.prompts import Texts, chat_turns, read_texts
from tqgguf.cli.run_prompt import RunPrompt
from tqgguf.cli.run_request import Purpose, RunRequest
from tqgguf.cli.terminal import Terminal
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.templates.process import PROCESS
from tqgguf.formats.wording import readable
from tqgguf.runtime import backends
from tqgguf.runtime.generation.generate import Generation
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.generation.session_opening import PromptCacheAsk, SessionAsk, SessionOpening, open_session
from tqgguf.text.dry import breaker_tokens
from tqgguf.text.sampling import Sampler
from tqgguf.text.text_tokenizer import TextTokenizer


def run(request: RunRequest) -> int:
    """Serve the request and return the exit status. What can be refused is refused before any weight is read."""
    texts = read_texts(request, sys.stdin.buffer, sys.stdin.isatty())
    with contextlib.ExitStack() as stack:
        terminal = Terminal.of(sys.stdin.fileno()) if texts.chats_on and sys.stdin.isatty() else None
        if terminal is not None:  # before the model is loaded: what is typed meanwhile counts
            stack.enter_context(terminal)
        run_ = _Run(request, texts)
        try:
            if request.purpose == "keep":
                status = run_.keep_document()
            elif texts.chats_on and run_.prompt.conversation is not None:
                status = run_.chat(terminal)
            else:
                status = run_.answer_once()
        finally:
            run_.close()
        if request.json_output and request.purpose != "keep":
            run_.print_json()
        return status or run_.save_status


_OF_A_GPU = frozenset({"--kv-workspace", "--kv-kernel-rows"})
_USES: dict[Purpose, Literal["resume", "make", "ask"]] = {"answer": "resume", "keep": "make", "ask": "ask"}


def _asked(request: RunRequest) -> SessionAsk:
    """The session that a request is for."""
    prompt_cache = None
    if request.prompt_cache is not None:
        prompt_cache = PromptCacheAsk(
            request.prompt_cache,
            _USES[request.purpose],
            reads_only=request.prompt_cache_ro,
            keeps_all=request.prompt_cache_all,
            profile=request.prompt_cache_profile,
        )
    return SessionAsk(
        asked_model(request, request.calibration),
        request.cache,
        request.given_cache,
        n_ctx=request.n_ctx,
        grid=asked_grid(request),
        prompt_cache=prompt_cache,
        strict=request.strict_kv,
        notices=() if request.quiet else tuple(request.cache_notices),
    )


class _Run:
    def __init__(self, request: RunRequest, texts: Texts) -> None:
        self.request, self.texts = request, texts
        for notice in () if request.quiet else request.notices + texts.notices:
            say(notice)
        if backends.gpu_family() is None:
            for flag in sorted(_OF_A_GPU & request.given):
                say(f"{flag}: no effect here, MLX has no GPU")
        if request.conversation is not False:
            PROCESS.start()  # it gets ready while the model is opened
        with telling() as notices:
            opening = open_session(_asked(request), notices)
            notices += opening.tokenizer.warnings
        self.opened, self.prompt_cache = opening.model.opened, opening.prompt_cache
        self.prompt = RunPrompt(request, texts, opening)
        if opening.types_were_chosen and not request.quiet:
            types = f"{opening.spec.type_k}/{opening.spec.type_v}"
            say(f"the document is kept in {types}; -ctk, -ctv and --cache-preset choose others")
        self.sampler = self._sampler(opening.tokenizer)
        self.session = self._load(opening)
        self.save_status = 0
        """What a failure to write the prompt cache makes of the exit status."""
        self.save_failure: TqggufError | None = None
        self.finish = ""
        """How the last answer ended, one of `report.ENDINGS`; "": there is none."""
        self.text = ""

    def _sampler(self, tokenizer: TextTokenizer) -> Sampler:
        sampling = self.request.sampling
        if self.request.ignore_eos:
            sampling = sampling.banning(tokenizer.end_of_generation)
        sampling.check_vocabulary(tokenizer.vocab_size)
        breakers = None
        if sampling.looks_for_repetitions:
            breakers = breaker_tokens(sampling.dry_sequence_breakers, tokenizer)
        return Sampler(sampling, breakers)

    def _load(self, opening: SessionOpening) -> Session:
        request = self.request
        loading = ProgressLine("loading", "bytes", request.quiet)
        loaded = opening.load(loading.update)
        loading.end()
        if request.verbose:
            say(model_line(self.opened))
            say(f"device: {backends.describe()}")
            if opening.calibration.path is not None:
                say(f"channel scale of K: {opening.calibration.path}")
        workspace = None if request.kv_workspace is None else request.kv_workspace << 20
        backend = backends.default_backend(workspace_bytes=workspace, most_rows=request.kv_kernel_rows)
        return opening.session(loaded, backend)

    def _tell_of_replacing(self) -> None:
        """A prompt that goes another way than the file's takes its place: say what is lost."""
        assert self.prompt_cache is not None
        held, kept = len(self.prompt_cache.tokens), self.session.timing.reused_tokens
        if held and not self.prompt_cache.is_continued_by(self.session.tokens):
            path = readable(self.prompt_cache.path)
            say(
                f"{path}: its {held:,} tokens are replaced by this prompt's, {kept:,} of them kept; "
                "--prompt-cache-ro keeps a file"
            )

    @property
    def _keeps_answers(self) -> bool:
        """Whether what is generated will be in the prompt cache."""
        return self.prompt_cache is not None and self.prompt_cache.keeps_all and not self.prompt_cache.reads_only

    def _save(self) -> None:
        """Keep what the session holds. A failure is said, and the exit status tells it; the answer goes on."""
        assert self.prompt_cache is not None
        try:
            self.prompt_cache.save(self.session)
        except TqggufError as error:
            self.save_status = error.exit_status
            if str(error) != str(self.save_failure):
                say(f"error: {error}; the prompt cache was not written")
            self.save_failure = error

    def keep_document(self) -> int:
        """Evaluate the prompt into the prompt cache; 130 if that was interrupted, and nothing was written."""
        assert self.prompt.first is not None and self.prompt_cache is not None
        prefill = ProgressLine("reading the document", "tokens", self.request.quiet)
        with Interrupt() as interrupt:

            def progress(done: int, total: int) -> None:
                prefill.update(done, total)
                interrupt.check()

            self.session.prefill(self.prompt.first, progress)
            prefill.end()
            if self.prompt_cache.replaces:
                say(f"{readable(self.prompt_cache.path)}: the older prompt cache of that name is replaced")
            self.prompt_cache.save(self.session)
        self.finish = "kept"
        name_product(self.prompt_cache.path)
        return 0

    def answer_once(self) -> int:
        """One answer to the prompt; 130 if it was interrupted."""
        assert self.prompt.first is not None
        shown = self.request.display_prompt
        if shown is None:
            shown = self.prompt.conversation is None and self.request.purpose == "answer"
        self.text = self._answer(self.prompt.first, (self.texts.prompt or "") if shown else "")
        return INTERRUPTED if self.finish == "interrupt" else 0

    def print_json(self) -> None:
        """The answer and its figures as one object, once it is known whether the prompt cache was written."""
        figures = report.as_json(self.session.report(), self.session.timing, self.finish, self.sampler.seed)
        found = {"text": self.text, "model": about_model(self.opened), **about_program(), **figures}
        if self.save_failure is not None:
            found |= own_error(self.save_failure)
        print(json_text(found), flush=True)

    def chat(self, terminal: Terminal | None) -> int:
        """Answers until the input ends. Ctrl-C ends an answer, and at the prompt the chat."""
        assert self.prompt.conversation is not None
        return chat(
            self.prompt.conversation if self.request.purpose == "answer" else None,
            self.session,
            self._turns(terminal),
            self.prompt.encode,
            lambda ids: self._answer(ids, ""),
            on_terminal=terminal is not None,
            reports=self.request.reports,
        )

    def _turns(self, terminal: Terminal | None) -> Iterator[list[int] | str]:
        """The first message, which is encoded already, then the texts of others."""
        if self.prompt.first is not None:
            yield self.prompt.first
            if self.request.single_turn:
                return
        yield from chat_turns(self.request, sys.stdin.buffer, terminal)

    def _answer(self, ids: list[int], heading: str) -> str:
        """Evaluate and generate, streaming to stdout (unless it is for --json). The text without the heading."""
        stream = not self.request.json_output
        is_taken_up = self.prompt_cache is not None and ids == self.prompt.going_on_from
        generation = Generation(
            self.session,
            self.sampler,
            self.request.n_predict,
            self.texts.reverse_prompts,
            context=ids if self.prompt.conversation is None and not is_taken_up else (),
            goes_on=self._keeps_answers,
        )
        if self.prompt_cache is not None and is_taken_up:
            generation.take_up(ids, self.prompt_cache.n_generated)
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            if stream:
                sys.stdout.write(text)
                sys.stdout.flush()

        prefill = ProgressLine("reading the prompt", "tokens", self.request.quiet)
        stopped: KeyboardInterrupt | None = None
        with Interrupt() as interrupt:
            try:

                def progress(done: int, total: int) -> None:
                    prefill.update(done, total)
                    interrupt.check()

                self.sampler.reset()
                for token in ids:
                    self.sampler.accept(token)
                logits = self.session.prefill(ids, progress)
                prefill.end()
                interrupt.patience = 2
                if self.prompt_cache is not None and self.prompt_cache.is_outgrown_by(ids):
                    self._tell_of_replacing()
                    self._save()
                if heading and stream:
                    sys.stdout.write(heading)
                for piece in generation.pieces(logits):
                    show(piece)
                    interrupt.check()
                interrupt.check()
                self.finish = generation.finish or "eog"
            except KeyboardInterrupt as error:
                prefill.end()
                show(generation.rest())
                self.finish, stopped = "interrupt", error
            if self._keeps_answers and self.prompt_cache is not None and not self.prompt_cache.names_pending:
                generation.complete()
        if stream:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if self.finish == "context":
            say(f"stopped: the context of {self.session.n_ctx:,} tokens is full; {more_context(self.session)}")
        if isinstance(stopped, Terminated):
            raise stopped
        return "".join(shown)

    def close(self) -> None:
        """The closing report."""
        if not self.session.tokens:
            return
        if self._keeps_answers:
            with Interrupt():
                self._save()
        if not self.finish or not self.request.reports:
            return
        greedy = self.request.sampling.temp <= 0 or self.finish == "kept"
        for line in report.lines(self.session.report(), self.session.timing, self.finish, self.sampler.seed, greedy):
            say(line)
        n_kernels, seconds = self.session.kernels_compiled
        if self.request.verbose and n_kernels:
            say(f"kernels: {n_kernels} compiled, {seconds:.1f} s of waiting; they are kept for the next run")
