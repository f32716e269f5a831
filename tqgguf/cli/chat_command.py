"""A chat: one answer after the other until the input ends, and what is said when the context is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tqgguf.cli import report
from tqgguf.cli.progress import say
from tqgguf.formats.errors import RequestError
from tqgguf.runtime.generation.session import Session
from tqgguf.text.conversation import Conversation
from tqgguf.text.prompt_size import ContextFullError


def chat(
    conversation: Conversation | None,
    session: Session,
    turns: Iterable[list[int] | str],
    encode: Callable[[str], list[int]],
    answer: Callable[[list[int]], str],
    *,
    on_terminal: bool,
    reports: bool,
) -> int:
    """Answer each turn (a message, or one that is in token ids already); the exit status.

    conversation: what messages and answers grow; None where each message stands alone. encode: of a message.
    A message that cannot be answered is told and left out of the chat. The status says so at the end, unless somebody
    sits before a terminal and reads it. The chat ends where no message has room any more.
    """
    status = 0
    for turn in turns:
        before = replace(session.timing)
        try:
            text = answer(encode(turn) if isinstance(turn, str) else turn)
            if conversation is not None:
                conversation.answered(text)
        except RequestError as error:
            if conversation is not None:
                conversation.take_back()
            say(_why_not_sent(error, session))
            status = 0 if on_terminal else error.exit_status
            if (conversation is not None and session.room < 1) or not (session.tokens or on_terminal):
                return error.exit_status
            continue
        if reports:
            say(report.turn_line(session.timing.since(before), len(session.tokens), session.n_ctx))
        if on_terminal and session.room < 1 and conversation is not None:
            say(f"the chat ends here, as no message has room in the context: {more_context(session)}, or begin anew")
            break
    return status


def more_context(session: Session) -> str:
    """How to get a larger context, in the words of a command line."""
    most = session.loaded.config.context_length
    if session.n_ctx >= most:
        return f"the model takes no more than {most:,} tokens"
    return f"raise -c (the model takes up to {most:,} tokens)"


def _why_not_sent(error: RequestError, session: Session) -> str:
    if not isinstance(error, ContextFullError):
        return f"{error}; the message was not sent"
    held = len(session.tokens)
    return (
        f"the message was not sent: with it the chat has {error.n_tokens:,} tokens or more ({held:,} before it), and "
        f"the context takes {session.n_ctx:,}; {more_context(session)}, send a shorter message, or begin anew"
    )
