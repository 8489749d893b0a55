"""The flight recorder from Python: what a dump says, and how much is kept."""

import json
import os
import signal

import pytest

from phalanx.core import FileStore, InvalidArgumentError, MismatchError, PeerDeadError, World
from ranks import run_ranks, scratch


def join(rank, world_size, **options):
    world = World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=60_000, **options)
    return world, world.create_group("tp", range(world_size))


def entries(dump, rank, channel=0):
    (group,) = dump["groups"]
    (member,) = (each for each in group["members"] if each["rank"] == rank)
    (found,) = (each for each in member["channels"] if each["channel"] == channel)
    return found["entries"]


def calls(rank, world_size):
    world, group = join(rank, world_size)
    data = bytearray(64)
    group.all_reduce(data, dtype="int32")
    group.broadcast(data, root_group_rank=1, dtype="uint8")
    group.barrier()
    dump = json.loads(world.dump())
    assert (dump["format"], dump["version"], dump["rank"]) == ("phalanx-flight-recorder", 1, rank)
    assert dump["groups"][0]["state"] == "active" and dump["groups"][0]["error"] is None
    for peer in range(world_size):
        first, second, third = entries(dump, peer)[:3]
        assert (first["call"], first["dtype"], first["count"], first["op"]) == ("all_reduce", "int32", 16, "sum")
        assert (second["call"], second["root"], second["bytes"]) == ("broadcast", 1, 64)
        assert third["call"] == "barrier" and first["status"] == second["status"] == "ok"
        assert first["start_ns"] <= first["end_ns"] <= second["start_ns"] <= dump["dumped_ns"]
    # Nobody leaves the first collective before all have come to it: clocks of two processes that can be compared.
    assert max(entries(dump, peer)[0]["start_ns"] for peer in range(world_size)) <= min(
        entries(dump, peer)[0]["end_ns"] for peer in range(world_size)
    )
    group.barrier()
    world.finalize()


def test_every_rank_sees_what_all_called_and_when():  # C7
    run_ranks(calls, 3)


def kept(rank, world_size):
    os.environ["PHALANX_RECORDER_ENTRIES"] = "1000"
    world, group = join(rank, world_size)
    for _ in range(1500):
        group.barrier()
    assert [each["sequence"] for each in entries(json.loads(world.dump()), rank)] == list(range(477, 1501))
    group.barrier()
    world.finalize()
    os.environ["PHALANX_RECORDER_ENTRIES"] = "many"
    with pytest.raises(InvalidArgumentError, match="PHALANX_RECORDER_ENTRIES is 'many'"):
        World(0, 1)
    with pytest.raises(InvalidArgumentError, match="recorder_entries is -1"):
        World(0, 1, recorder_entries=-1)


def test_how_many_it_keeps_can_be_chosen():
    run_ranks(kept, 1)


def different(rank, world_size):
    with pytest.raises(MismatchError, match=r"256 recorder entries, rank \d with 512|512 recorder entries"):
        join(rank, world_size, recorder_entries=256 << rank)


def test_ranks_that_chose_differently_are_told():
    run_ranks(different, 2)


def killed(rank, world_size):
    os.environ["PHALANX_DUMP"] = str(scratch())
    world, group = join(rank, world_size)
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDeadError):
        group.barrier()
    world.finalize()  # ends the thread that may still be writing
    (path,) = scratch().glob(f"phalanx-*-rank{rank}-*.json")
    dump = json.loads(path.read_text())
    assert dump["groups"][0]["error"]["status"] == "PHX_ERR_PEER_DEAD" and dump["groups"][0]["error"]["peer"] == 1
    assert dump["groups"][0]["members"][1]["process"] in ("exiting", "zombie", "gone")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failure_leaves_a_dump_where_the_environment_says():  # C7
    run_ranks(killed, 3, expect_exit={1: -signal.SIGKILL})
