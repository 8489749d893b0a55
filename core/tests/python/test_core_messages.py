"""Messages between two ranks."""

import pytest

from phalanx.core import (
    ANY_RANK,
    FileStore,
    InvalidArgumentError,
    Message,
    MismatchError,
    NotFoundError,
    RevokedError,
    WaitTimeoutError,
    World,
)
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")


def join(rank, world_size, timeout_ms=30_000):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=timeout_ms)


def pass_around(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", reversed(range(world_size)))
        me, n = group.group_rank, world_size
        after, before = (me + 1) % n, (me - 1) % n
        for count in (0, 1, 1000, 300_000):
            mine, out = np.arange(count, dtype=np.int64) * (me + 1), np.empty(count, np.int64)
            work = group.send(mine, after, tag=count, blocking=False)
            assert group.recv(out, before, tag=count) == before
            work.wait()
            np.testing.assert_array_equal(out, np.arange(count) * (before + 1))
        group.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_messages_go_around_a_ring_that_may_be_one_rank(world_size):  # P11 P30
    run_ranks(pass_around, world_size)


def keep_order(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        if rank == 0:
            for i in range(200):
                group.send(np.array([i], np.int32), 1, tag=i % 2)
        else:
            out = np.empty(1, np.int32)
            for tag in (1, 0):  # all of one tag before the first of the other
                for i in range(tag, 200, 2):
                    group.recv(out, 0, tag=tag)
                    assert out[0] == i
        group.barrier()


def test_messages_with_one_tag_arrive_in_order_and_tags_are_apart():
    run_ranks(keep_order, 2)


def all_at_once(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        mine = [np.arange(count, dtype=np.int64) * (rank + 1) for count in (300_000, 3)]
        outs = [np.empty_like(each) for each in mine]
        taken = [Message.recv(each, before, tag=i) for i, each in enumerate(outs)]
        given = [Message.send(each, after, tag=i) for i, each in enumerate(mine)]
        group.messages(taken + given if rank else given + taken)
        for count, each in zip((300_000, 3), outs, strict=True):
            np.testing.assert_array_equal(each, np.arange(count) * (before + 1))
        group.messages([])
        with pytest.raises(InvalidArgumentError, match=r"message 1 \(send\): peer_group_rank"):
            group.messages([given[0], Message.send(mine[0], world_size)])
        with pytest.raises(InvalidArgumentError, match="make it with a method of phalanx.core.Message"):
            group.messages([mine[0]])
        group.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_messages_at_once_may_be_in_any_order(world_size):  # P11
    run_ranks(all_at_once, world_size)


def receive_from_any(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        if rank == 0:
            out, seen = np.empty(5, np.float32), []
            for i in range(world_size - 1):
                if i % 2:
                    seen.append(group.recv(out))
                else:
                    work = group.recv(out, ANY_RANK, blocking=False)
                    work.wait()
                    seen.append(work.source())
                assert (out == seen[-1]).all()
            assert sorted(seen) == list(range(1, world_size))
        else:
            group.send(np.full(5, rank, np.float32), 0)
        group.barrier()


def test_a_receive_from_any_rank_says_who_sent():
    run_ranks(receive_from_any, 4)


def work_in_flight(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        peer = 1 - rank
        outs = [np.empty(100 * i, np.int64) for i in range(20)]
        receives = [group.recv(out, peer, tag=i, blocking=False) for i, out in enumerate(outs)]
        with pytest.raises(NotFoundError):
            receives[0].source()
        assert not receives[5].test()
        group.barrier()
        # Nobody keeps the works or the buffers of these.
        for i in reversed(range(20)):
            group.send(np.full(100 * i, i + rank, np.int64), peer, tag=i, blocking=False)
        total = np.empty(1)
        group.all_reduce(np.ones(1), total)  # a collective in between
        assert total[0] == 2
        for i, (work, out) in enumerate(zip(receives, outs, strict=True)):
            work.wait()
            assert work.source() == peer
            assert (out == i + peer).all()
        send = group.send(np.ones(1), rank, blocking=False)
        group.recv(total, rank)
        send.wait()
        with pytest.raises(NotFoundError):
            send.source()
        group.barrier()


def test_many_messages_and_a_collective_may_be_in_flight():
    run_ranks(work_in_flight, 2)


def bad_messages(group):
    a = np.ones(4, np.float32)
    return [
        ("a peer beyond the group", "peer_group_rank is 2", lambda: group.send(a, 2)),
        ("a send to any rank", "peer_group_rank is -1", lambda: group.send(a, ANY_RANK)),
        ("a receive from rank -2", "peer_group_rank is -2", lambda: group.recv(a, -2)),
        ("a negative tag", "tag is -1", lambda: group.send(a, 1, tag=-1)),
        ("a large tag", "tag is 4294967296", lambda: group.recv(a, 1, tag=2**32)),
        ("a tag that is no number", "tag must be an integer", lambda: group.recv(a, 1, tag="x")),
        ("a read-only output", "read-only", lambda: group.recv(bytes(4), 1, dtype="uint8")),
        ("no dtype", "dtype is needed", lambda: group.send(bytes(4), 1)),
        ("no count", "count is needed: source", lambda: group.send(4096, 1, dtype="uint8")),
        ("a count beyond the buffer", "too few", lambda: group.recv(a, 1, 5)),
        ("NULL", "NULL", lambda: group.recv(0, 1, 5, "int8")),
        ("a negative timeout", "timeout_ms", lambda: group.send(a, 1, timeout_ms=-1)),
    ]


def refuse_bad_messages(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for _, text, call in bad_messages(group):
            with pytest.raises(InvalidArgumentError, match=text):
                call()
        assert group.state == "active"
        group.barrier()


def test_a_wrong_argument_of_a_message_is_named_and_nothing_is_sent():
    run_ranks(refuse_bad_messages, 2)


def disagree(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        if rank == 0:
            group.send(np.ones(4, np.float32), 1)
        with pytest.raises((MismatchError, RevokedError)) as caught:
            group.recv(np.ones(3, np.float32), 1 - rank)
        return str(caught.value)


def test_a_message_of_another_length_fails_both_sides():
    for text in run_ranks(disagree, 2):
        assert "send(float32, 4, tag 0)" in text
        assert "recv(float32, 3, tag 0)" in text


def wait_in_vain(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        with pytest.raises((WaitTimeoutError, RevokedError), match="rank 0 still waits for rank 1") as caught:
            group.recv(np.ones(3, np.float32), 1 - rank, timeout_ms=200 if rank == 0 else 0)
        return type(caught.value).__name__, str(caught.value)


def test_a_message_that_never_comes_ends_at_the_timeout_on_both_sides():
    results = run_ranks(wait_in_vain, 2)
    assert results[0][0] == "WaitTimeoutError"
    assert all("recv(float32, 3, tag 0)" in text for _, text in results)
