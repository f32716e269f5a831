"""What `tqgguf run` is asked to do: the command line, parsed, checked and typed, before any file is opened.

Nothing here knows typer, and nothing reads files: `prompts` turns the names of files into text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tqgguf.cli.flag_table import ranges_of
from tqgguf.cli.other_flags import BUILT_IN_TEMPLATES
from tqgguf.cli.ranges import check_ranges
from tqgguf.formats.blocks.cache_spec import CacheSpec
from tqgguf.formats.errors import Problems, RequestError
from tqgguf.formats.wording import shown
from tqgguf.text.grid import DEFAULT_CHUNK
from tqgguf.text.sampling_params import SamplingParams

Purpose = Literal["answer", "keep", "ask"]


@dataclass(frozen=True)
class RunRequest:
    """One call of `tqgguf run`. Names of files are as the user wrote them; "-" is standard input.

    Raises RequestError for a number out of its range, an unknown cache type, a quantised V without flash attention, and
    a chat template given by name.
    """

    model: str | None = None
    """A GGUF file, any shard of a split one, or an MLX model folder. None: the embedded default model."""

    prompt: str | None = None
    """The text after -p, escapes not yet processed. None or "": none given."""
    prompt_file: str | None = None
    """-f: a text file; one newline at its end does not count."""
    binary_file: str | None = None
    """-bf: likewise, every byte counts. At most one of the three is set."""
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    escape: bool = True
    r"""Process \n \r \t \' \" \\ \xHH in the prompt (from a file as well, as in llama.cpp), in reverse prompts and in
    chat input; not in the system prompt."""
    display_prompt: bool | None = None
    """Print the prompt before the answer. None: only where no chat template is applied."""

    conversation: bool | None = None
    """True: chat, and go on after the first answer. False: continue the text, no template. None: answer the prompt
    once, in the chat template if the model has one; chat if there is no prompt."""
    single_turn: bool = False
    """End after one answer, whatever `conversation` says."""
    multiline_input: bool = False
    """A chat message ends at a line that ends in a backslash; else a backslash at the end of a line continues it."""
    reverse_prompts: tuple[str, ...] = ()
    """Strings at which an answer ends; escapes not yet processed."""
    chat_template: str | None = None
    """Jinja source that replaces the model's template."""
    chat_template_file: str | None = None
    reasoning: bool | None = None
    """Given to the chat template as `enable_thinking`. None: not given."""

    n_predict: int = -1
    """Most tokens to generate per answer. -1: until the model ends it. -2: until the context is full."""
    n_ctx: int = 0
    """Tokens of context. 0: as many as the model was trained for."""
    n_batch: int = 2048
    """Most prompt tokens handed over at a time; an upper bound on `n_ubatch`."""
    n_ubatch: int = DEFAULT_CHUNK
    """Prompt tokens evaluated at a time, not yet rounded up to whole pages."""
    rope_freq_base: float = 0.0
    """RoPE's base frequency. 0: the model's own."""
    rope_freq_scale: float = 0.0
    """Factor on RoPE's frequencies, 1 / N to stretch positions N times. 0: the model's own."""
    threads: int = -1
    """CPU threads. 0 or less: all cores."""

    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: Literal["on", "off", "auto"] = "auto"
    """Changes nothing but this: "off" refuses a quantised V, as llama.cpp does."""
    exact_first: int | None = None
    """First tokens whose K and V stay f16, 0 to 128. None: what the cache types ask for."""
    balance: str | None = None
    """Balance of K: off, page or full. None: what its type asks for."""
    calibration: str = "auto"
    """A sidecar with K's channel scale; auto: look for one, off: take it from page 0 of the prompt."""
    purpose: Purpose = "answer"
    """answer: the prompt. keep: evaluate it as a document into a new prompt cache, and generate nothing. ask: it is a
    question about the document in the prompt cache."""
    prompt_cache: str | None = None
    """A file that keeps the evaluated prompt for the next run."""
    prompt_cache_all: bool = False
    """Keep in it what is generated too."""
    prompt_cache_ro: bool = False
    """Take it up, and never write it."""
    prompt_cache_profile: str | None = None
    """Whose llama.cpp wrote it, a name in `llama.profiles`. None: what the file says."""
    kv_workspace: int | None = None
    """On a GPU, MiB that decoded pages of a prompt's step may take at a time. None: the backend's."""
    kv_kernel_rows: int | None = None
    """On a GPU, the rows of a step up to which attention reads blocks without decoding them first."""
    strict_kv: bool = False
    """Fail instead of decoding blocks for an attention that cannot read them."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    """Ban the tokens that end generation: `sampling.banning(...)` with the model's."""
    given: frozenset[str] = frozenset()
    """First long spellings of all flags that were given, for settings whose default a model may state itself."""

    json_output: bool = False
    """stdout is one JSON object with the text and the figures."""
    perf: bool = True
    """Report figures on stderr: at the end, and in a chat after each answer."""
    quiet: bool = False
    """Neither that, nor progress, nor notices of flags without effect."""
    verbose: bool = False
    debug: bool = False
    """Let exceptions through with their tracebacks."""
    notices: tuple[str, ...] = ()
    """What to tell the user on stderr before anything else, one line each."""

    @property
    def reports(self) -> bool:
        """Whether figures are reported on stderr."""
        return self.perf and not self.quiet

    @property
    def cache(self) -> CacheSpec:
        """Types, exact prefix and balance together."""
        return CacheSpec(self.type_k, self.type_v, self.exact_first, self.balance)

    @property
    def given_cache(self) -> Mapping[str, bool]:
        """For each field of `cache`, whether the user set it."""
        types = {f"type_{side}": self.given & {f"--cache-type-{side}", "--cache-preset"} for side in ("k", "v")}
        return {field: bool(flags) for field, flags in types.items()} | {
            "n_prefix": self.exact_first is not None,
            "balance": self.balance is not None,
        }

    @property
    def cache_notices(self) -> Iterator[str]:
        """Of flags that the cache types leave nothing to do for."""
        if self.balance not in (None, "off") and self.cache.has_float_k:
            yield f"--kv-balance {self.balance}: no effect, K is of a float type in every layer"
        if self.exact_first and not self.cache.has_blocks:
            yield f"--cache-exact-first {self.exact_first}: no effect, K and V are of float types in every layer"
        if self.prompt_cache is None and (self.prompt_cache_all or self.prompt_cache_ro):
            yield "--prompt-cache-all, --prompt-cache-ro: no effect without --prompt-cache FILE"
        if self.prompt_cache is None and self.prompt_cache_profile is not None:
            yield "--prompt-cache-profile: no effect without --prompt-cache FILE"

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.noting():
            check_ranges(self, ranges_of("run"))
        for flag, spec in (
            ("-ctk", CacheSpec(type_k=self.type_k)),
            ("-ctv", CacheSpec(type_v=self.type_v)),
            ("--kv-balance", CacheSpec(balance=self.balance)),
        ):
            with problems.noting(flag):
                spec.check()
        with problems.noting():
            self._check_flash_attention()
        with problems.noting():
            self._check_template()
        problems.check()

    def _check_flash_attention(self) -> None:
        if self.flash_attention == "off" and not CacheSpec(type_v=self.type_v).has_float_v:
            raise RequestError(
                f"-ctv {self.type_v} with -fa off: a quantised V cache needs flash attention; "
                "leave -fa off away, or take f16, bf16 or f32 for V"
            )

    def _check_template(self) -> None:
        name = self.chat_template
        if name in BUILT_IN_TEMPLATES:
            raise RequestError(
                f"--chat-template {name}: llama.cpp's built-in templates are not here; leave the flag away to take the "
                "model's own, or give a file with Jinja source after --chat-template-file"
            )
        if name and "{" not in name:
            raise RequestError(
                f"--chat-template: expected Jinja source, found {shown(name)}; a file with it goes after "
                "--chat-template-file"
            )
