"""`phalanx doctor` on limits of the process, against what ranks need."""

import os
import resource
from pathlib import Path

import pytest

from phalanx.core import FileStore, World
from phalanx.core.doctor import _limits
from phalanx.core.doctor._host import Host, findings_of
from ranks import run_ranks, scratch


def only(look, host):
    (finding,) = findings_of(look, host)
    return finding


@pytest.fixture
def limits(monkeypatch):
    """Sets what getrlimit says, (soft, hard) by name; the others have no limit."""

    def use(**pairs):
        none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        by_number = {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in pairs.items()}
        monkeypatch.setattr(resource, "getrlimit", lambda which: by_number.get(which, none))

    return use


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "level", "advice"),
    [
        (1024, 4096, 2, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, "ok", ""),
        (256, 4096, 2, "warn", "ulimit -n 4096"),
        (256, 256, 2, "warn", "limits.conf"),
        (1024, resource.RLIM_INFINITY, 1000, "fail", "ulimit -n 9028"),
    ],
)
def test_open_files_are_compared_with_what_ranks_need(limits, soft, hard, ranks, level, advice):
    limits(NOFILE=(soft, hard))
    finding = only(_limits.check_files, Host(ranks))
    assert finding.level == level
    assert advice in finding.advice and bool(advice) == bool(finding.advice)


def test_small_files_and_address_spaces_are_no_place_for_groups(limits):
    limits(FSIZE=(1 << 20, 1 << 20), AS=(20 << 20, 20 << 20))
    for look, name in ((_limits.check_file_size, "file size"), (_limits.check_address_space, "address space")):
        finding = only(look, Host(8))
        assert (finding.level, finding.name) == ("fail", name)
    limits(FSIZE=(1 << 30, 1 << 30), AS=(1 << 34, 1 << 34))
    assert only(_limits.check_file_size, Host(8)).level == "warn"
    assert only(_limits.check_address_space, Host(8)).level == "warn"


@pytest.mark.parametrize(("most", "level"), [(10, "fail"), (100, "warn"), (1000, "ok")])
def test_threads_are_counted(limits, tmp_path, most, level):
    limits(NPROC=(most, most))
    assert only(_limits.check_processes, Host(8, tmp_path)).level == level


def test_the_limit_of_the_cgroup_on_threads_counts(limits, tmp_path):
    limits()
    for name, text in {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/pids.max": "100\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert only(_limits.check_processes, Host(2, tmp_path)).level == "ok"
    (tmp_path / "sys/fs/cgroup/a/pids.current").write_text("97\n")
    finding = only(_limits.check_processes, Host(2, tmp_path))
    assert finding.level == "fail"
    assert "100 of the cgroup, which has 97" in finding.text


def meet_and_count(rank, world_size):
    """What one rank holds more once it has a group, the bytes of its part of the group, and of how many it maps one."""
    before = set(os.listdir("/proc/self/fd"))
    with World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000) as world:
        group = world.create_group("all", range(world_size))
        group.barrier()
        held = len(set(os.listdir("/proc/self/fd")) - before)
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:phalanx-group" in line]
        first, last = (int(word, 16) for word in lines[0].split()[0].split("-"))
        group.barrier()
    return held, last - first, len(lines)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_what_ranks_are_said_to_need_is_what_they_take(world_size):
    for held, segment, mapped in run_ranks(meet_and_count, world_size):
        assert held == _limits.descriptors(world_size)
        assert mapped == world_size
        assert 0 <= _limits.segment_bytes(world_size) - segment <= 128 << 10
