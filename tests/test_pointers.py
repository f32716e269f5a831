"""Comments, docstrings and documents name nothing that is gone, and public definitions have docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
WRITTEN_FOR_ENGINEERS = [REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "benchmarks").glob("*.md")]
FOREIGN = re.compile(r"^(llama|ggml|gguf|mlx|mx|np|torch|hf|huggingface|sp|tokenizer|rope|vocab|general|blk)[_.]")
"""What begins the names of other projects, of GGUF's keys and of their tensors."""
THEIRS = {
    *("buffer_size", "get_boundary_skip_layers", "lm_quant", "quantize_iq4_nl", "tensor_allows_quantization"),
    *("rusage_info_v0", "modeling_rope_utils", "trainer_spec", "zero_point", "custom_kernel"),
    *("turboquant.py", "chat_template_utils.py", "llama_kivi.py"),
}
"""Names in other projects' sources, which comments give as where a fact comes from."""
PATTERNS = {"NAME.metal", "wheel.py"}
"""What stands for a name, and a part of a setting's name."""
IDENTIFIER = re.compile(r"(?<![\w./\\-])[a-z]\w*_\w+(?![\w/]|-\w)")
MODULE = re.compile(r"(?<![\w./-])(?:\w+/)*\w+\.(?:py|metal|cu|inc)\b")


def python_files() -> list[Path]:
    return [path for part in ("tqgguf", "tests", "benchmarks", "spec") for path in (REPOSITORY / part).rglob("*.py")]


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and strings that are statements, with their lines."""
    before = tokenize.NEWLINE
    for token in tokens_of(path):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        ):
            yield token.start[0], token.string
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


def known_words() -> set[str]:
    """Everything that code names or holds as text, and the names of files."""
    words: set[str] = set()
    for path in python_files():
        words |= {path.stem, path.parent.name}
        for token in tokens_of(path):
            if token.type in (tokenize.NAME, tokenize.STRING) and not token.string.startswith(('"""', 'r"""')):
                words |= set(re.findall(r"\w+", token.string))
    for pattern in ("*.metal", "*.c", "*.h", "*.inc", "*.cu", "*.toml", "Makefile", "CMakeLists.txt"):
        for path in (REPOSITORY / "tqgguf").rglob(pattern):
            words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) | {path.stem}
    for path in REPOSITORY.glob("*"):
        words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) if path.suffix == ".toml" else set()
    return words


def test_names_in_comments_and_docstrings_are_names_in_code() -> None:
    known, gone = known_words(), []
    for path in python_files():
        for line, text in prose(path):
            for name in IDENTIFIER.findall(text):
                if not FOREIGN.match(name) and name not in known | THEIRS:
                    gone.append((f"{path.relative_to(REPOSITORY)}:{line}", name))
    assert gone == []


def test_files_that_are_named_exist() -> None:
    files = {path.name for path in REPOSITORY.rglob("*") if ".venv" not in path.parts and path.is_file()}
    texts = [(path, text) for path in python_files() for _, text in prose(path)]
    texts += [(path, path.read_text(encoding="utf-8")) for path in WRITTEN_FOR_ENGINEERS]
    named = {
        (str(path.relative_to(REPOSITORY)), name)
        for path, text in texts
        for name in MODULE.findall(text)
        if Path(name).name not in files | THEIRS | PATTERNS
    }
    assert sorted(named) == []


def test_every_public_class_and_function_of_a_module_says_what_it_is() -> None:
    bare = [
        f"{path.relative_to(REPOSITORY)}: {node.name}"
        for path in (REPOSITORY / "tqgguf").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert bare == []
