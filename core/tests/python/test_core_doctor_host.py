"""`phalanx doctor` on hosts and containers that are made of files."""

import os

import pytest

from phalanx.core.doctor import _host, _limits, _machine
from phalanx.core.doctor._host import MIB, Host, findings_of, parse_ranges, ranges, size

GIB = 1024 * MIB


@pytest.fixture
def fake(tmp_path):
    """Makes a host of files: path below the root to text. A path that begins with "->" is that of a link."""

    def make(files, ranks=2):
        for name, text in files.items():
            path = tmp_path / name.removeprefix("->")
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith("->"):
                path.symlink_to(text)
            else:
                path.write_text(text)
        return Host(ranks, tmp_path)

    return make


def only(look, host):
    (finding,) = findings_of(look, host)
    return finding


@pytest.fixture
def cores(monkeypatch):
    def use(*numbers):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(numbers))
        monkeypatch.setattr(os, "cpu_count", lambda: 64)

    return use


EVERY = (
    *(_machine.check_security, _machine.check_ptrace, _machine.check_clock),
    *(_machine.check_container, _machine.check_namespaces, _machine.check_user),
    *(_machine.check_cores, _machine.check_siblings),
    *(_limits.check_memory, _limits.check_dev_shm, _limits.check_huge_pages, _limits.check_hugetlb),
    *(_machine.check_nodes, _machine.check_binding),
)


@pytest.mark.parametrize("look", EVERY, ids=lambda look: look.__name__)
def test_where_nothing_can_be_read_nothing_is_wrong(look, fake, cores):
    cores(0, 1)
    findings = list(findings_of(look, fake({})))
    assert findings
    assert {finding.level for finding in findings} == {"ok"}


# ---- cores --------------------------------------------------------------------------------------


def test_more_ranks_than_cores_are_a_warning(fake, cores):
    cores(0, 1, 2, 7)
    finding = only(_machine.check_cores, fake({}, ranks=4))
    assert finding.level == "ok"
    assert finding.text == "64 cores, this process may use 4: 0-2,7; enough for 4 ranks"
    finding = only(_machine.check_cores, fake({}, ranks=5))
    assert finding.level == "warn"
    assert "run at most 4" in finding.advice


V2 = {"proc/self/cgroup": "0::/kubepods/pod1\n", "sys/fs/cgroup/kubepods/cpu.max": "150000 100000\n"}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n0::/\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["a group above this one, version 2", "a container, version 1"])
def test_a_quota_counts_as_cores(files, fake, cores):
    cores(*range(8))
    finding = only(_machine.check_cores, fake(files, ranks=2))
    assert finding.level == "warn"
    assert "cgroup quota 1.5" in finding.text
    assert "run at most 1" in finding.advice


def test_no_quota_is_no_limit(fake):
    host = fake({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"})
    assert _host.cpu_quota(host) is None
    host = fake({**V1, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"})
    assert _host.cpu_quota(host) is None


def test_hyper_threads_are_counted(fake, cores):
    cores(0, 1, 2, 3)
    pairs = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    files = {f"sys/devices/system/cpu/cpu{core}/topology/core_cpus_list": pair for core, pair in pairs.items()}
    finding = only(_machine.check_siblings, fake(files, ranks=4))
    assert finding.text == "the 4 cores are hyper-threads of 2 physical cores"
    assert "4 ranks share 2 physical cores" in finding.advice
    cores(0, 1)
    assert (
        only(_machine.check_siblings, fake({})).text == "each of these cores is a whole core: no hyper-thread siblings"
    )


# ---- namespaces, user, host id ------------------------------------------------------------------


def test_namespaces_of_the_host_are_told_from_others(fake):
    host = fake(
        {
            "->proc/self/ns/user": "user:[4026531837]",
            "->proc/self/ns/pid": "pid:[4026531836]",
            "->proc/self/ns/ipc": "ipc:[4026532999]",
            "->proc/self/ns/net": "net:[4026532008]",
            "->proc/1/ns/net": "net:[4026531992]",
        }
    )
    findings = {finding.name: finding for finding in _machine.check_namespaces(host)}
    assert findings["user namespace"].text == "user:[4026531837], the one of the host"
    assert findings["pid namespace"].advice == ""
    assert findings["ipc namespace"].text == "ipc:[4026532999], not the one of the host"
    assert findings["net namespace"].text == "net:[4026532008], not the one of the host"
    assert "count as different hosts" in findings["net namespace"].advice


def test_process_1_of_a_container_does_not_say_what_the_host_has(fake):
    host = fake(
        {
            "->proc/self/ns/pid": "pid:[4026532600]",
            "->proc/self/ns/net": "net:[4026532008]",
            "->proc/1/ns/net": "net:[4026532008]",
        }
    )
    findings = {finding.name: finding for finding in _machine.check_namespaces(host)}
    assert findings["pid namespace"].text == "pid:[4026532600], not the one of the host"
    assert findings["net namespace"].text == "net:[4026532008], unknown whether it is the one of the host"
    assert findings["user namespace"].text == "cannot be read"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/self/cgroup": "0::/kubepods.slice/x\n"}, "kubernetes"),
        ({}, "none seen"),
    ],
)
def test_a_container_is_recognised(files, text, fake, monkeypatch):
    for name in ("container", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert only(_machine.check_container, fake(files)).text == text


def test_a_mapped_user_is_shown_as_such(fake):
    assert "user namespace" not in only(_machine.check_user, fake({"proc/self/uid_map": "0 0 4294967295\n"})).text
    text = only(_machine.check_user, fake({"proc/self/uid_map": "         0       1000          1\n"})).text
    assert f"uid {os.geteuid()}, mapped in a user namespace (0 1000 1)" in text


def test_without_a_boot_id_hosts_may_be_mixed_up(fake, monkeypatch):
    monkeypatch.delenv("PHALANX_HOST_ID", raising=False)
    finding = only(_machine.check_host_id, fake({}))
    assert finding.level == "warn"
    assert "set PHALANX_HOST_ID" in finding.advice
    monkeypatch.setenv("PHALANX_HOST_ID", "17")
    assert only(_machine.check_host_id, fake({})).text == "17, from PHALANX_HOST_ID"
    monkeypatch.delenv("PHALANX_HOST_ID")
    assert "the boot id 0a1b" in only(_machine.check_host_id, fake({"proc/sys/kernel/random/boot_id": "0a1b\n"})).text


# ---- the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clock", "level"), [("tsc", "ok"), ("kvm-clock", "ok"), ("hpet", "warn"), ("acpi_pm", "warn")]
)
def test_a_clock_that_is_slow_to_read_is_a_warning(clock, level, fake):
    folder = "sys/devices/system/clocksource/clocksource0"
    files = {f"{folder}/current_clocksource": f"{clock}\n", f"{folder}/available_clocksource": "tsc hpet acpi_pm \n"}
    finding = only(_machine.check_clock, fake(files))
    assert (finding.level, finding.text.split(",")[0]) == (level, clock)
    assert ("tsc, hpet, acpi_pm" in finding.advice) == (level == "warn")


def test_what_guards_the_process_is_noted(fake):
    files = {
        "proc/self/status": "Name:\tpython\nNoNewPrivs:\t1\nSeccomp:\t2\n",
        "proc/self/attr/current": "docker-default (enforce)\n\0",
        "sys/fs/selinux/enforce": "0",
    }
    finding = only(_machine.check_security, fake(files))
    assert finding.text == "seccomp filter, no new privileges, docker-default (enforce), SELinux permissive"


def test_the_scope_of_ptrace_is_noted(fake):
    text = only(_machine.check_ptrace, fake({"proc/sys/kernel/yama/ptrace_scope": "1\n"})).text
    assert text.startswith("yama 1: only a parent may attach")


@pytest.mark.parametrize("answer", [0, OSError(1, "Operation not permitted")])
def test_without_membarrier_there_is_a_warning(answer, fake, monkeypatch):
    def refuse(name, *arguments):
        assert name == "membarrier"
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(_machine, "system_call", refuse)
    finding = only(_machine.check_membarrier, fake({}))
    assert (finding.level, finding.name) == ("warn", "membarrier")


def test_another_system_than_linux_is_a_failure(fake, monkeypatch):
    monkeypatch.setattr(_machine.platform, "system", lambda: "Plan 9")
    assert only(_machine.check_kernel, fake({})).level == "fail"


# ---- memory -------------------------------------------------------------------------------------

MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"}


def test_little_memory_is_a_warning(fake):
    assert only(_limits.check_memory, fake(MEMINFO)).text == "8 GiB available of 16 GiB"
    finding = only(_limits.check_memory, fake({"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 100000 kB\n"}))
    assert finding.level == "warn"
    assert "free some" in finding.advice
    assert only(_limits.check_memory, fake(MEMINFO, ranks=5000)).level == "warn"


def test_what_the_cgroup_leaves_counts(fake):
    group = "sys/fs/cgroup/job"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/job/step\n",
        f"{group}/step/memory.max": "max\n",
        f"{group}/memory.max": f"{GIB}\n",
        f"{group}/memory.current": f"{GIB - 100 * MIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {50 * MIB}\n",
    }
    finding = only(_limits.check_memory, fake(files))
    assert finding.level == "warn"
    assert "150 MiB left of the cgroup's 1 GiB" in finding.text
    assert "limit of the container" in finding.advice
    version1 = {
        "proc/self/cgroup": "4:memory:/docker/4f\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    assert _host.memory_limit(fake(version1)) == (2 * GIB, GIB + GIB // 2)
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert _host.memory_limit(fake({**version1, **unlimited})) is None


def test_processes_of_the_cgroup_are_counted(fake):
    host = fake(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/pids.max": "max\n",
            "sys/fs/cgroup/a/pids.max": "100\n",
            "sys/fs/cgroup/a/pids.current": "60\n",
        }
    )
    assert _host.process_limit(host) == (100, 60)


def test_a_missing_dev_shm_is_only_a_note(fake):
    finding = only(_limits.check_dev_shm, fake({}))
    assert finding.level == "ok"
    assert finding.text.startswith("not usable")
    assert "DataLoader" in finding.advice


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        ("always within_size advise [never] deny force", "echo advise"),
        ("always within_size [advise] never deny force", ""),
        ("always within_size advise never [deny] force", "echo advise"),
    ],
)
def test_huge_pages_for_shared_memory_are_worth_a_hint(mode, advice, fake):
    folder = "sys/kernel/mm/transparent_hugepage"
    host = fake({f"{folder}/shmem_enabled": mode, f"{folder}/enabled": "always [madvise] never\n"})
    finding = only(_limits.check_huge_pages, host)
    assert finding.text.startswith("for ordinary memory madvise, for shared memory ")
    assert advice in finding.advice and bool(advice) == bool(finding.advice)


def test_huge_pages_that_are_switched_off_for_the_process_are_seen(fake):
    files = {
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "[advise]",
        "proc/self/status": "THP_enabled:\t0\n",
    }
    assert "switched off for this process" in only(_limits.check_huge_pages, fake(files)).text


def test_memory_that_is_reserved_for_hugetlb_is_lost(fake):
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {**MEMINFO, f"{folder}/nr_hugepages": "1024\n", f"{folder}/free_hugepages": "1000\n"}
    finding = only(_limits.check_hugetlb, fake(files))
    assert (finding.level, finding.text) == ("ok", "1024 of 2 MiB, 1000 free")
    assert only(_limits.check_hugetlb, fake({f"{folder}/nr_hugepages": "5000\n"})).level == "warn"


# ---- NUMA ---------------------------------------------------------------------------------------

TWO_NODES = {
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "proc/self/status": "Mems_allowed_list:\t0-1\n",
}


def test_nodes_and_their_cores_are_listed(fake, cores):
    cores(0, 1, 4)
    finding = only(_machine.check_nodes, fake(TWO_NODES))
    assert finding.level == "ok"
    assert "2 nodes: node 0 has cores 0-3; node 1 has cores 4-7" in finding.text
    assert "bind ranks" in finding.advice
    cores(5, 6)
    finding = only(_machine.check_nodes, fake({}))
    assert finding.text.endswith("this process uses node 1") and finding.advice == ""


def test_cores_without_their_memory_are_a_warning(fake, cores):
    cores(0, 4)
    finding = only(_machine.check_nodes, fake({**TWO_NODES, "proc/self/status": "Mems_allowed_list:\t0\n"}))
    assert finding.level == "warn"
    assert "cores of node 1" in finding.advice


def test_one_node_is_no_question(fake):
    files = {"sys/devices/system/node/online": "0\n", "sys/devices/system/node/node0/cpulist": "0-3\n"}
    assert only(_machine.check_nodes, fake(files)).text == "one node, cores 0-3"


def test_binding_that_is_forbidden_is_a_note(fake, monkeypatch):
    def refuse(name, *arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(_machine, "system_call", refuse)
    finding = only(_machine.check_binding, fake(TWO_NODES))
    assert finding.level == "ok"
    assert "SYS_NICE" in finding.advice


def test_binding_to_a_node_that_does_not_exist_fails_without_harm(fake):
    finding = only(_machine.check_binding, fake({"proc/self/status": "Mems_allowed_list:\t1000\n"}))
    assert finding.level == "ok"
    assert "does not work" in finding.text


# ---- the small tools ----------------------------------------------------------------------------


def test_lists_of_numbers_go_both_ways():
    assert parse_ranges("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert parse_ranges(None) == parse_ranges("") == parse_ranges("none") == []


def test_sizes_are_readable():
    assert [size(number) for number in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        *("0 bytes", "1023 bytes", "1.5 KiB", "5 MiB", "3 TiB")
    ]


def test_a_failed_system_call_raises_its_errno():
    with pytest.raises(OSError, match="Invalid argument"):
        _host.system_call("membarrier", -1, 0, 0)
