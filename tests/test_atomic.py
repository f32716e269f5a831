"""A file is written whole or not at all, and what cannot be written is said before any work."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from tqgguf.formats.atomic import check_new_folder, check_target, new_folder, replacing, replacing_set
from tqgguf.formats.errors import RequestError, TqggufError


def write(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def test_a_new_file_gets_the_permissions_that_files_get_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path, usual = tmp_path / "file", tmp_path / "usual"
    usual.touch()
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode == usual.stat().st_mode
    for mode in (0o600, 0o444):
        path.chmod(mode)
        write(path, b"newer")
        assert path.read_bytes() == b"newer"
        assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277, 0o777])
def test_a_private_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "file"
    before = os.umask(umask)
    try:
        with replacing(path, private=True) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
            temporary.write_bytes(b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o640, 0o400, 0o666):
        path.chmod(mode)
        with replacing(path, private=True) as temporary:
            temporary.write_bytes(b"newer")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"half")
        assert path.read_bytes() == b"old"
        assert temporary.parent == path.parent
    assert path.read_bytes() == b"half"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("other"), OSError(errno.ENOSPC, "full")])
def test_whatever_goes_wrong_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises((KeyboardInterrupt, ValueError, TqggufError)) as raised, replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise error
    if isinstance(error, OSError):
        assert str(raised.value) == f"{path}: could not be written: full"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_what_can_be_no_target_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    for path, said in (
        (tmp_path, "expected the name of a file to write, found a folder"),
        (Path(os.devnull), "found a device or a pipe"),
        (tmp_path / "none" / "file", "does not exist; make it first"),
        (tmp_path / "file" / "inside", "does not exist; make it first"),
        (tmp_path / "circle", "found a link that leads nowhere"),
        (tmp_path / "a\0b", "cannot be written"),
        (tmp_path / ("n" * 300), "cannot be written"),
    ):
        with pytest.raises(RequestError, match=said):
            check_target(path)
    assert sorted(os.listdir(tmp_path)) == ["circle", "file"]


def test_a_pipe_with_a_temporary_files_name_is_nobodys_orphan(tmp_path: Path) -> None:
    pipe = tmp_path / ".tqgguf-a.tmp"
    os.mkfifo(pipe)
    os.utime(pipe, (0, 0))
    write(tmp_path / "file", b"new")
    assert sorted(os.listdir(tmp_path)) == [pipe.name, "file"]


def test_a_folder_without_permission_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:  # root, as which tests may run, is refused nothing
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RequestError, match="file: cannot be written: Permission denied"):
        check_target(tmp_path / "file")


def test_what_a_killed_writer_left_goes_with_the_next_write_and_a_living_ones_stays(tmp_path: Path) -> None:
    orphan, pipe, living = (tmp_path / f".tqgguf-{name}.tmp" for name in "abc")
    os.mkfifo(pipe)
    with replacing(tmp_path / "other") as held:
        held.rename(living)
        orphan.write_bytes(b"half")
        write(tmp_path / "file", b"new")
        assert sorted(os.listdir(tmp_path)) == sorted([pipe.name, living.name, "file"])
        living.rename(held)


def test_where_files_cannot_be_locked_only_what_is_a_day_old_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    old, young = (tmp_path / f".tqgguf-{name}.tmp" for name in "ab")
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    write(tmp_path / "file", b"new")
    assert sorted(os.listdir(tmp_path)) == sorted([young.name, "file"])


def test_a_set_appears_when_all_of_it_is_whole(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first", "second")]
    paths[0].write_bytes(b"old")
    with pytest.raises(KeyError), replacing_set(paths) as temporaries:
        temporaries[1].write_bytes(b"half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    with replacing_set(paths) as temporaries:
        for temporary in temporaries:
            temporary.write_bytes(b"new")
        assert paths[0].read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]
    assert all(path.read_bytes() == b"new" for path in paths)


def test_the_last_of_two_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "made") as temporary:
        (temporary / "inside").write_bytes(b"new")
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "inside").read_bytes() == b"new"
    with pytest.raises(KeyError), new_folder(tmp_path / "failed") as temporary:
        (temporary / "inside").write_bytes(b"half")
        raise KeyError
    with pytest.raises(RequestError, match="expected the name of a new folder, found one that is not empty"):
        check_new_folder(tmp_path / "made")
    assert os.listdir(tmp_path) == ["made"]


def test_a_folder_that_a_killed_writer_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    orphan, living = (tmp_path / f".tqgguf-{name}.tmp" for name in "ab")
    with new_folder(tmp_path / "other") as held:
        (orphan / "inside").mkdir(parents=True)
        held.rename(living)
        write(tmp_path / "file", b"new")
        assert sorted(os.listdir(tmp_path)) == sorted([living.name, "file"])
        living.rename(held)


def test_two_names_of_one_file_are_no_set(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first", "second", "real")]
    for path in paths[:2]:
        path.symlink_to("real")
    for names in (paths[:2], [paths[2], paths[0]]):
        expected = f"{names[1].name}: leads to the same file as .*{names[0].name};"
        with pytest.raises(RequestError, match=expected), replacing_set(names):
            raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_where_no_folder_can_be_made_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    with pytest.raises(RequestError, match="circle: expected the name of a new folder, found a link that leads nowh"):
        check_new_folder(circle)
    with pytest.raises(RequestError, match="cannot be written: File name too long"):
        check_new_folder(tmp_path / ("a" * 300))

    def refuse(path: Path, mode: int = 0o777) -> None:  # root, as which tests may run, is refused nothing
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(RequestError, match="made: cannot be written: Permission denied"):
        check_new_folder(tmp_path / "made")
    assert os.listdir(tmp_path) == ["circle"]
