"""The file of a store is planted, replaced, cut, extended or removed: before ranks open it, and while they use it."""

import fcntl
import os
import random
import shutil
from contextlib import contextmanager

import pytest

import intruders
from liar import WAIT_SECONDS, raised, world_of
from phalanx.core import FileStore
from ranks import run_ranks, scratch

HEADER = 16  # magic number, committed bytes


def opened(path):
    error, _, text = raised(lambda: FileStore(path))
    assert str(path) in text or error == "nothing"
    return error, text


# ---- before it is opened


def test_a_planted_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "store").symlink_to(target)
    error, text = opened(tmp_path / "store")
    assert error == "SystemCallError"
    assert "symbolic link" in text
    assert target.read_bytes() == b"precious"


def test_a_planted_link_to_nothing_makes_no_file(tmp_path):
    (tmp_path / "store").symlink_to(tmp_path / "new")
    assert opened(tmp_path / "store")[0] == "SystemCallError"
    assert not (tmp_path / "new").exists()


def test_a_hard_link_to_another_file_leaves_it_as_it_was(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"a file of the same user, which was never meant to be a store")
    target.chmod(0o600)
    os.link(target, tmp_path / "store")
    error, text = opened(tmp_path / "store")
    assert error == "InvalidArgumentError"
    assert "not the file of a store" in text
    assert target.read_bytes() == b"a file of the same user, which was never meant to be a store"


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "store"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir(0o700)
    else:
        path = "/dev/null"
    assert opened(path)[0] in ("InvalidArgumentError", "SystemCallError", "AccessDeniedError")


@intruders.needs_root
def test_a_file_of_another_user_is_refused(tmp_path):
    path = tmp_path / "store"
    path.touch(0o600)
    os.chown(path, intruders.NOBODY, intruders.NOBODY)
    error, text = opened(path)
    assert error == "AccessDeniedError"
    assert f"belongs to user {intruders.NOBODY}" in text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602, 0o666, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path, mode):
    path = tmp_path / "store"
    path.touch()
    path.chmod(mode)
    error, text = opened(path)
    assert error == "AccessDeniedError"
    assert "other users have access" in text


def test_the_umask_does_not_open_the_file_to_others(tmp_path):
    before = os.umask(0)
    try:
        FileStore(tmp_path / "store")
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600


# ---- while ranks use it


@contextmanager
def directory_for_all():
    """One into which every user may write."""
    path = scratch() / "open"
    path.mkdir()
    path.chmod(0o777)
    for parent in (scratch(), scratch().parent):
        parent.chmod(0o711)
    yield path


def use(rank, world_size, spoil):
    """Two ranks meet in a store; then rank 0 has it spoilt, and both use it again. Returns how that ends on each."""
    note = FileStore(scratch() / "note")
    path = scratch() / "spoilt"
    store = FileStore(path)
    world = world_of(rank, world_size, store=store)
    group = world.create_group("before", range(world_size))
    store.set(f"large.{rank}", bytes(10_000))
    group.barrier()
    if rank == 0:
        spoil(path)
        note.set("spoilt", b"")
    note.get("spoilt", WAIT_SECONDS * 1000)
    told = raised(lambda: world.create_group("after", range(world_size), timeout_ms=3000).barrier())
    newcomer = raised(lambda: FileStore(path).get("large.0", 1000))
    group.barrier()  # those who had met go on, whatever becomes of the store
    world.finalize()
    return told[0], newcomer[0], told[2]


def attack(spoil):
    return run_ranks(use, 2, spoil)


def cut_off(path):
    os.truncate(path, 100)


def cut_to_nothing(path):
    os.truncate(path, 0)


def cut_header(path):
    os.truncate(path, HEADER - 1)


def overwrite(path):
    with path.open("r+b") as file:
        file.write(random.Random(1).randbytes(path.stat().st_size))


def lie_about_size(path):
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 8)


def go_back(path):
    with path.open("r+b") as file:
        file.seek(8)
        file.write((HEADER).to_bytes(8, "little"))


@pytest.mark.parametrize("spoil", [cut_off, cut_to_nothing, cut_header, overwrite, lie_about_size, go_back])
def test_a_file_that_is_spoilt_while_in_use_is_an_error_that_names_it(spoil):
    for error, _, text in attack(spoil):
        assert error == "InvalidArgumentError"
        assert "spoilt' is damaged" in text


def append_garbage(path):
    with path.open("ab") as file:
        file.write(random.Random(2).randbytes(100_000))


def append_much(path):
    os.truncate(path, 1 << 40)  # takes no space


@pytest.mark.parametrize("spoil", [append_garbage, append_much])
def test_what_is_appended_does_not_count(spoil):
    for error, newcomer, _ in attack(spoil):
        assert error == newcomer == "nothing"


def remove(path):
    path.unlink()


def test_a_file_that_is_removed_stays_with_those_who_have_it():
    for error, newcomer, _ in attack(remove):
        assert error == "nothing"
        assert newcomer == "WaitTimeoutError"  # it has a new one to itself


def replace(path):
    """By one of the same user, which is as good as any."""
    shutil.copy(path, path.with_name("copy"))
    path.unlink()
    path.with_name("copy").rename(path)


def test_a_file_that_is_replaced_stays_with_those_who_have_it():
    for error, newcomer, _ in attack(replace):
        assert error == newcomer == "nothing"


def replace_as(path):
    """What another user can do in a directory that is open to all."""
    path.unlink()
    path.write_bytes(b"")
    path.chmod(0o600)


def replaced_by_another_user(rank, world_size):
    with directory_for_all() as directory:
        path = directory / "store"
        store = FileStore(path)
        store.set("key", "value")
        intruders.as_user(intruders.NOBODY, replace_as, path)
        return store.get("key", 1000), opened(path)


@intruders.needs_root
def test_a_file_that_another_user_put_there_is_refused():
    [(value, (error, text))] = run_ranks(replaced_by_another_user, 1)
    assert value == b"value"  # of the file that was opened
    assert error == "AccessDeniedError"
    assert f"belongs to user {intruders.NOBODY}" in text


def test_a_lock_that_is_never_given_back_ends_a_wait_with_a_timeout(tmp_path):
    path = tmp_path / "store"
    store = FileStore(path)
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        error, _, text = raised(lambda: store.get("key", 200))
    assert error == "WaitTimeoutError"
    assert "timed out after 200 ms" in text and f"the lock of '{path}' was not free" in text
