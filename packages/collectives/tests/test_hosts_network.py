"""Groups on two hosts of two ranks each: network namespaces, with a cable between them, and torchrun in each."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import c10d_groups

PROGRAM = Path(__file__).with_name("test_hosts.py")
SUPPORT = Path(c10d_groups.__file__).parent
SECONDS = 120  # for everything


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of two network namespaces, each with a loopback and one end of a cable, at 10.213.7.1 and .2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip (Debian: iproute2) to make network namespaces")
    c10d_groups.needs_ucx()
    names = [f"phx-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "phx0", "netns", names[0], "type", "veth", "peer", "name", "phx0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.strip()}")
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "phx0")
            ip("-n", name, "link", "set", "phx0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def launch(hosts, folder, what):
    """torchrun on every host. The environment names no host: that two ranks share one is found out."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "phx0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["PHALANX_NATIVE"] = c10d_groups.native_folder()
    environment.pop("PHALANX_HOST_ID", None)
    started = []
    for i, host in enumerate(hosts):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={i}"]
        command += ["--nproc-per-node=2", "--master-addr=10.213.7.1", "--master-port=29517", str(PROGRAM)]
        with open(folder / f"output.{i}", "w") as output:
            inside = ["ip", "netns", "exec", host, *command, str(folder), what]
            started.append(subprocess.Popen(inside, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return started


def finish(started, folder):
    deadline = time.monotonic() + SECONDS
    try:
        codes = [each.wait(max(1, deadline - time.monotonic())) for each in started]
    finally:
        for each in started:  # torchrun ends its ranks when it is asked to
            if each.poll() is None:
                each.terminate()
                each.wait(30)
    output = "\n".join((folder / f"output.{i}").read_text() for i in range(len(started)))
    assert codes == [0] * len(started), output
    return output


def await_files(folder, names, started):
    deadline = time.monotonic() + SECONDS
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline and all(each.poll() is None for each in started), [
            (folder / f"output.{i}").read_text() for i in range(len(started))
        ]
        time.sleep(0.01)


@pytest.mark.slow
def test_torchrun_starts_two_hosts_which_compute_what_one_does(hosts, tmp_path):
    finish(launch(hosts, tmp_path, "whole"), tmp_path)


@pytest.mark.slow
def test_a_cable_that_is_cut_in_a_collective_is_an_error_on_every_rank(hosts, tmp_path):
    started = launch(hosts, tmp_path, "cut")
    await_files(tmp_path, [f"ready.{rank}" for rank in range(4)], started)
    ip("-n", hosts[1], "link", "set", "phx0", "down")
    await_files(tmp_path, [f"error.{rank}" for rank in range(4)], started)
    texts = [(tmp_path / f"error.{rank}").read_text() for rank in range(4)]
    ip("-n", hosts[1], "link", "set", "phx0", "up")  # torchrun itself cannot end in good order without it
    finish(started, tmp_path)
    for rank, text in enumerate(texts):  # the ranks that cannot be reached are named
        assert re.search(r"rank(\(s\))? [23]" if rank < 2 else r"rank(\(s\))? [01]", text), texts
