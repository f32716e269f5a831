"""What becomes of those flags of llama.cpp's llama-completion that do nothing here: every one of them, with its reason.

One row per flag, with all its spellings. A flag is accepted (nobody misses what it does: one line says why it has no
effect), or refused (one line says why and what to do instead). Those that do something stand in `flag_table`.
Read off common/arg.cpp of llama.cpp, August 2026 (as vendored by llama-cpp-python 0.3.36): the options whose examples
include COMPLETION or COMMON, plus spellings that it has dropped since and that scripts still hold.
"""

from __future__ import annotations

from functools import partial

from tqgguf.cli.flag_table import rows_of
from tqgguf.cli.flags import SWITCH, SWITCH_OR_AUTO, Fate, Flag, row
from tqgguf.formats.errors import NO_DOWNLOAD

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

WITHOUT_EFFECT: tuple[Flag, ...] = (
    _refused("there is no store of downloaded models", "-cl --cache-list"),
    _refused("no completion script is provided", "--completion-bash"),
    _accepted("-v shows what was made of the prompt", "--verbose-prompt"),
    _accepted("the output is not coloured", "-co --color", SWITCH_OR_AUTO),
    # threads
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
    _accepted("there is no context shift, so the whole prompt is kept", "--keep", "tokens"),
    _accepted("pages are freed only when no later window reaches them", "--swa-full", env="SWA_FULL"),
    _refused("keys in blocks cannot be moved; raise -c instead", "--context-shift", env="CONTEXT_SHIFT"),
    _accepted("there is no context shift", "--no-context-shift", env="NO_CONTEXT_SHIFT"),
    _accepted("the closing report counts the tokens", "-ptc --print-token-count", "integer"),
    _refused("special tokens are never printed", "-sp --special"),
    # chat
    _refused("text is not continued by hand; -cnv chats", "-i --interactive"),
    _refused("text is not continued by hand; -cnv without -p waits for the first line", "-if --interactive-first"),
    _refused(_TEMPLATE_ONLY, "--in-prefix-bos"),
    _refused(_TEMPLATE_ONLY, "--in-prefix", "text"),
    _refused(_TEMPLATE_ONLY, "--in-suffix", "text"),
    _accepted("there is no empty run before the first", "--warmup / --no-warmup"),
    # sampling
    _refused("adaptive-p is not supported; try --min-p", "--adaptive-target", "number", harmless=-1),
    _accepted("adaptive-p is not supported, and off by default", "--adaptive-decay", "number"),
    _refused("mirostat is not supported; try --min-p", "--mirostat", "integer", harmless=0),
    _accepted(_NO_MIROSTAT, "--mirostat-lr", "number"),
    _accepted(_NO_MIROSTAT, "--mirostat-ent", "number"),
    _refused(_GRAMMAR, "--grammar", "text"),
    _refused(_GRAMMAR, "--grammar-file", "text"),
    _refused(_GRAMMAR, "-j --json-schema", "text"),
    _refused(_GRAMMAR, "-jf --json-schema-file", "text"),
    _accepted("sampling runs on the CPU, which changes no result", "-bs --backend-sampling", env="BACKEND_SAMPLING"),
    # RoPE
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
    _refused(NO_DOWNLOAD, "-mu --model-url", "text", env="MODEL_URL"),
    _refused(NO_DOWNLOAD, "-dr --docker-repo", "text", env="DOCKER_REPO"),
    _refused(NO_DOWNLOAD, "-hf -hfr --hf-repo", "text", env="HF_REPO"),
    _refused(NO_DOWNLOAD, "-hff --hf-file", "text", env="HF_FILE"),
    _accepted(_NO_DOWNLOADS, "-hft --hf-token", "text"),
    # chat templates and thinking
    _accepted("chat templates are always rendered as Jinja", "--jinja / --no-jinja", env="JINJA"),
    _accepted(_AS_WRITTEN, "--reasoning-format", "text", env="THINK"),
    _refused("not yet; -rea on and -rea off work", "--reasoning-effort", "text", env="REASONING_EFFORT"),
    _refused("not yet; -rea off asks for none", "--reasoning-budget", "integer", env="THINK_BUDGET", harmless=-1),
    _accepted("there is no budget to run out", "--reasoning-budget-message", "text", env="THINK_BUDGET_MESSAGE"),
    _accepted(_KEPT, "--reasoning-preserve / --no-reasoning-preserve", env="REASONING_PRESERVE"),
    _accepted(_AS_WRITTEN, "--skip-chat-parsing / --no-skip-chat-parsing", env="SKIP_CHAT_PARSING"),
    # messages
    _accepted("input and output are plain already", "--simple-io"),
    _accepted(_MESSAGES, "--log-disable"),
    _accepted(_MESSAGES, "--log-file", "text", env="LOG_FILE"),
    _refused("messages are plain lines; --json gives the result as JSON", "--log-jsonl", env="LOG_JSONL"),
    _accepted(_MESSAGES, "--no-log-jsonl", env="NO_LOG_JSONL"),
    _accepted(_MESSAGES, "--log-colors", SWITCH_OR_AUTO, env="LOG_COLORS"),
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


def flags_of(verb: str) -> tuple[Flag, ...]:
    """Every flag that a verb which takes llama.cpp's command lines knows. The verb's own come last: their spellings
    count for more."""
    return (*WITHOUT_EFFECT, *OLDER_FLAGS, *rows_of(verb))
