"""From what is asked to a session: a model by its path, a cache, a calibration and a prompt cache become one.

    notices: list[str] = []
    opening = open_session(SessionAsk(ModelAsk("model.gguf"), CacheSpec("turbo4", "turbo3")), notices)
    session = opening.session(opening.load())

There are two stages. `open_session` reads headers and the prompt cache, and refuses whatever can be refused;
`SessionOpening.load` reads the weights, after which any number of sessions can begin. Nothing is printed: what a user
should know is a notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.models.config import resolve_context
from tqgguf.formats.wording import readable
from tqgguf.runtime.attention.backend import Backend
from tqgguf.runtime.generation.prompt_cache import (
    PromptCache,
    agreed_spec,
    check_scales,
    new_prompt_cache,
    open_prompt_cache,
    scales_differ,
)
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.kv.settings import check_cache_types, types_to_keep
from tqgguf.runtime.models.calibration_choice import AUTO, OFF, ChosenCalibration
from tqgguf.runtime.models.load import OpenModel
from tqgguf.runtime.models.loaded_model import LoadedModel, Progress
from tqgguf.runtime.models.mlx_folder import OpenFolder
from tqgguf.runtime.models.model_opening import ModelAsk, ModelOpening, open_asked
from tqgguf.text.grid import AskedGrid
from tqgguf.text.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class PromptCacheAsk:
    """path: the file. use: it is resumed, or made where there is none; it is made anew; it is asked about, so that it
    must hold something. reads_only, keeps_all, profile: as `open_prompt_cache`.
    """

    path: str
    use: Literal["resume", "make", "ask"] = "resume"
    reads_only: bool = False
    keeps_all: bool = False
    profile: str | None = None


@dataclass(frozen=True)
class SessionAsk:
    """What a session is to be. n_ctx: tokens of context, 0: as many as the model was trained for. strict: attention
    that cannot read blocks is an error.
    """

    model: ModelAsk = field(default_factory=ModelAsk)
    cache: CacheSpec = field(default_factory=CacheSpec)
    is_given: Mapping[str, bool] = field(default_factory=dict)
    """For fields of `cache`, whether somebody chose them. Where nobody did, a prompt cache's own are taken."""
    n_ctx: int = 0
    grid: AskedGrid = field(default_factory=AskedGrid)
    prompt_cache: PromptCacheAsk | None = None
    strict: bool = False
    notices: Sequence[str] = ()
    """What is to be noticed of the request itself, once the types of the cache are settled."""


@dataclass(frozen=True)
class SessionOpening:
    """A session that nothing stands in the way of, before any weight is read. spec: the cache that it will have.
    chunk: its grid. types_were_chosen: nobody chose the types of `spec`, and they are those of `types_to_keep`.
    """

    ask: SessionAsk
    model: ModelOpening
    n_ctx: int
    spec: CacheSpec
    types_were_chosen: bool
    calibration: ChosenCalibration
    chunk: int
    prompt_cache: PromptCache | None

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.model.opened.tokenizer

    def load(self, progress: Progress | None = None) -> LoadedModel:
        """Read the weights. Errors: as `ModelOpening.load`."""
        return self.model.load(progress)

    def session(self, loaded: LoadedModel, backend: Backend | None = None) -> Session:
        """A new session that begins with what the prompt cache holds. backend: instead of `default_backend`'s.

        FormatError, RequestError: as `PromptCache.give_to`.
        """
        session = Session(
            loaded,
            self.spec,
            n_ctx=self.n_ctx,
            chunk=self.chunk,
            channel_scales=self.calibration.channel_scales,
            strict=self.ask.strict,
            keeps_pages=self.prompt_cache is not None,
            backend=backend,
        )
        if self.prompt_cache is not None:
            self.prompt_cache.give_to(session)
        return session


def open_session(ask: SessionAsk, notices: list[str]) -> SessionOpening:
    """Open a model for a session and check from headers and the prompt cache alone that there can be one.

    notices: lines for the user are added to it as they come up, so that those before a refusal are there too.
    FormatError, TqggufError: a file is damaged, or not there. RequestError: the model is not served, the context or the
    types are none that it can have, or the calibration or the prompt cache belong to another model or cache.
    """
    model = open_asked(ask.model)
    opened = model.opened
    n_ctx = resolve_context(opened.config, ask.n_ctx)
    shapes = opened.config.layer_shapes()
    prompt_cache = None if ask.prompt_cache is None else _open_prompt_cache(ask.prompt_cache, opened, notices)
    spec = ask.cache
    if prompt_cache is not None:
        spec = agreed_spec(prompt_cache, spec, ask.is_given, opened.config.n_layers, n_ctx)
    is_made = ask.prompt_cache is not None and ask.prompt_cache.use == "make"
    chooses = is_made and not (ask.is_given.get("type_k") or ask.is_given.get("type_v"))
    if chooses:
        spec = types_to_keep(shapes, spec)
    check_cache_types(shapes, spec)
    notices += ask.notices
    calibration = model.calibrate([spec])
    notices += calibration.notices
    if prompt_cache is not None:
        notices += _scale_notices(prompt_cache, calibration, ask.model.calibration)
    notices += ask.grid.notices
    chunk = ask.grid.chunk
    kept = None if prompt_cache is None else prompt_cache.chunk
    if kept is not None and kept != chunk:
        chunk = kept
        if ask.grid.is_named:
            wanted = ask.grid.n_ubatch
            notices.append(
                f"-ub {wanted}: the prompt cache was evaluated in pieces of {kept} tokens, so {kept} is used"
            )
    return SessionOpening(ask, model, n_ctx, spec, chooses, calibration, chunk, prompt_cache)


def _open_prompt_cache(ask: PromptCacheAsk, opened: OpenModel | OpenFolder, notices: list[str]) -> PromptCache:
    if ask.use == "make":
        found = new_prompt_cache(ask.path)
    else:
        found = open_prompt_cache(
            ask.path, opened, reads_only=ask.reads_only, keeps_all=ask.keeps_all, profile=ask.profile
        )
    notices += found.notices
    if ask.use == "ask" and not found.known_tokens:
        lacks = "it does not say its tokens" if found.tokens else "found none"
        raise RequestError(f"{readable(ask.path)}: expected a prompt cache to go on from, {lacks}")
    return found


def _scale_notices(cache: PromptCache, chosen: ChosenCalibration, wanted: str) -> list[str]:
    """A prompt cache's channel scales count: others are refused if they were named, and left aside if found."""
    if wanted not in (AUTO, OFF):
        check_scales(cache, chosen.channel_scales, wanted)
    elif chosen.path is not None and scales_differ(cache, chosen.channel_scales) is not None:
        return [f"{chosen.path}: left aside, the prompt cache has a channel scale of its own"]
    return []
