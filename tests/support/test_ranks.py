"""The runner of the multi-rank tests keeps its promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks import RanksFailed, run_ranks, scratch

TEMPLATE_AND_FRESH = pytest.mark.parametrize("fresh", [False, True], ids=["default", "fresh"])


def identity(rank, world_size, *args):
    return rank, world_size, os.getpid(), args


def raises_on_one(rank, world_size):
    print("rank", rank, "was here")
    if rank == 1:
        raise ValueError("a text of rank 1")


def hangs(rank, world_size):
    while rank == 1:
        time.sleep(3600)


def kills_itself(rank, world_size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survivor"


def starts_a_process(rank, world_size):
    if rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        return child.pid
    return None


def variables(rank, world_size):
    return os.environ.get("PHX_TEST_A"), os.environ.get("PHX_TEST_B")


def writes_and_reads(rank, world_size):
    (scratch() / str(rank)).write_text(str(rank * rank))
    return scratch()


def leaves_a_file_descriptor(rank, world_size):
    os.open("/dev/null", os.O_RDONLY)


def leaves_a_mapping(rank, world_size):
    import mmap

    fd = os.memfd_create("left")
    os.truncate(fd, 4096)
    leaves_a_mapping.kept = mmap.mmap(fd, 4096)
    os.close(fd)


def leaves_nothing(rank, world_size):
    os.close(os.open("/dev/null", os.O_RDONLY))
    return rank


def exits(rank, world_size):
    sys.exit(0)


def sums_with_torch(rank, world_size):
    import torch
    import torch.distributed as dist

    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    return tensor.tolist()


@TEMPLATE_AND_FRESH
def test_every_rank_is_a_process_and_results_come_in_rank_order(fresh):
    results = run_ranks(identity, 3, "a", [1], fresh=fresh)
    assert [(rank, size, args) for rank, size, _, args in results] == [(r, 3, ("a", [1])) for r in range(3)]
    assert len({pid for _, _, pid, _ in results} | {os.getpid()}) == 4


@TEMPLATE_AND_FRESH
def test_an_exception_is_reported_with_traceback_output_and_rank(fresh):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raises_on_one, 2, fresh=fresh)
    assert list(caught.value.failures) == [1]
    assert "ValueError: a text of rank 1" in caught.value.failures[1]
    assert "raises_on_one" in caught.value.failures[1]
    assert "rank 1 was here" in caught.value.failures[1]


@TEMPLATE_AND_FRESH
def test_a_rank_that_hangs_is_killed_at_the_deadline_and_says_where_it_was(fresh):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hangs, 2, timeout=3, fresh=fresh)
    assert list(caught.value.failures) == [1]
    assert "deadline" in caught.value.failures[1]
    assert " in hangs" in caught.value.failures[1]


@TEMPLATE_AND_FRESH
def test_a_rank_that_is_killed_on_purpose_has_no_result(fresh):
    assert run_ranks(kills_itself, 2, expect_exit={0: -9}, fresh=fresh) == [None, "survivor"]


@TEMPLATE_AND_FRESH
def test_a_rank_that_is_killed_by_surprise_fails_the_run(fresh):
    with pytest.raises(RanksFailed, match="exit status -9 instead of 0"):
        run_ranks(kills_itself, 2, fresh=fresh)


def test_a_rank_that_should_have_died_but_returned_fails_the_run():
    with pytest.raises(RanksFailed, match="exit status 0 instead of -9"):
        run_ranks(kills_itself, 2, expect_exit={0: -9, 1: -9})


def test_a_rank_that_exits_before_it_returns_fails_the_run():
    with pytest.raises(RanksFailed, match="exited before fn returned"):
        run_ranks(exits, 1)


@TEMPLATE_AND_FRESH
def test_a_process_that_a_rank_leaves_behind_is_reported_and_killed(fresh):
    with pytest.raises(RanksFailed, match="left processes behind") as caught:
        run_ranks(starts_a_process, 2, fresh=fresh)
    assert list(caught.value.failures) == [0]


@TEMPLATE_AND_FRESH
def test_environment_variables_may_differ_between_ranks(fresh, monkeypatch):
    monkeypatch.setenv("PHX_TEST_B", "inherited")
    results = run_ranks(variables, 2, env=[{"PHX_TEST_A": "0"}, {"PHX_TEST_A": "1"}], fresh=fresh)
    assert results == [("0", "inherited"), ("1", "inherited")]
    assert run_ranks(variables, 1, env={"PHX_TEST_B": "own"}, fresh=fresh) == [(None, "own")]


def test_scratch_is_shared_by_the_ranks_and_removed():
    first, second = run_ranks(writes_and_reads, 2)
    assert first == second
    assert not Path(first).exists()


@TEMPLATE_AND_FRESH
@pytest.mark.parametrize(("fn", "word"), [(leaves_a_file_descriptor, "/dev/null"), (leaves_a_mapping, "memfd:left")])
def test_leaks_inside_a_rank_are_found_on_request(fn, word, fresh):
    run_ranks(fn, 1, fresh=fresh)
    with pytest.raises(RanksFailed, match=word):
        run_ranks(fn, 1, check_leaks=True, fresh=fresh)
    assert run_ranks(leaves_nothing, 2, check_leaks=True, fresh=fresh) == [0, 1]


def test_torch_distributed_is_ready_on_request():
    pytest.importorskip("torch", reason="torch is not installed")
    assert run_ranks(sums_with_torch, 2, start_torch=True) == [[3.0] * 3] * 2


def test_a_function_that_other_processes_cannot_import_is_refused():
    with pytest.raises(ValueError, match="not a function of a module"):
        run_ranks(lambda rank, world_size: None, 1)
