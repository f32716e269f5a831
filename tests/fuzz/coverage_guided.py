"""The coverage-guided run: atheris mutates files and keeps those that reach new branches of tqgguf's readers.

    python tests/fuzz/coverage_guided.py WORK [libFuzzer's flags, as -max_total_time=1800 or -merge=1]

WORK is a folder of files to start from and to grow; an empty one is filled with `seeds`. tests/corpus/README.md says
how the kept corpus was made. Needs atheris, which is no dependency of the tests.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))

with atheris.instrument_imports(include=["tqgguf"]):
    import readers

SUFFIX = "file"


def main(argv: list[str]) -> None:
    work = Path(argv[1])
    work.mkdir(parents=True, exist_ok=True)
    if not any(work.iterdir()) and "-merge=1" not in argv:
        from seeds import all_seeds

        for i, data in enumerate(all_seeds().values()):
            (work / f"seed-{i}").write_bytes(data)
    with tempfile.TemporaryDirectory(dir=readers.in_memory_folder()) as folder:
        path = Path(folder) / SUFFIX

        def one(data: bytes) -> None:
            path.unlink(missing_ok=True)  # a file that is still mapped must not change
            path.write_bytes(data)
            readers.examine(path)

        itself = f"{sys.executable} {argv[0]}"  # -merge=1 runs this again, by a shell
        atheris.Setup([itself, str(work), *argv[2:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
