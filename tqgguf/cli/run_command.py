"""What `tqgguf run` does with a request: read the texts, load the model, answer, report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tqgguf.cli import report
from tqgguf.cli.about import about_model, about_program
from tqgguf.cli.chat_command import chat, more_context
from tqgguf.cli.error_object import own_error
from tqgguf.cli.exit_status import INTERRUPTED
from tqgguf.cli.interrupt import Interrupt, Terminated
from tqgguf.cli.json_text import json_text
from tqgguf.cli.measuring import chunk_of, open_requested
from tqgguf.cli.product import name_product
from tqgguf.cli.progress import ProgressLine, say
from tqgguf.cli.prompts import Texts, chat_turns, no_prompt, read_texts
from tqgguf.cli.run_request import RunRequest
from tqgguf.cli.terminal import Terminal
from tqgguf.formats.atomic import check_target
from tqgguf.formats.carriers.table import check_replaceable
from tqgguf.formats.errors import RequestError, TqggufError
from tqgguf.formats.models.config import resolve_context
from tqgguf.formats.templates.process import PROCESS
from tqgguf.formats.wording import readable, shown
from tqgguf.runtime import backends
from tqgguf.runtime.generation.generate import Generation
from tqgguf.runtime.generation.prompt_cache import (
    PromptCache,
    agreed_spec,
    check_scales,
    open_prompt_cache,
    scales_differ,
)
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.kv.settings import check_cache_types, types_to_keep
from tqgguf.runtime.models.calibration_choice import AUTO, OFF, ChosenCalibration, choose_calibration
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.conversation import Conversation
from tqgguf.text.dry import breaker_tokens
from tqgguf.text.open_turn import OpenTurn, closing_notice
from tqgguf.text.prompt_size import check_prompt, check_text
from tqgguf.text.sampling import Sampler


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
            elif texts.chats_on and run_.conversation is not None:
                status = run_.chat(terminal)
            else:
                status = run_.answer_once()
        finally:
            run_.close()
        if request.json_output and request.purpose != "keep":
            run_.print_json()
        return status or run_.save_status


_OF_A_GPU = frozenset({"--kv-workspace", "--kv-kernel-rows"})


class _Run:
    def __init__(self, request: RunRequest, texts: Texts) -> None:
        self.request, self.texts = request, texts
        self.turn_notice: str | None = None
        for notice in () if request.quiet else request.notices + texts.notices:
            say(notice)
        if backends.gpu_family() is None:
            for flag in sorted(_OF_A_GPU & request.given):
                say(f"{flag}: no effect here, MLX has no GPU")
        if request.conversation is not False:
            PROCESS.start()  # it gets ready while the model is opened
        opened = open_requested(request)
        config = opened.config
        self.n_ctx = n_ctx = resolve_context(config, request.n_ctx)
        shapes = config.layer_shapes()
        spec = request.cache
        self.opened = opened
        self.prompt_cache = self._open_prompt_cache()
        if self.prompt_cache is not None:
            spec = agreed_spec(self.prompt_cache, spec, request.given_cache, config.n_layers, n_ctx)
        chooses = request.purpose == "keep" and not any(request.given_cache[side] for side in ("type_k", "type_v"))
        if chooses:
            spec = types_to_keep(shapes, spec)
        check_cache_types(shapes, spec)
        for notice in () if request.quiet else request.cache_notices:
            say(notice)
        chosen = choose_calibration(opened, request.calibration, spec.has_channel_scale(len(shapes)))
        for notice in chosen.notices:
            say(notice)
        self._compare_scales(chosen)
        chunk = self._chunk()
        self.tokenizer = opened.tokenizer
        for warning in self.tokenizer.warnings:
            say(warning)
        held = self._held()
        self.conversation = self._conversation(held)
        self.first = self._encode(texts.prompt) if texts.prompt is not None else None
        self.going_on_from = held if self.conversation is None else []
        """Tokens of the prompt cache that are gone on with as they are."""
        if held:
            self._tell_of_going_on(held)
            self.first = self.going_on_from or None
        if self.first is not None:
            check_prompt(len(self.first), n_ctx)
        if chooses and not request.quiet:
            say(f"the document is kept in {spec.type_k}/{spec.type_v}; -ctk, -ctv and --cache-preset choose others")
        if request.threads > 0:
            backends.set_threads(request.threads)
        sampling = request.sampling
        if request.ignore_eos:
            sampling = sampling.banning(self.tokenizer.end_of_generation)
        sampling.check_vocabulary(self.tokenizer.vocab_size)
        loading = ProgressLine("loading", "bytes", request.quiet)
        loaded = opened.load(loading.update)
        loading.end()
        if request.verbose:
            say(f"model: {opened.path}: {config.architecture} {shown(config.name)}, {config.n_layers} layers")
            say(f"device: {backends.describe()}")
            if chosen.path is not None:
                say(f"channel scale of K: {chosen.path}")
        self.session = Session(
            loaded,
            spec,
            n_ctx=n_ctx,
            chunk=chunk,
            channel_scales=chosen.channel_scales,
            strict=request.strict_kv,
            keeps_pages=self.prompt_cache is not None,
            backend=backends.default_backend(
                workspace_bytes=None if request.kv_workspace is None else request.kv_workspace << 20,
                most_rows=request.kv_kernel_rows,
            ),
        )
        if self.prompt_cache is not None:
            self.prompt_cache.give_to(self.session)
        self.save_status = 0
        """What a failure to write the prompt cache makes of the exit status."""
        self.save_failure: TqggufError | None = None
        breakers = None
        if sampling.looks_for_repetitions:
            breakers = breaker_tokens(sampling.dry_sequence_breakers, self.tokenizer)
        self.sampler = Sampler(sampling, breakers)
        self.finish = ""
        """How the last answer ended, one of `report.ENDINGS`; "": there is none."""
        self.text = ""

    def _open_prompt_cache(self) -> PromptCache | None:
        request = self.request
        if request.prompt_cache is None:
            return None
        if request.purpose == "keep":
            check_target(request.prompt_cache)
            check_replaceable(request.prompt_cache)
            return PromptCache(request.prompt_cache)
        reads_only, keeps_all = request.prompt_cache_ro, request.prompt_cache_all
        found = open_prompt_cache(
            request.prompt_cache,
            self.opened,
            reads_only=reads_only,
            keeps_all=keeps_all,
            profile=request.prompt_cache_profile,
        )
        for notice in found.notices:
            say(notice)
        if request.purpose == "ask" and not found.known_tokens:
            lacks = "it does not say its tokens" if found.tokens else "found none"
            raise RequestError(f"{readable(request.prompt_cache)}: expected a prompt cache to go on from, {lacks}")
        return found

    def _compare_scales(self, chosen: ChosenCalibration) -> None:
        """A prompt cache's channel scales count: others are refused if they were named, and left aside if found."""
        if self.prompt_cache is None:
            return
        if self.request.calibration not in (AUTO, OFF):
            check_scales(self.prompt_cache, chosen.channel_scales, self.request.calibration)
        elif chosen.path is not None and scales_differ(self.prompt_cache, chosen.channel_scales) is not None:
            say(f"{chosen.path}: left aside, the prompt cache has a channel scale of its own")

    def _chunk(self) -> int:
        """The grid of the prompt: that of the prompt cache, or -ub in whole pages."""
        request = self.request
        chunk, kept = chunk_of(request), None if self.prompt_cache is None else self.prompt_cache.chunk
        if kept is not None and kept != chunk and "--ubatch-size" in request.given:
            say(f"-ub {request.n_ubatch}: the prompt cache was evaluated in pieces of {kept} tokens, so {kept} is used")
        return kept or chunk

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

    def _held(self) -> list[int]:
        """Tokens of the prompt cache that a run without a prompt goes on from."""
        if self.prompt_cache is None or self.texts.prompt is not None or self.request.purpose != "answer":
            return []
        return self.prompt_cache.known_tokens

    def _tell_of_going_on(self, held: list[int]) -> None:
        assert self.prompt_cache is not None
        what = "the text" if self.conversation is None else "the chat"
        say(f"{readable(self.prompt_cache.path)}: going on with {what} of its {len(held):,} tokens")
        if self.texts.system_prompt:
            say(f"the system prompt has no effect: {what} has begun")

    def _conversation(self, held: list[int]) -> Conversation | None:
        """The chat to be held, or None where the prompt is continued as it is."""
        if self.texts.goes_on:
            if not held:
                raise no_prompt(self.request)
            return None
        # llama.cpp's default: a template that can think is told to
        thinks = self.request.reasoning is not False
        template = ChatTemplate.of(self.tokenizer, self.texts.chat_template, enable_thinking=thinks)
        if self.request.conversation is False or (self.request.conversation is None and not template.explicit):
            if self.texts.prompt is None and not held:
                raise RequestError("the model has no chat template: give a prompt to continue with -p or -f, or -cnv")
            return None
        conversation = Conversation(template, self.tokenizer, self.texts.system_prompt, n_ctx=self.n_ctx, held=held)
        conversation.check()
        if self.texts.chats_on and self.request.json_output:
            raise RequestError("--json holds one answer: give a prompt, without -cnv")
        return conversation

    def _encode(self, prompt: str) -> list[int]:
        if self.conversation is None or self.request.purpose != "answer":
            check_text(prompt, self.tokenizer, self.n_ctx)
        if self.request.purpose != "answer":
            template = None if self.conversation is None else self.conversation.template
            turn = OpenTurn(template, self.tokenizer, self.texts.system_prompt)
            if self.request.purpose == "keep":
                return turn.document(prompt)
            assert self.prompt_cache is not None
            held = self.prompt_cache.known_tokens
            notice = closing_notice(turn, held)
            if notice not in (None, self.turn_notice):
                self.turn_notice = notice
                say(f"{readable(self.prompt_cache.path)}: {notice}")
            return turn.question(held, prompt)
        if self.conversation is not None:
            return self.conversation.add(prompt)
        return self.tokenizer.encode(prompt)

    def keep_document(self) -> int:
        """Evaluate the prompt into the prompt cache; 130 if that was interrupted, and nothing was written."""
        assert self.first is not None and self.prompt_cache is not None
        prefill = ProgressLine("reading the document", "tokens", self.request.quiet)
        with Interrupt() as interrupt:

            def progress(done: int, total: int) -> None:
                prefill.update(done, total)
                interrupt.check()

            self.session.prefill(self.first, progress)
            prefill.end()
            self.prompt_cache.save(self.session)
        self.finish = "kept"
        name_product(self.prompt_cache.path)
        return 0

    def answer_once(self) -> int:
        """One answer to the prompt; 130 if it was interrupted."""
        assert self.first is not None
        shown = self.request.display_prompt
        if shown is None:
            shown = self.conversation is None and self.request.purpose == "answer"
        self.text = self._answer(self.first, (self.texts.prompt or "") if shown else "")
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
        assert self.conversation is not None
        return chat(
            self.conversation if self.request.purpose == "answer" else None,
            self.session,
            self._turns(terminal),
            self._encode,
            lambda ids: self._answer(ids, ""),
            on_terminal=terminal is not None,
            reports=self.request.reports,
        )

    def _turns(self, terminal: Terminal | None) -> Iterator[list[int] | str]:
        """The first message, which is encoded already, then the texts of others."""
        if self.first is not None:
            yield self.first
            if self.request.single_turn:
                return
        yield from chat_turns(self.request, sys.stdin.buffer, terminal)

    def _answer(self, ids: list[int], heading: str) -> str:
        """Evaluate and generate, streaming to stdout (unless it is for --json). The text without the heading."""
        stream = not self.request.json_output
        is_taken_up = self.prompt_cache is not None and ids == self.going_on_from
        generation = Generation(
            self.session,
            self.sampler,
            self.request.n_predict,
            self.texts.reverse_prompts,
            context=ids if self.conversation is None and not is_taken_up else (),
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
        if not hasattr(self, "session") or not self.session.tokens:
            return
        if self._keeps_answers:
            with Interrupt():
                self._save()
        if not self.finish or not self.request.reports:
            return
        greedy = self.request.sampling.temp <= 0 or self.finish == "kept"
        for line in report.lines(self.session.report(), self.session.timing, self.finish, self.sampler.seed, greedy):
            say(line)
