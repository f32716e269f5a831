"""The house of CONTRIBUTING.md as its imports draw it: arrows only downwards, and no circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from test_without_mlx import python

PACKAGE = Path(__file__).parent.parent / "tqgguf"
FLOORS = ("formats", "text", "conversion", "runtime", "measuring", "cli")
BELOW_MLX = FLOORS[:3]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): ast.parse(path.read_bytes()) for path in PACKAGE.rglob("*.py")}


def imported_by(nodes: list[ast.stmt] | ast.AST) -> set[str]:
    """The package's modules that import statements name, anywhere below these nodes."""
    found = set()
    for node in [n for root in (nodes if isinstance(nodes, list) else [nodes]) for n in ast.walk(root)]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & SOURCES.keys()


def floor(module: str) -> int | None:
    rooms = module.split(".")[1:2]
    return FLOORS.index(rooms[0]) if rooms and rooms[0] in FLOORS else None


def test_arrows_lead_downwards() -> None:
    upwards = [
        f"{module} -> {other}"
        for module, tree in SOURCES.items()
        for other in imported_by(tree)
        if (here := floor(module)) is not None and (there := floor(other)) is not None and there > here
    ]
    assert upwards == []
    assert {module.split(".")[1] for module in SOURCES if "." in module} == {*FLOORS, "texts"}


def test_no_module_is_imported_by_what_it_imports() -> None:
    at_import = {
        module: imported_by([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]) - {module}
        for module, tree in SOURCES.items()
    }
    assert len(list(TopologicalSorter(at_import).static_order())) == len(SOURCES)


def test_nothing_below_the_runtime_names_mlx() -> None:
    for module, tree in SOURCES.items():
        if floor(module) in range(len(BELOW_MLX)):
            names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            assert not {"mlx", "mlx_lm"} & {name.partition(".")[0] for name in names}, module


IMPORT_BELOW = f"""
import importlib, pkgutil, sys
for floor in {BELOW_MLX}:
    package = importlib.import_module("tqgguf." + floor)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
names = importlib.import_module("tqgguf.measuring.cache_pairs")
print(sorted({{name.split(".")[1] for name in sys.modules if name.startswith("tqgguf.")}}))
print(sorted({{"mlx", "mlx_lm", "tqgguf.runtime"}} & set(sys.modules)))
"""


def test_modules_below_the_runtime_and_the_names_of_caches_bring_neither_mlx_nor_a_blas() -> None:
    done = python(IMPORT_BELOW)
    assert (done.stdout, done.stderr) == (f"{sorted({*BELOW_MLX, 'measuring'})}\n[]\n", "")
