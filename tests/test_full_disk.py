"""A file system that is full, for real: a small tmpfs of this test's own. Collected where one can be mounted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOUNTED = ["unshare", "-rm", "sh", "-c"]
SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from snapshots import make_layer, make_snapshot
from tqgguf.formats.errors import TqggufError
from tqgguf.formats.snapshots.read import open_snapshot
from tqgguf.formats.snapshots.write import write_snapshot

os.chdir(sys.argv[2])
write_snapshot("s.gguf", make_snapshot(10))
before = open("s.gguf", "rb").read()
try:
    write_snapshot("s.gguf", make_snapshot(3000, make_layer(0, 3000, "f32", "f32", n_kv_heads=4)))
except TqggufError as error:
    print(error)
assert open("s.gguf", "rb").read() == before
assert os.listdir() == ["s.gguf"], os.listdir()
write_snapshot("s.gguf", make_snapshot(20))
assert len(open_snapshot("s.gguf").tokens) == 20
"""


def can_mount() -> bool:
    """Whether this process may have a file system of its own."""
    try:
        return subprocess.run([*MOUNTED, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    mount = (
        f"mount -t tmpfs -o size=400k tmpfs {tmp_path} && exec {sys.executable} - {Path(__file__).parent} {tmp_path}"
    )
    done = subprocess.run([*MOUNTED, mount], input=SCRIPT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "s.gguf: could not be written: No space left on device\n"
