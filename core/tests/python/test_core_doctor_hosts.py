"""What `phalanx doctor` says of groups that span hosts, and how UCX is found that came as a wheel."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from phalanx.core import World, _ucx
from phalanx.core.doctor import _trials
from phalanx.core.doctor._host import Host

HERE = Host(ranks=2)
FOUND = {
    "path": "/usr/lib/libucp.so.0",
    "version": "1.13.1",
    "transports": "tcp/eth0",
    "problem": "",
    "address": "10.0.0.1",
    "address problem": "",
}


def findings(monkeypatch=None, found=None, trial=None):
    if found is not None:
        monkeypatch.setattr(_trials, "_try_hosts", lambda: (FOUND | found, trial))
    return {finding.name: finding for finding in _trials.check_hosts(HERE)}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A package `libucx` as the wheel has it; importing it fails. Gives its directory of libraries."""
    libraries = tmp_path / "libucx" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libucp.so.0").write_bytes(b"")
    (tmp_path / "libucx" / "__init__.py").write_text("raise AssertionError('this package must not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return libraries


# ---- UCX of the wheel -----------------------------------------------------------------------------


def test_the_directory_of_the_wheel_is_found_without_an_import(installed):
    assert _ucx.wheel_directory() == installed
    assert "libucx" not in sys.modules
    (installed / "libucp.so.0").unlink()
    assert _ucx.wheel_directory() is None


def test_the_first_world_tells_the_core_where_the_wheel_is(installed, monkeypatch):
    told = []
    monkeypatch.setattr(_ucx, "lib", SimpleNamespace(phx_ucx_set_directory=lambda path: told.append(path) or 0))
    _ucx.use_wheel.cache_clear()
    try:
        with World(0, 1), World(0, 1):
            pass
    finally:
        _ucx.use_wheel.cache_clear()
    assert told == [str(installed).encode()]


def test_importing_the_core_does_not_look_for_ucx():
    code = "import phalanx.core; phalanx.core.lib; import sys; sys.exit('phalanx.core._ucx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what the doctor says -------------------------------------------------------------------------


def test_two_processes_that_count_as_two_hosts_are_tried():
    found = findings()
    assert found["host address"].level in ("ok", "warn")
    if not found["ucx"].text.startswith("not found"):
        assert found["ucx"].level == "ok" and "libucp.so" in found["ucx"].text and "transports" in found["ucx"].text
        assert found["two hosts"].level == "ok" and "reduced 1 MiB over UCX in" in found["two hosts"].text
    else:
        assert "two hosts" not in found and "apt install libucx0" in found["ucx"].advice


def test_a_wished_ucx_that_is_not_there_is_a_warning(monkeypatch):
    monkeypatch.setenv("PHALANX_UCX", "/nonexistent/libucp.so.0")
    found = findings()
    assert found["ucx"].level == "warn" and "/nonexistent/libucp.so.0" in found["ucx"].text
    assert "unset PHALANX_UCX" in found["ucx"].advice
    assert "two hosts" not in found


def test_an_interface_that_is_not_there_is_a_warning_with_those_that_are(monkeypatch):
    monkeypatch.setenv("PHALANX_SOCKET_IFNAME", "nonesuch7")
    address = findings()["host address"]
    assert address.level == "warn" and "nonesuch7" in address.text and "there are: " in address.text
    monkeypatch.setenv("PHALANX_SOCKET_IFNAME", "nonesuch7,lo")
    assert findings()["host address"].text == "127.0.0.1, the loopback; no other is known"


def test_without_ucx_nothing_is_wrong_and_it_is_said_what_to_install(monkeypatch):
    monkeypatch.delenv("PHALANX_UCX", raising=False)
    found = findings(monkeypatch, {"path": "", "problem": "there is no usable UCX: ..."})
    assert (found["ucx"].level, found["ucx"].text) == ("ok", "not found")
    assert "pip install libucx-cu12" in found["ucx"].advice


def test_a_ucx_that_makes_no_context_is_a_warning(monkeypatch):
    found = findings(monkeypatch, {"problem": "UCX: making a context failed: No such device"})
    assert found["ucx"].level == "warn" and "No such device" in found["ucx"].text


def test_a_trial_that_fails_is_a_warning_with_its_error(monkeypatch):
    found = findings(monkeypatch, {}, {"error": "rank 1 is gone", "us": 0})
    assert found["ucx"].level == "ok"
    assert found["two hosts"].level == "warn" and "rank 1 is gone" in found["two hosts"].text


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise SystemExit('no such driver')", "no such driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("print('[1] UCX WARN something')", "UCX WARN something"),
        ("import time; time.sleep(60)", "timed out"),
    ],
    ids=["error", "crash", "words", "hang"],
)
def test_a_ucx_that_crashes_or_hangs_harms_nothing(monkeypatch, program, says):
    monkeypatch.setattr(_trials, "_HOST", program)
    monkeypatch.setattr(_trials, "_HOST_SECONDS", 2)
    (finding,) = _trials.check_hosts(HERE)
    assert (finding.level, finding.name) == ("warn", "ucx")
    assert says in finding.text


def test_a_host_of_the_trial_ends_with_doctor(tmp_path):
    # Ctrl-C may come when the process has been started, and doctor has no note of it yet: it asks for its parent.
    words = [sys.executable, "-P", "-c", _trials._HOST, "1", "0", str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
