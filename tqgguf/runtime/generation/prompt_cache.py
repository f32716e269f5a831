"""A file that holds a prompt cache between runs: what it gives a session, and when it is written again.

The meaning is llama.cpp's: a file that is not there or empty is made; one that is there is taken up as far as a prompt
agrees with it, and written again when the prompt went beyond it. Everything is checked before a model is loaded. Two
runs that write one file do not disturb each other: the last one wins, whole. A llama.cpp session stays one. Knows no
flags.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tqgguf.formats.atomic import check_target
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.carriers.recode import recode_snapshot
from tqgguf.formats.carriers.table import Foreign, carrier_kind, check_replaceable, open_carrier, write_carrier
from tqgguf.formats.errors import RequestError, TqggufError, naming
from tqgguf.formats.file_kind import STATE_KINDS, FileKind
from tqgguf.formats.llama.to_snapshot import ImportOptions, lasting_origin
from tqgguf.formats.models.outline import ModelOutline, outline_of_gguf
from tqgguf.formats.snapshots.fit import check_cache, check_model, spec_of
from tqgguf.formats.snapshots.snapshot import Snapshot
from tqgguf.formats.wording import readable
from tqgguf.runtime.generation.first_token import check_first_token
from tqgguf.runtime.generation.session import Session
from tqgguf.runtime.models.load import OpenModel
from tqgguf.runtime.models.mlx_folder import OpenFolder


@dataclass
class PromptCache:
    """path: the file. snapshot: what it held when it was opened (None: nothing). kind: the format in which it is
    written. reads_only: it is never written. keeps_all: what a session generated is kept too. notices: what to tell the
    user, one line each.
    """

    path: str
    snapshot: Snapshot | None = None
    kind: FileKind = FileKind.SNAPSHOT
    reads_only: bool = False
    keeps_all: bool = False
    notices: tuple[str, ...] = ()
    replaces: bool = False
    """Whether it is made in place of one that holds something."""

    @property
    def tokens(self) -> list[int]:
        """Tokens that the file held rows of."""
        return [] if self.snapshot is None else self.snapshot.tokens[: self.snapshot.n_cells].tolist()

    @property
    def known_tokens(self) -> list[int]:
        """All tokens of the file, to go on from: those that have rows and those that wait for theirs. None where the
        file does not say one of them.
        """
        tokens = [] if self.snapshot is None else self.snapshot.tokens.tolist()
        return tokens if min(tokens, default=-1) >= 0 else []

    @property
    def n_generated(self) -> int:
        """How many tokens at the file's end were not evaluated as prompt."""
        if self.snapshot is None:
            return 0
        return len(self.snapshot.tokens) - max((end for _, end in self.snapshot.prompt_ranges), default=0)

    @property
    def names_pending(self) -> bool:
        """Whether the file's format can name tokens that have no rows yet, without misleading its readers."""
        return self.kind is FileKind.SNAPSHOT

    @property
    def chunk(self) -> int | None:
        """The grid on which the file's prompt was evaluated, if it says."""
        return (self.snapshot.chunk or None) if self.snapshot is not None else None

    def give_to(self, session: Session) -> None:
        """Begin a new session with what the file holds. Errors as `Session.adopt`, with the file's name; RequestError
        also where another program's file holds rows that the model does not compute.
        """
        if self.snapshot is None:
            return
        if self.snapshot.origin or self.kind is not FileKind.SNAPSHOT:
            check_first_token(readable(self.path), self.snapshot, session.loaded)
        with naming(readable(self.path)):
            session.adopt(self.snapshot)

    def is_outgrown_by(self, ids: Sequence[int]) -> bool:
        """Whether a prompt that was evaluated is to be kept: it is no beginning of what the file holds."""
        return not self.reads_only and self.tokens[: len(ids)] != list(ids)

    def is_continued_by(self, ids: Sequence[int]) -> bool:
        """Whether tokens begin with all that the file holds."""
        return list(ids[: len(self.tokens)]) == self.tokens

    def save(self, session: Session) -> None:
        """Write what the session holds into the file; what it held before stays until that is done. Another program's
        file keeps its version, its profile and its layout.

        TqggufError: it cannot be written, or the session was broken off within an evaluation.
        """
        origin = {} if self.snapshot is None else lasting_origin(self.snapshot.origin)
        write_carrier(self.path, replace(session.snapshot(), origin=origin), self.kind)


def open_prompt_cache(
    path: str | os.PathLike[str],
    opened: OpenModel | OpenFolder,
    *,
    reads_only: bool = False,
    keeps_all: bool = False,
    profile: str | None = None,
) -> PromptCache:
    """Open and check a prompt cache for a model whose header is read. It may be missing or empty. profile: whose
    llama.cpp wrote it, where the file does not say.

    FormatError: it is damaged. RequestError: it is another model's, or it cannot be written and is not only read.
    TqggufError: it cannot be read.
    """
    name = os.fspath(path)
    if not reads_only:
        check_target(name)
    made = PromptCache(name, reads_only=reads_only, keeps_all=keeps_all)
    if _is_there(name):
        made.kind = carrier_kind(name)
        snapshot = open_carrier(name, Foreign(_outline(opened), llama=ImportOptions(profile)))
        if made.kind in STATE_KINDS:
            snapshot = _as_native(made, snapshot)
        config = opened.config
        shapes = config.layer_shapes()
        check_model(readable(name), snapshot, config.architecture, opened.fingerprint, shapes, config.vocab_size)
        made.snapshot = snapshot
    return made


def new_prompt_cache(path: str) -> PromptCache:
    """A prompt cache to be made, in place of one that may be there. RequestError: it cannot be written there, or what
    is there is no prompt cache.
    """
    check_target(path)
    check_replaceable(path)
    return PromptCache(path, replaces=_is_there(path))


def _as_native(made: PromptCache, snapshot: Snapshot) -> Snapshot:
    """A snapshot that a cache here can hold: sides in blocks of another engine's coding become f16, which loses nothing
    that blocks have. Their file is then only read, as they would have to be quantised again for it.
    """
    foreign = [side for side in SIDES if not all(each.side(side).codec.is_native(side) for each in snapshot.layers)]
    if not foreign:
        return snapshot
    if not made.reads_only:
        made.notices = (
            f"{readable(made.path)}: holds blocks as another build of llama.cpp codes them; they are decoded to f16 "
            "for this run, and the file is not written",
        )
    made.reads_only = True
    types = {f"type_{side}": "f16" for side in foreign}
    return recode_snapshot(snapshot, **types, requantise=True)


def _is_there(name: str) -> bool:
    """Whether a file holds anything. TqggufError: that cannot be told, as its folder may not be searched."""
    try:
        found = os.stat(name)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise TqggufError(f"{readable(name)}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    return not stat.S_ISREG(found.st_mode) or found.st_size > 0


def _outline(opened: OpenModel | OpenFolder) -> ModelOutline | None:
    """What foreign files need to know of the model; of an MLX folder, whose keys may lie in another order, nothing."""
    return outline_of_gguf(opened.file) if isinstance(opened, OpenModel) else None


def agreed_spec(
    cache: PromptCache, asked: CacheSpec, given: Mapping[str, bool], n_layers: int, n_ctx: int
) -> CacheSpec:
    """The cache to make: what was asked for, and where nothing was, what the file has.

    given: for each field of `asked`, whether the user set it. RequestError: the file holds something else, or more than
    the context takes.
    """
    if cache.snapshot is None or not cache.snapshot.layers:
        return asked
    own = spec_of(cache.snapshot, n_layers)
    unset = {field: getattr(own, field) for field, was_given in given.items() if not was_given}
    spec = replace(asked, **unset)
    check_cache(readable(cache.path), cache.snapshot, spec, n_layers, n_ctx)
    return spec


def scales_differ(cache: PromptCache, scales: Mapping[int, object] | None) -> int | None:
    """The first layer whose channel scale of K in the file is another than these; None if none is."""
    for layer in () if cache.snapshot is None else cache.snapshot.layers:
        if layer.balance == "full" and layer.k.channel_scale is not None:
            wanted = None if scales is None else scales.get(layer.layer)
            if wanted is None or not np.array_equal(np.asarray(wanted), layer.k.channel_scale):
                return layer.layer
    return None


def check_scales(cache: PromptCache, scales: Mapping[int, object] | None, asked_for: str) -> None:
    """RequestError if channel scales that were asked for by name are not those of the file. asked_for: their file."""
    layer = scales_differ(cache, scales)
    if layer is not None:
        raise RequestError(
            f"{readable(cache.path)}: layer {layer}: channel scale of K: expected that of {asked_for}, found another; "
            "leave --kv-calibration out to take the file's"
        )
