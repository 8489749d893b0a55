"""Making groups: who is in them, who is not, and what happens when somebody does not come."""

import copy
import ctypes.util
import os
import threading

import pytest

from dict_store import DictStore
from phalanx.core import (
    CallbackStore,
    FileStore,
    InvalidArgumentError,
    PhalanxError,
    PrefixStore,
    RevokedError,
    UnsupportedError,
    WaitTimeoutError,
    World,
)
from phalanx.core._ucx import wheel_directory
from ranks import run_ranks, scratch


def join(rank, world_size, timeout_ms=30_000, **options):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=timeout_ms, **options)


def total(group, value):
    """The sum of a number over the group, as Python's int."""
    mine, out = memoryview(bytearray(8)).cast("q"), memoryview(bytearray(8)).cast("q")
    mine[0] = value
    group.all_reduce(mine, out)
    return out[0]


def describe(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("größe", [2, 0, 1])
        assert (group.name, group.ranks, group.group_size) == ("größe", (2, 0, 1), 3)
        assert group.ranks[group.group_rank] == rank == world.rank
        assert (group.sequence, group.state, group.error()) == (0, "active", None)
        assert (world.size, group.world) == (3, world)
        assert group.eager_bytes > 0
        assert total(group, 10**rank) == 111
        assert group.sequence == 1
        return group.id, world.host_id


def test_a_group_knows_its_name_ranks_and_order():
    results = run_ranks(describe, 3)
    assert len(set(results)) == 1
    assert results[0][1] != 0


def use_subgroups(rank, world_size):
    with join(rank, world_size) as world:
        everyone = world.create_group("all", range(world_size))
        half = world.create_group("half", [rank // 2 * 2, rank // 2 * 2 + 1])
        assert total(half, 10**rank) == (11 if rank < 2 else 1100)
        if rank in (1, 2):
            middle = world.create_group("middle", [1, 2])
            for _ in range(5):
                assert total(middle, rank) == 3
        alone = world.create_group("alone", [rank])
        assert total(alone, rank) == rank
        assert total(everyone, 10**rank) == 1111


def test_subgroups_do_not_disturb_each_other_or_the_whole():
    run_ranks(use_subgroups, 4)


def reuse_name(rank, world_size):
    with join(rank, world_size) as world:
        first = world.create_group("g", range(world_size))
        second = world.create_group("g", reversed(range(world_size)))
        assert first.id != second.id
        assert (total(second, 1), total(first, 1)) == (world_size, world_size)
        for _ in range(10):
            assert total(world.create_group("g", range(world_size)), 1) == world_size


def test_a_name_may_be_used_again_for_a_new_group():
    run_ranks(reuse_name, 2)


def refuse_bad_ranks(rank, world_size):
    with join(rank, world_size) as world:
        for ranks, text in [
            ([], "rank"),
            ([1 - rank], f"{rank}"),
            ([0, 0, 1], "twice|duplicate|more than once"),
            ([0, 1, 2], "2"),
            ([0, 1, -1], "-1"),
            ([0.5, 1], "integer"),
        ]:
            with pytest.raises(InvalidArgumentError, match=text):
                world.create_group("g", ranks)
        for name, text in [("", "name"), ("a\0b", "NUL"), (None, "str"), ("x" * 4096, "name")]:
            with pytest.raises(InvalidArgumentError, match=text):
                world.create_group(name, [0, 1])
        with pytest.raises(InvalidArgumentError, match="no wait is unbounded"):
            world.create_group("g", [0, 1], timeout_ms=-5)
        assert total(world.create_group("g", [0, 1]), 1) == 2


def test_wrong_ranks_and_names_are_refused_and_a_right_group_can_still_be_made():
    run_ranks(refuse_bad_ranks, 2)


def miss_one(rank, world_size):
    with join(rank, world_size) as world:
        if rank == 2:
            return ""
        with pytest.raises(WaitTimeoutError, match=r"\b2\b") as caught:
            world.create_group("g", range(world_size), timeout_ms=500)
        return str(caught.value)


def test_a_rank_that_never_comes_is_named():
    assert "2" in run_ranks(miss_one, 3)[0]


def needs_ucx():
    if not os.environ.get("PHALANX_UCX") and ctypes.util.find_library("ucp") is None and wheel_directory() is None:
        pytest.skip("needs UCX (Debian: libucx0)")


def live_without_ucx(rank, world_size):
    with join(rank, world_size, host_id=100 + rank // 2) as world:
        assert world.host_id == 100 + rank // 2
        with pytest.raises(UnsupportedError, match=r"on 2 hosts .*rank 3 cannot serve that: there is no usable UCX"):
            world.create_group("all", range(world_size))
        pair = world.create_group("pair", [rank // 2 * 2, rank // 2 * 2 + 1])
        return total(pair, 10**rank)


def test_a_rank_without_ucx_is_told_on_every_rank_and_groups_of_one_host_work():
    needs_ucx()
    env = [{}, {}, {}, {"PHALANX_UCX": "/nonexistent/libucp.so.0"}]
    assert run_ranks(live_without_ucx, 4, env=env) == [11, 11, 1100, 1100]


def live_on_two_hosts(rank, world_size):
    with join(rank, world_size, host_id=100 + rank // 2) as world:
        group = world.create_group("all", range(world_size))
        half = group.split(rank % 2, rank)
        return group.hosts, half.hosts, total(group, 10**rank), total(half, 10**rank), group.agree(7).bits


def test_a_group_spans_hosts():
    needs_ucx()
    assert run_ranks(live_on_two_hosts, 4) == [
        (2, 2, 1111, 101, 7),
        (2, 2, 1111, 1010, 7),
        (2, 2, 1111, 101, 7),
        (2, 2, 1111, 1010, 7),
    ]


class SlowStore(DictStore):
    """Through `reader`, which holds the same, the record of rank 1 is seen only once `may_read` is set."""

    def __init__(self):
        super().__init__()
        self.may_read = threading.Event()
        self.is_slow = False
        self.reader = copy.copy(self)
        self.reader.is_slow = True

    def sees(self, key):
        is_hidden = self.is_slow and key.endswith("/member/1") and not self.may_read.is_set()
        return super().sees(key) and not is_hidden


def test_a_rank_of_another_host_that_gave_up_and_tidied_before_it_was_seen_is_quoted():
    store = SlowStore()

    def other_host():
        with World(1, 2, CallbackStore(store), timeout_ms=30_000, host_id=2) as world:
            with pytest.raises(WaitTimeoutError):
                world.create_group("all", [0, 1], timeout_ms=1000)
            store.may_read.set()

    thread = threading.Thread(target=other_host)
    thread.start()
    with World(0, 2, CallbackStore(store.reader), timeout_ms=30_000, host_id=1) as world:
        with pytest.raises(WaitTimeoutError, match=r"rank 1 \(pid \d+\) gave up: .*timed out after 1000 ms"):
            world.create_group("all", [0, 1])
    thread.join()


def read_host_id(rank, world_size):
    with World(0, 1) as world:
        return world.host_id


def test_the_host_id_can_come_from_the_environment():
    env = [{"PHALANX_HOST_ID": "0x10"}, {"PHALANX_HOST_ID": " 17 "}, {"PHALANX_HOST_ID": ""}]
    ids = run_ranks(read_host_id, 3, env=env)
    assert ids[:2] == [16, 17]
    assert ids[2] not in (0, 16, 17)


@pytest.mark.parametrize("text", ["here", "-1", "1.5", str(2**64)])
def test_a_bad_host_id_in_the_environment_is_named(monkeypatch, text):
    monkeypatch.setenv("PHALANX_HOST_ID", text)
    with pytest.raises(InvalidArgumentError, match="PHALANX_HOST_ID"):
        World(0, 1)
    World(0, 1, host_id=5).finalize()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, -1), ("0", 1), (0, 1.0), (2**40, 2**41)])
def test_a_rank_outside_of_its_world_is_refused(tmp_path, rank, size):
    with pytest.raises(InvalidArgumentError, match="rank|size"):
        World(rank, size, FileStore(tmp_path / "store"))


def test_a_world_of_two_needs_a_store_with_the_right_methods():
    with pytest.raises(InvalidArgumentError, match="store"):
        World(0, 2)
    with pytest.raises(InvalidArgumentError, match="methods"):
        World(0, 2, object())


def attach(rank, world_size):
    # Worlds of one rank each, that know nothing of each other but the group's store.
    with World(0, 1, timeout_ms=30_000) as world:
        store = PrefixStore(FileStore(scratch() / "store"), "logical/")
        group = world.attach_group("logical", world_size - 1 - rank, world_size, store)
        assert (group.group_rank, group.group_size) == (world_size - 1 - rank, world_size)
        return total(group, 10**rank), group.id


def test_a_logical_group_needs_no_common_world():
    results = run_ranks(attach, 3)
    assert {each[0] for each in results} == {111}
    assert len({each[1] for each in results}) == 1


def attach_badly(rank, world_size):
    with World(0, 1, timeout_ms=30_000) as world:
        store = FileStore(scratch() / "store")
        for group_rank, group_size in [(2, 2), (-1, 2), (0, 0)]:
            with pytest.raises(InvalidArgumentError):
                world.attach_group("g", group_rank, group_size, store)
        assert total(world.attach_group("g", rank, world_size, store), 1) == 2


def test_a_logical_group_checks_its_ranks():
    run_ranks(attach_badly, 2)


class BrokenStore:
    """Torch's methods, all of which fail."""

    def _fail(self, *args):
        raise ConnectionResetError("the store is gone")

    set = get = add = wait = _fail


def test_a_store_that_fails_is_the_cause_of_the_error():
    def make():
        with World(0, 2, CallbackStore(BrokenStore()), timeout_ms=1000) as world:
            world.create_group("g", [0, 1])

    with pytest.raises(PhalanxError) as caught:
        make()
    assert isinstance(caught.value.__cause__, ConnectionResetError)


def revoke(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        other = world.create_group("other", range(world_size))
        assert total(group, 1) == world_size
        if rank == 1:
            group.revoke("the loss is NaN")
        other.barrier()
        with pytest.raises(RevokedError, match="the loss is NaN") as caught:
            group.barrier()
        assert caught.value.group == "tp"
        with pytest.raises(RevokedError, match="the loss is NaN"):
            total(group, 1)
        assert group.state == "failed"
        assert "the loss is NaN" in str(group.error())
        with pytest.raises(PhalanxError, match="the loss is NaN"):
            world.check()
        assert other.state == "active"
        assert total(other, 1) == world_size  # after it a faster rank may leave


def test_a_revoked_group_fails_everywhere_with_the_reason_and_others_work_on():
    run_ranks(revoke, 3)


def use_after_finalize(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("g", range(world_size))
    memory = world.alloc(64)
    symm = group.rendezvous(memory)
    group.barrier()
    world.finalize()
    world.finalize()
    for call in (
        group.barrier,
        lambda: total(group, 1),
        lambda: world.create_group("h", range(world_size)),
        lambda: group.rendezvous(world.alloc(64)),
        lambda: symm.barrier(),
    ):
        with pytest.raises(PhalanxError):
            call()
    memory.buffer()[0] = 1
    assert world.rank == rank
    return True


def test_a_finalized_world_refuses_calls_and_keeps_memory():
    assert run_ranks(use_after_finalize, 2) == [True, True]
