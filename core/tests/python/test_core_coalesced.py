"""Several collectives as one call."""

import pytest

from phalanx.core import Call, FileStore, InvalidArgumentError, MismatchError, RevokedError, UnsupportedError, World
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")


def join(rank, world_size, **options):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000, **options)


def all_kinds(rank, world_size, count):
    """Calls of every kind and of several dtypes, with what this rank must get."""

    def mine(r, n=count, dtype=np.float32):
        return (np.arange(n) % 50 + r).astype(dtype)

    def empty(n=count, dtype=np.float32):
        return np.full(n, 77, dtype)

    everyone = range(world_size)
    total = sum(mine(r) for r in everyone)
    whole = [mine(r, count * world_size, np.int32) for r in everyone]
    root, part = world_size - 1, slice(rank * count, (rank + 1) * count)
    here = rank == root
    out = [
        empty(),
        mine(rank),
        empty(count * world_size, np.int64),
        empty(count, np.int32),
        empty(count * world_size, np.int32),
        mine(rank),
        empty(count, np.float64),
        empty(count * world_size),
        empty(count, np.int32),
    ]
    calls = [
        Call.all_reduce(mine(rank), out[0]),
        Call.all_reduce(out[1], op="max"),
        Call.all_gather(mine(rank, dtype=np.int64), out[2]),
        Call.reduce_scatter(whole[rank], out[3]),
        Call.all_to_all(whole[rank], out[4]),
        Call.broadcast(out[5], root_group_rank=root),
        Call.reduce(mine(rank, dtype=np.float64), out[6] if here else None, op="sum", root_group_rank=root),
        Call.gather(mine(rank), out[7], root_group_rank=root),
        Call.scatter(whole[root] if here else None, out[8], root_group_rank=root),
    ]
    expected = [
        total,
        mine(root),
        np.concatenate([mine(r, dtype=np.int64) for r in everyone]),
        sum(whole)[part],
        np.concatenate([each[part] for each in whole]),
        mine(root),
        total.astype(np.float64) if here else empty(count, np.float64),
        np.concatenate([mine(r) for r in everyone]) if here else empty(count * world_size),
        whole[root][part],
    ]
    return calls, out, expected


def run_all_kinds(rank, world_size, count):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for blocking in (True, False):
            calls, outs, expected = all_kinds(rank, world_size, count)
            work = group.coalesced(calls, blocking=blocking, channel=1)
            if work is not None:
                del calls
                work.wait()
            for i, (out, want) in enumerate(zip(outs, expected, strict=True)):
                np.testing.assert_array_equal(out, want, err_msg=f"call {i}")
        group.coalesced([])
        assert group.sequence == 1


@pytest.mark.parametrize(("world_size", "count"), [(1, 10), (2, 3), (2, 60_000), (3, 1000), (4, 0)])
def test_calls_of_all_kinds_and_dtypes_give_what_they_give_one_by_one(world_size, count):  # P5 P7 P8
    run_ranks(run_all_kinds, world_size, count)


def run_prepared(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        arrays = [np.empty(1 + 10 * i, np.float32) for i in range(64)]
        prepared = group.prepare(Call.all_reduce(array) for array in arrays)
        assert len(prepared) == 64
        assert "64 calls" in repr(prepared)
        for step in range(20):
            for i, array in enumerate(arrays):
                array[:] = i + step + rank
            work = prepared.run(blocking=step % 2 == 0)
            if work is not None:
                work.wait()
            for i, array in enumerate(arrays):
                assert (array == (i + step) * world_size + sum(range(world_size))).all()
        for array in arrays:
            array[:] = rank + 1
        group.coalesced([Call.all_reduce(array, op="premul_sum") for array in arrays], scale=0.5)
        assert all((array == 0.5 * sum(range(1, world_size + 1))).all() for array in arrays)


def test_prepared_calls_run_again_and_again():
    run_ranks(run_prepared, 3)


def bad_lists(group):
    a, b, wide = np.ones(4, np.float32), np.ones(4, np.float32), np.ones(8, np.float32)
    good = Call.all_reduce(np.ones(1), np.ones(1))
    return [
        ("no Call", r"call 1 is 'all_reduce'", [good, "all_reduce"]),
        ("dtypes that differ", r"call 1 \(all_reduce\): .*float64", [good, Call.all_reduce(a, np.ones(4))]),
        ("unknown op", r"call 0 \(all_reduce\): .*median", [Call.all_reduce(a, b, op="median")]),
        ("short output", r"call 0 \(all_gather\): .*must have 32 bytes", [Call.all_gather(a, b)]),
        ("no output on the root", r"call 0 \(reduce\): out is missing", [Call.reduce(a)]),
        ("no source on the root", r"call 0 \(scatter\): source is missing", [Call.scatter(None, a)]),
        ("no root", r"call 0 \(broadcast\): root_group_rank", [Call.broadcast(a, root_group_rank=5)]),
        ("read-only output", "read-only", [Call.all_reduce(bytes(4), dtype="float32")]),
        (
            "one output twice",
            "calls 0 and 1 use the same memory",
            [Call.all_reduce(a, b), Call.all_reduce(wide[:4], b)],
        ),
        (
            "an output that is read",
            "calls 0 and 1 use the same memory",
            [Call.all_reduce(a, b), Call.all_reduce(b, wide[:4])],
        ),
        ("overlap inside", "overlap", [Call.all_reduce(wide[:4], wide[2:6])]),
    ]


def refuse_bad_lists(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for name, text, calls in bad_lists(group):  # the same on all ranks, which so stay in step
            if rank != 0 and name.endswith("on the root"):
                continue  # the binding finds it on the root, before the core hears of a call
            with pytest.raises(InvalidArgumentError, match=text):
                group.coalesced(calls)
        with pytest.raises(UnsupportedError, match="band is not defined for dtype float32"):
            group.coalesced([Call.all_reduce(np.ones(4, np.float32), op="band")])
        with pytest.raises(InvalidArgumentError, match="channel"):
            group.coalesced([], channel=99)
        assert (group.sequence, group.state) == (0, "active")
        out = np.empty(1)
        group.coalesced([Call.all_reduce(np.ones(1), out)])  # P9
        assert out[0] == world_size


def test_a_wrong_call_is_named_and_ranks_that_refuse_it_alike_go_on():
    run_ranks(refuse_bad_lists, 2)


def disagree(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        a, b = np.ones(4), np.ones(4)
        second = Call.all_reduce(b) if rank == 0 else Call.broadcast(b)
        with pytest.raises((MismatchError, RevokedError)) as caught:
            group.coalesced([Call.all_reduce(a), second])
        assert group.state == "failed"
        return type(caught.value).__name__


def test_ranks_that_give_different_calls_are_told():
    assert "MismatchError" in run_ranks(disagree, 2)
