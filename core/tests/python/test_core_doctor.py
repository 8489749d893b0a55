"""`phalanx doctor` as a whole: what it prints, what it tries on this host, and that it leaves nothing behind."""

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.core import doctor, ffi, lib
from phalanx.core.doctor import _host, _trials
from phalanx.core.doctor._host import Host, findings_of
from terminals import COLUMNS, on_terminal, shown, without_terminal

HERE = Host(ranks=2)


def only(look, host=HERE):
    (finding,) = findings_of(look, host)
    return finding


# ---- the report ---------------------------------------------------------------------------------


def test_doctor_says_what_the_host_offers(capsys):
    status = doctor.main(["-v"])
    lines = capsys.readouterr().out.splitlines()
    findings = {line[6:22].strip(): line[:4].strip() for line in lines[:-1] if not line.startswith(" ")}
    expected = ["python", "torch", "packages", "kernel", "container", "user namespace", "net namespace", "user"]
    expected += ["host id", "security", "ptrace", "pidfd", "memfd", "abstract sockets", "two processes", "membarrier"]
    expected += ["cores", "hyper-threads", "isa", "clock", "memory", "/dev/shm", "huge pages", "hugetlb", "numa"]
    expected += ["memory binding", "open files", "file size", "address space", "processes", "locked memory", "cuda"]
    expected += ["environment", "library", "compiler", "features", "tuning", "trial", "ucx", "host address"]
    for name in expected:
        assert findings[name] in ("ok", "warn"), lines
    levels = list(findings.values())
    assert lines[-1].endswith(f": {levels.count('ok')} ok, {levels.count('warn')} warn, 0 fail")
    assert status == 0


def test_what_is_wrong_comes_first_and_what_is_in_order_is_shown_on_request(monkeypatch, capsys):
    def check_all(host):
        yield doctor.Finding("ok", "sun", "shines", "look at it")
        yield doctor.Finding("warn", "clouds", "some", "wait")
        yield doctor.Finding("ok", "wind", "none")
        yield doctor.Finding("fail", "moon", "is not there", "come back at night")

    monkeypatch.setattr(doctor, "_CHECKS", (check_all,))
    wrong = [
        "fail  moon              is not there",
        "                        -> come back at night",
        "warn  clouds            some",
        "                        -> wait",
    ]
    summary = "ranks cannot work here: 2 ok, 1 warn, 1 fail"
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [*wrong, f"{summary} (`phalanx doctor -v` shows all)"]
    assert doctor.main(["-v"]) == 1
    rest = [
        "ok    sun               shines",
        "                        tip: look at it",
        "ok    wind              none",
    ]
    assert capsys.readouterr().out.splitlines() == [*wrong, *rest, summary]
    monkeypatch.setattr(doctor, "_CHECKS", ())
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.startswith("nothing is wrong: 0 ok")


def test_a_terminal_gets_colours_and_lines_of_its_width_and_nothing_else_does():
    variables = {"PHALANX_ISA": "nonesuch"}
    seen = on_terminal("doctor", "-v", **variables)
    assert seen.status == 0 and "\x1b[33mwarn\x1b[0m  isa" in seen.out and "\x1b[32mok  \x1b[0m  python" in seen.out
    too_long = [line for line in shown(seen.out).splitlines() if len(line) > COLUMNS]
    assert all(max(map(len, line[24:].split())) > COLUMNS - 30 for line in too_long)  # such as paths, which are not cut
    assert "\x1b" not in on_terminal("doctor", NO_COLOR="1", **variables).out
    plain = without_terminal("doctor", **variables)
    assert plain.text.startswith("warn") and "warn  isa" in plain.text and "\x1b" not in plain.text


def test_ctrl_c_ends_doctor_and_the_processes_of_its_trials(tmp_path):
    os.mkfifo(tmp_path / "ucx")  # to load it takes until somebody writes
    variables = {"PHALANX_UCX": str(tmp_path / "ucx")}
    seen = on_terminal("doctor", ctrl_c=lambda text, processes: len(processes) == 3, **variables)
    assert (seen.status, shown(seen.out)) == (130, "phalanx doctor: interrupted\n")
    assert (seen.processes, seen.files) == ([], [])


def test_doctor_writes_json(capsys):
    assert doctor.main(["--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"level", "name", "text", "advice"} == set(findings[0])
    library = next(each for each in findings if each["name"] == "library")
    assert library["text"].startswith(ffi.string(lib.phx_version()).decode())


def test_whatever_is_not_well_comes_with_advice():
    for finding in doctor.examine(10_000):
        assert finding.level == "ok" or finding.advice, finding
        assert len(finding.name) <= 16, finding


def test_doctor_reports_a_check_that_itself_breaks(monkeypatch):
    def check_moon(host):
        raise KeyError("phase")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (check_moon,))
    (finding,) = doctor.examine()
    assert (finding.level, finding.name) == ("fail", "moon")
    assert "phase" in finding.text


def test_the_number_of_ranks_is_given_or_that_of_torchrun_or_of_cores(monkeypatch):
    seen = []

    def check_ranks(host):
        seen.append(host.ranks)
        return iter(())

    monkeypatch.setattr(doctor, "_CHECKS", (check_ranks,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    assert doctor.main(["--ranks", "12"]) == 0
    doctor.main([])
    for no_number in ("", "many", "0"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", no_number)
        doctor.main([])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    doctor.main([])
    assert seen == [12, 7, 3, 3, 3, 2]


@pytest.mark.parametrize("words", ["0", "-1", "two"])
def test_what_is_no_number_of_ranks_is_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main([f"--ranks={words}"])
    assert caught.value.code == 2
    assert f"--ranks: expected a whole number of 1 or more, got '{words}'" in capsys.readouterr().err


def test_doctor_does_not_import_torch():
    code = "import sys; from phalanx.core import doctor; list(doctor.examine()); print('torch' in sys.modules)"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.stdout.split() == ["False"]


def test_namespaces_of_their_own_leave_ranks_in_order():
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("unshare, or the right to make namespaces, is missing")
    code = "import sys; from phalanx.core import doctor; sys.exit(doctor.main(['--json']))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*unshare, sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {each["name"]: each for each in json.loads(done.stdout)}
    for kind in ("user", "net", "pid", "ipc"):
        mine = os.readlink(f"/proc/self/ns/{kind}")
        assert not findings[f"{kind} namespace"]["text"].startswith(mine)
        assert findings[f"{kind} namespace"]["advice"]
    assert "mapped in a user namespace" in findings["user"]["text"]
    for name in ("memfd", "abstract sockets", "two processes", "trial"):
        assert findings[name]["level"] == "ok"


def test_doctor_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "tuning"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def held():
        gc.collect()
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        mapped = [line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
        return children, mapped, len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir("/dev/shm")

    list(doctor.examine())  # loads the library
    before = held()
    list(doctor.examine())
    assert held() == before
    assert list(tmp_path.iterdir()) == []


# ---- what it tries ------------------------------------------------------------------------------


def test_doctor_fails_where_memfds_do_not_work(monkeypatch, capsys):
    def forbidden(name, flags):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "fail  memfd" in text
    assert "allow memfd_create" in text


def test_seals_that_do_nothing_are_seen(monkeypatch):
    monkeypatch.setattr(_trials.fcntl, "fcntl", lambda *arguments: 0)
    finding = only(_trials.check_memfd)
    assert finding.level == "fail"
    assert "seals have no effect" in finding.text


def test_sockets_that_are_forbidden_are_seen(monkeypatch):
    def forbidden(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_trials.socket, "socket", forbidden)
    finding = only(_trials.check_sockets)
    assert (finding.level, finding.name) == ("fail", "abstract sockets")
    assert "Permission denied" in finding.text


def test_a_missing_pidfd_is_a_warning(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert only(_trials.check_pidfd).level == "warn"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise SystemExit('the sandbox forbids it')", "the sandbox forbids it"),
        ("import os; os._exit(3)", "exit status 3"),
    ],
)
def test_a_second_process_that_cannot_share_is_a_failure(monkeypatch, tmp_path, program, says):
    script = tmp_path / "peer.py"
    script.write_text(program)
    monkeypatch.setattr(_trials, "_PEER", script)
    finding = only(_trials.check_processes)
    assert finding.level == "fail"
    assert says in finding.text


def test_a_wake_that_does_not_come_is_a_failure(monkeypatch, tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import socket, sys\n"
        "with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:\n"
        "    connection.connect(chr(0) + sys.argv[2])\n"
        "    socket.recv_fds(connection, 1, 1)\n"
    )
    monkeypatch.setattr(_trials, "_PEER", script)
    monkeypatch.setattr(_trials, "_SECONDS", 1)
    finding = only(_trials.check_processes)
    assert finding.level == "fail"
    assert "no futex wake" in finding.text


def test_where_no_second_process_can_be_started_nothing_is_said_to_be_broken(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    finding = only(_trials.check_processes)
    assert finding.level == "warn"
    assert "could not be tried" in finding.text


def test_a_system_call_that_is_not_known_here_fails_with_its_name(monkeypatch):
    monkeypatch.setattr(_host.platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="membarrier on pdp11"):
        _host.system_call("membarrier", 0, 0, 0)


def test_ranks_that_cannot_share_memory_fail_the_trial():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        finding = only(_trials.check_trial)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert finding.level == "fail"
    assert "File too large" in finding.text


def test_ranks_that_compute_wrong_sums_fail_the_trial(monkeypatch):
    monkeypatch.setattr(_trials, "_trial_rank", lambda rank, store: (3.0 * 1024 - rank, 2 - rank, 1))
    finding = only(_trials.check_trial)
    assert finding.level == "fail"
    assert "wrong results" in finding.text
