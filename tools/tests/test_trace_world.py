"""phalanx trace on dumps of real ranks."""

import json
import os

import pytest

from phalanx.core import FileStore, MismatchError, RevokedError, World, _cli
from ranks import run_ranks, scratch


def join(rank, world_size):
    world = World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=60_000)
    return world, world.create_group("tp", range(world_size))


def verdicts(capture):
    return [line.removeprefix("verdict: ") for line in capture.splitlines() if line.startswith("verdict: ")]


def late(rank, world_size, folder):
    world, group = join(rank, world_size)
    data = bytearray(64)
    for _ in range(300):  # more than the recorder keeps
        group.all_reduce(data, dtype="int32")
    seen = FileStore(scratch() / "seen")
    if rank == 2:
        seen.wait(["0", "1"], 60_000)
        with open(f"{folder}/2.json", "w") as file:
            file.write(world.dump())
        seen.set("2", "dumped")
        group.broadcast(data, dtype="uint8", root_group_rank=0)
    else:
        work = group.broadcast(data, dtype="uint8", root_group_rank=0, blocking=False)
        seen.set(str(rank), "started")
        seen.wait(["2"], 60_000)
        work.wait()
    group.barrier()
    with open(f"{folder}/{rank}-after.json", "w") as file:
        file.write(world.dump())
    seen.set(f"after {rank}", "dumped")
    seen.wait([f"after {each}" for each in range(world_size)], 60_000)  # a barrier would be seen to be under way
    world.finalize()
    return os.getpid()


def test_the_rank_that_did_not_come_is_named(tmp_path, capsys):
    pids = run_ranks(late, 3, str(tmp_path))
    assert _cli.main(["trace", f"{tmp_path}/2.json"]) == 0
    (verdict,) = verdicts(capsys.readouterr().out)
    assert verdict.startswith(f"group 'tp': rank 2 (pid {pids[2]}, running) has not started broadcast #301, for which ")
    # All dumps together: the broadcast was completed, and the oldest collectives are forgotten.
    files = sorted(str(path) for path in tmp_path.iterdir())
    chrome, picture = f"{tmp_path}/chrome", f"{tmp_path}/picture.svg"
    assert len(files) == 4 and _cli.main(["trace", *files, "--chrome", chrome, "--picture", picture]) == 0
    out = capsys.readouterr().out
    assert verdicts(out) == ["nothing is stuck; what was started is completed on all ranks"]
    assert "broadcast(uint8, 64, root 0)" in out and "barrier()" in out
    with open(chrome) as file:
        events = json.load(file)["traceEvents"]
    named = [event["pid"] for event in events if event["name"] == "broadcast #301"]
    assert sorted(named) == [0, 1, 2]


def differ(rank, world_size, folder):
    world, group = join(rank, world_size)
    call = group.barrier if rank == 1 else lambda: group.all_reduce(bytearray(64), dtype="int32")
    with pytest.raises((MismatchError, RevokedError)):
        call()
    with open(f"{folder}/{rank}.json", "w") as file:
        file.write(world.dump())
    world.finalize()


def test_calls_that_differ_are_named_from_the_dump_of_any_rank(tmp_path, capsys):
    run_ranks(differ, 2, str(tmp_path))
    for rank in range(2):
        assert _cli.main(["trace", f"{tmp_path}/{rank}.json"]) == 0
        out = capsys.readouterr().out
        assert "group 'tp'" in out and ": failed\n  first error: PHX_ERR_MISMATCH in " in out
        (verdict,) = verdicts(out)
        assert "the ranks called different things as #1: " in verdict
        assert "rank 0 called all_reduce(int32, 16, sum)" in verdict and "rank 1 called barrier()" in verdict
