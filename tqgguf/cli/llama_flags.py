"""The table of flags: every flag of llama.cpp's llama-completion, and what becomes of it here.

One row per flag, with all its spellings. A flag is implemented (`run` declares it with typer), accepted (nobody misses
what it does: one line says why it has no effect), or refused (one line says why and what to do instead).
Read off common/arg.cpp of llama.cpp, August 2026 (as vendored by llama-cpp-python 0.3.36): the options whose examples
include COMPLETION or COMMON, plus spellings that it has dropped since and that scripts still hold.

Knows names, arities and reasons. What a value means is the matter of whoever implements the flag; reading an argument
vector by this table is `arguments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

from tqgguf.formats.blocks.cache_spec import PRESETS
from tqgguf.formats.errors import NO_DOWNLOAD

SWITCH = "on|off"
SWITCH_OR_AUTO = "on|off|auto"


class Fate(Enum):
    IMPLEMENTED = "implemented"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Flag:
    """One flag. `takes` holds a kind for each of its values: text, file (a name), integer, number,
    tokens (an integer, or one such as 8k), or words separated by |."""

    names: tuple[str, ...]
    negatives: tuple[str, ...]
    takes: tuple[str, ...]
    fate: Fate
    note: str = ""
    """Accepted: why it has no effect. Refused: why, and what to do instead. Implemented: empty."""
    env: str | None = None
    """The environment variable that stands for it where the command line does not name it."""
    sets: str = ""
    """Flags that set the same thing share this word; the last one given counts."""
    repeatable: bool = False
    """Every occurrence counts."""
    harmless: float | None = None
    """The value with which a refused flag asks for nothing."""
    ours: bool = False
    """Not a flag of llama.cpp."""

    @property
    def name(self) -> str:
        """The first long spelling."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def negative(self) -> str:
        """The first long spelling that switches it off."""
        return next(name for name in self.negatives if name.startswith("--"))

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.names + self.negatives

    @property
    def subject(self) -> str:
        return self.sets or self.name


def row(
    fate: Fate,
    note: str,
    spelled: str,
    takes: str = "",
    *,
    env: str = "",
    sets: str = "",
    repeatable: bool = False,
    harmless: float | None = None,
    ours: bool = False,
) -> Flag:
    """One flag. `spelled`: the names, then after a slash those that switch it off. `env`: without its LLAMA_ARG_."""
    names, _, negatives = spelled.partition(" / ")
    return Flag(
        names=tuple(names.split()),
        negatives=tuple(negatives.split()),
        takes=tuple(takes.split()),
        fate=fate,
        note=note,
        env=f"LLAMA_ARG_{env}" if env else None,
        sets=sets,
        repeatable=repeatable,
        harmless=harmless,
        ours=ours,
    )


_implemented = partial(row, Fate.IMPLEMENTED, "")
_accepted = partial(row, Fate.ACCEPTED)
_refused = partial(row, Fate.REFUSED)

# Accepted: why nothing changes.
_PLACEMENT = "MLX keeps the whole model and its cache on one device"
_CORES = "threads are neither pinned nor given a priority"
_LOADING = "how weights are read and placed is MLX's matter"
_MEMORY = "nothing is fitted to memory; -c is taken as it is given"
_MESSAGES = "messages are plain lines on stderr; 2>/dev/null silences them"
_NO_MIROSTAT = "mirostat is not supported, and off by default"
_AS_WRITTEN = "the answer is printed as the model writes it, thoughts included"
_KEPT = "the chat keeps each answer as it was written"
_NO_DRAFT = "there is no draft model"
_NO_DOWNLOADS = "tqgguf downloads nothing anyway"
# Refused: why, and what to do.
_GRAMMAR = "constrained output is not supported yet; ask for the format in the prompt"
_ROPE = "YaRN is not supported yet; --rope-scale stretches positions evenly"
_ADAPTER = "adapters are not applied; merge it into the model and give the merged file with -m"
_SELF_EXTEND = "self-extend moves keys, which blocks do not allow; keep -c within the model's context"
_TEMPLATE_ONLY = "turns are framed by the chat template alone; -no-cnv takes -p as the whole text"

LLAMA_FLAGS: tuple[Flag, ...] = (
    _implemented("-h --help --usage"),
    _implemented("--version"),
    _refused("there is no store of downloaded models", "-cl --cache-list"),
    _refused("no completion script is provided", "--completion-bash"),
    _accepted("-v shows what was made of the prompt", "--verbose-prompt"),
    _implemented("--display-prompt / --no-display-prompt"),
    _accepted("the output is not coloured", "-co --color", SWITCH_OR_AUTO),
    # threads
    _implemented("-t --threads", "integer", env="THREADS"),
    _accepted("-t sets the threads of prefill and decode alike", "-tb --threads-batch", "integer"),
    _accepted(_CORES, "-C --cpu-mask", "text"),
    _accepted(_CORES, "-Cr --cpu-range", "text"),
    _accepted(_CORES, "--cpu-strict", "integer"),
    _accepted(_CORES, "--prio", "integer"),
    _accepted(_CORES, "--poll", "integer"),
    _accepted(_CORES, "-Cb --cpu-mask-batch", "text"),
    _accepted(_CORES, "-Crb --cpu-range-batch", "text"),
    _accepted(_CORES, "--cpu-strict-batch", "integer"),
    _accepted(_CORES, "--prio-batch", "integer"),
    _accepted(_CORES, "--poll-batch", "integer"),
    # context and evaluation
    _implemented("-c --ctx-size", "tokens", env="CTX_SIZE"),
    _implemented("-n --predict --n-predict", "tokens", env="N_PREDICT"),
    _implemented("-b --batch-size", "tokens", env="BATCH"),
    _implemented("-ub --ubatch-size", "tokens", env="UBATCH"),
    _accepted("there is no context shift, so the whole prompt is kept", "--keep", "tokens"),
    _accepted("pages are freed only when no later window reaches them", "--swa-full", env="SWA_FULL"),
    _refused("keys in blocks cannot be moved; raise -c instead", "--context-shift", env="CONTEXT_SHIFT"),
    _accepted("there is no context shift", "--no-context-shift", env="NO_CONTEXT_SHIFT"),
    _implemented("-fa --flash-attn", SWITCH_OR_AUTO, env="FLASH_ATTN"),
    _implemented("-p --prompt", "text", sets="prompt"),
    _implemented("-sys --system-prompt", "text", sets="system prompt"),
    _implemented("--perf / --no-perf", env="PERF"),
    _implemented("-f --file", "file", sets="prompt"),
    _implemented("-sysf --system-prompt-file", "file", sets="system prompt"),
    _implemented("-bf --binary-file", "file", sets="prompt"),
    _implemented("-e --escape / --no-escape"),
    _accepted("the closing report counts the tokens", "-ptc --print-token-count", "integer"),
    _implemented("--prompt-cache", "file"),
    _implemented("--prompt-cache-all"),
    _implemented("--prompt-cache-ro"),
    _implemented("-r --reverse-prompt", "text", repeatable=True),
    _refused("special tokens are never printed", "-sp --special"),
    # chat
    _implemented("-cnv --conversation / -no-cnv --no-conversation"),
    _implemented("-st --single-turn"),
    _refused("text is not continued by hand; -cnv chats", "-i --interactive"),
    _refused("text is not continued by hand; -cnv without -p waits for the first line", "-if --interactive-first"),
    _implemented("-mli --multiline-input"),
    _refused(_TEMPLATE_ONLY, "--in-prefix-bos"),
    _refused(_TEMPLATE_ONLY, "--in-prefix", "text"),
    _refused(_TEMPLATE_ONLY, "--in-suffix", "text"),
    _accepted("there is no empty run before the first", "--warmup / --no-warmup"),
    # sampling
    _implemented("--samplers", "text", sets="samplers"),
    _implemented("-s --seed", "integer"),
    _implemented("--sampler-seq --sampling-seq", "text", sets="samplers"),
    _implemented("--ignore-eos"),
    _implemented("--temp --temperature", "number", env="TEMPERATURE"),
    _implemented("--top-k", "integer", env="TOP_K"),
    _implemented("--top-p", "number", env="TOP_P"),
    _implemented("--min-p", "number", env="MIN_P"),
    _implemented("--top-nsigma --top-n-sigma", "number"),
    _implemented("--xtc-probability", "number"),
    _implemented("--xtc-threshold", "number"),
    _implemented("--typical --typical-p", "number"),
    _implemented("--repeat-last-n", "tokens"),
    _implemented("--repeat-penalty", "number", env="REPEAT_PENALTY"),
    _implemented("--presence-penalty", "number", env="PRESENCE_PENALTY"),
    _implemented("--frequency-penalty", "number", env="FREQUENCY_PENALTY"),
    _implemented("--dry-multiplier", "number"),
    _implemented("--dry-base", "number"),
    _implemented("--dry-allowed-length", "integer"),
    _implemented("--dry-penalty-last-n", "tokens"),
    _implemented("--dry-sequence-breaker", "text", repeatable=True),
    _refused("adaptive-p is not supported; try --min-p", "--adaptive-target", "number", harmless=-1),
    _accepted("adaptive-p is not supported, and off by default", "--adaptive-decay", "number"),
    _implemented("--dynatemp-range", "number"),
    _implemented("--dynatemp-exp", "number"),
    _refused("mirostat is not supported; try --min-p", "--mirostat", "integer", harmless=0),
    _accepted(_NO_MIROSTAT, "--mirostat-lr", "number"),
    _accepted(_NO_MIROSTAT, "--mirostat-ent", "number"),
    _implemented("-l --logit-bias", "text", repeatable=True),
    _refused(_GRAMMAR, "--grammar", "text"),
    _refused(_GRAMMAR, "--grammar-file", "text"),
    _refused(_GRAMMAR, "-j --json-schema", "text"),
    _refused(_GRAMMAR, "-jf --json-schema-file", "text"),
    _accepted("sampling runs on the CPU, which changes no result", "-bs --backend-sampling", env="BACKEND_SAMPLING"),
    # RoPE
    _implemented("--rope-scaling", "none|linear|yarn", env="ROPE_SCALING_TYPE"),
    _implemented("--rope-scale", "number", env="ROPE_SCALE", sets="rope scale"),
    _implemented("--rope-freq-base", "number", env="ROPE_FREQ_BASE"),
    _implemented("--rope-freq-scale", "number", env="ROPE_FREQ_SCALE", sets="rope scale"),
    _refused(_ROPE, "--yarn-orig-ctx", "integer", env="YARN_ORIG_CTX", harmless=0),
    _refused(_ROPE, "--yarn-ext-factor", "number", env="YARN_EXT_FACTOR", harmless=-1),
    _refused(_ROPE, "--yarn-attn-factor", "number", env="YARN_ATTN_FACTOR", harmless=-1),
    _refused(_ROPE, "--yarn-beta-slow", "number", env="YARN_BETA_SLOW", harmless=-1),
    _refused(_ROPE, "--yarn-beta-fast", "number", env="YARN_BETA_FAST", harmless=-1),
    _refused(_SELF_EXTEND, "-gan --grp-attn-n", "integer", env="GRP_ATTN_N", harmless=1),
    _accepted("self-extend is not supported, and off by default", "-gaw --grp-attn-w", "tokens", env="GRP_ATTN_W"),
    # cache and devices
    _accepted(_PLACEMENT, "-kvo --kv-offload / -nkvo --no-kv-offload", env="KV_OFFLOAD"),
    _accepted(_LOADING, "--repack / -nr --no-repack", env="REPACK"),
    _accepted(_LOADING, "--no-host", env="NO_HOST"),
    _implemented("-ctk --cache-type-k", "text", env="CACHE_TYPE_K"),
    _implemented("-ctv --cache-type-v", "text", env="CACHE_TYPE_V"),
    _accepted("the cache never fragments", "-dt --defrag-thold", "number", env="DEFRAG_THOLD"),
    _accepted("one sequence is evaluated", "-np --parallel", "integer", env="N_PARALLEL"),
    _refused("one machine runs the model", "--rpc", "text", env="RPC"),
    _accepted(_LOADING, "-lm --load-mode", "auto|none|mmap|mlock|mmap+mlock|dio", env="LOAD_MODE"),
    _accepted(_LOADING, "-lzm --lazy-mode", SWITCH_OR_AUTO, env="LAZY_MODE"),
    _accepted(_CORES, "--numa", "distribute|isolate|numactl", env="NUMA"),
    _accepted(_PLACEMENT, "-dev --device", "text", env="DEVICE"),
    _refused("there is nothing to choose: MLX uses its default device", "--list-devices"),
    _accepted(_PLACEMENT, "-ot --override-tensor", "text", env="OVERRIDE_TENSOR"),
    _accepted(_PLACEMENT, "-cmoe --cpu-moe", env="CPU_MOE"),
    _accepted(_PLACEMENT, "-ncmoe --n-cpu-moe", "integer", env="N_CPU_MOE"),
    _accepted(_PLACEMENT, "-ncffn --n-cpu-ffn", "integer", env="N_CPU_FFN"),
    _accepted(_PLACEMENT, "-ngl --gpu-layers --n-gpu-layers", "text", env="N_GPU_LAYERS"),
    _accepted(_PLACEMENT, "-sm --split-mode", "none|layer|row|tensor", env="SPLIT_MODE"),
    _accepted(_PLACEMENT, "-ts --tensor-split", "text", env="TENSOR_SPLIT"),
    _accepted(_PLACEMENT, "-mg --main-gpu", "integer", env="MAIN_GPU"),
    _accepted(_MEMORY, "-fit --fit", SWITCH, env="FIT"),
    _accepted(_MEMORY, "-fitt --fit-target", "text", env="FIT_TARGET"),
    _accepted(_MEMORY, "-fitc --fit-ctx", "tokens", env="FIT_CTX"),
    _accepted("weights are not searched for invalid values", "--check-tensors"),
    _refused("metadata is taken as the file states it; change it in the GGUF", "--override-kv", "text"),
    _accepted(_PLACEMENT, "--op-offload / --no-op-offload"),
    _refused(_ADAPTER, "--lora", "text"),
    _refused(_ADAPTER, "--lora-scaled", "text"),
    _refused("control vectors are not supported", "--control-vector", "text"),
    _refused("control vectors are not supported", "--control-vector-scaled", "text"),
    _accepted("there is no control vector", "--control-vector-layer-range", "integer integer"),
    # the model
    _implemented("-m --model", "file", env="MODEL"),
    _refused(NO_DOWNLOAD, "-mu --model-url", "text", env="MODEL_URL"),
    _refused(NO_DOWNLOAD, "-dr --docker-repo", "text", env="DOCKER_REPO"),
    _refused(NO_DOWNLOAD, "-hf -hfr --hf-repo", "text", env="HF_REPO"),
    _refused(NO_DOWNLOAD, "-hff --hf-file", "text", env="HF_FILE"),
    _accepted(_NO_DOWNLOADS, "-hft --hf-token", "text"),
    # chat templates and thinking
    _accepted("chat templates are always rendered as Jinja", "--jinja / --no-jinja", env="JINJA"),
    _accepted(_AS_WRITTEN, "--reasoning-format", "text", env="THINK"),
    _implemented("-rea --reasoning", SWITCH_OR_AUTO, env="REASONING"),
    _refused("not yet; -rea on and -rea off work", "--reasoning-effort", "text", env="REASONING_EFFORT"),
    _refused("not yet; -rea off asks for none", "--reasoning-budget", "integer", env="THINK_BUDGET", harmless=-1),
    _accepted("there is no budget to run out", "--reasoning-budget-message", "text", env="THINK_BUDGET_MESSAGE"),
    _accepted(_KEPT, "--reasoning-preserve / --no-reasoning-preserve", env="REASONING_PRESERVE"),
    _implemented("--chat-template", "text", env="CHAT_TEMPLATE", sets="chat template"),
    _implemented("--chat-template-file", "file", env="CHAT_TEMPLATE_FILE", sets="chat template"),
    _accepted(_AS_WRITTEN, "--skip-chat-parsing / --no-skip-chat-parsing", env="SKIP_CHAT_PARSING"),
    # messages
    _accepted("input and output are plain already", "--simple-io"),
    _accepted(_MESSAGES, "--log-disable"),
    _accepted(_MESSAGES, "--log-file", "text", env="LOG_FILE"),
    _refused("messages are plain lines; --json gives the result as JSON", "--log-jsonl", env="LOG_JSONL"),
    _accepted(_MESSAGES, "--no-log-jsonl", env="NO_LOG_JSONL"),
    _accepted(_MESSAGES, "--log-colors", SWITCH_OR_AUTO, env="LOG_COLORS"),
    _implemented("-v --verbose --log-verbose"),
    _accepted(_NO_DOWNLOADS, "--offline", env="OFFLINE"),
    _accepted("-v is the one higher level", "-lv --verbosity --log-verbosity", "integer", env="LOG_VERBOSITY"),
    _accepted(_MESSAGES, "--log-prefix / --no-log-prefix", env="LOG_PREFIX"),
    _accepted(_MESSAGES, "--log-timestamps / --no-log-timestamps", env="LOG_TIMESTAMPS"),
    _accepted(_NO_DRAFT, "--spec-draft-type-k -ctkd --cache-type-k-draft", "text", env="SPEC_DRAFT_CACHE_TYPE_K"),
    _accepted(_NO_DRAFT, "--spec-draft-type-v -ctvd --cache-type-v-draft", "text", env="SPEC_DRAFT_CACHE_TYPE_V"),
)

OLDER_FLAGS: tuple[Flag, ...] = (
    _accepted(_LOADING, "--mlock", env="MLOCK"),
    _accepted(_LOADING, "--mmap / --no-mmap", env="MMAP"),
    _accepted(_LOADING, "-dio --direct-io / -ndio --no-direct-io", env="DIO"),
)
"""Spellings that llama-completion took until 2026 (now --load-mode)."""

OUR_FLAGS: tuple[Flag, ...] = (
    _implemented("--json", ours=True),
    _implemented("-q --quiet", ours=True),
    _implemented("--strict-kv", ours=True),
    _implemented("--cache-exact-first --exact-prefix", "tokens", ours=True),
    _implemented("--cache-preset", "|".join(PRESETS), ours=True),
    _implemented("--kv-balance", "off|page|full", ours=True),
    _implemented("--kv-calibration", "file", ours=True),
    _implemented("--kv-workspace", "integer", ours=True),
    _implemented("--kv-kernel-rows", "integer", ours=True),
    _implemented("--prompt-cache-profile", "text", ours=True),
    _implemented("--debug", ours=True),
)

FLAGS: tuple[Flag, ...] = LLAMA_FLAGS + OLDER_FLAGS + OUR_FLAGS
