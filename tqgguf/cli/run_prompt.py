"""From the texts of a run to token ids: a chat's messages, a text to continue, a document, a question about one."""

from __future__ import annotations

from tqgguf.cli.progress import say
from tqgguf.cli.prompts import Texts, no_prompt
from tqgguf.cli.run_request import RunRequest
from tqgguf.formats.errors import RequestError
from tqgguf.formats.wording import readable
from tqgguf.runtime.generation.session_opening import SessionOpening
from tqgguf.text.chat import ChatTemplate
from tqgguf.text.conversation import Conversation
from tqgguf.text.open_turn import OpenTurn, closing_notice
from tqgguf.text.prompt_size import check_prompt, check_text


class RunPrompt:
    """What the model is told. RequestError: there is no prompt where one is needed, a template fails, the prompt is
    longer than the context.

    conversation: the chat to be held, or None where the prompt is continued as it is. first: token ids of what is
    evaluated first, or None where a chat's first message is yet to come. going_on_from: tokens of the prompt cache that
    are gone on with as they are.
    """

    def __init__(self, request: RunRequest, texts: Texts, opening: SessionOpening) -> None:
        self.request, self.texts = request, texts
        self.tokenizer, self.n_ctx, self.prompt_cache = opening.tokenizer, opening.n_ctx, opening.prompt_cache
        self._turn_notice: str | None = None
        held = self._held()
        self.conversation = self._conversation(held)
        self.first = self.encode(texts.prompt) if texts.prompt is not None else None
        self.going_on_from = held if self.conversation is None else []
        if held:
            self._tell_of_going_on(held)
            self.first = self.going_on_from or None
        if self.first is not None:
            check_prompt(len(self.first), self.n_ctx)

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

    def encode(self, text: str) -> list[int]:
        """Token ids up to and with a message, a document or a question. RequestError: it is too long, or the template
        fails.
        """
        if self.conversation is None or self.request.purpose != "answer":
            check_text(text, self.tokenizer, self.n_ctx)
        if self.request.purpose != "answer":
            return self._of_a_document(text)
        if self.conversation is not None:
            return self.conversation.add(text)
        return self.tokenizer.encode(text)

    def _of_a_document(self, text: str) -> list[int]:
        """A document that is kept, or a question about one."""
        template = None if self.conversation is None else self.conversation.template
        turn = OpenTurn(template, self.tokenizer, self.texts.system_prompt)
        if self.request.purpose == "keep":
            return turn.document(text)
        assert self.prompt_cache is not None
        held = self.prompt_cache.known_tokens
        notice = closing_notice(turn, held)
        if notice not in (None, self._turn_notice):
            self._turn_notice = notice
            say(f"{readable(self.prompt_cache.path)}: {notice}")
        return turn.question(held, text)
