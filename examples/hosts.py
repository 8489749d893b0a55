"""Two hosts of two ranks each, in C: hosts.c, in two network namespaces that a virtual cable joins.

Each namespace has its own interfaces, so ranks in different ones count as ranks of different hosts. It needs root, ip,
a C compiler and UCX, and says so where one of them is missing.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.core import ffi, lib

SOURCE = Path(__file__).with_name("hosts.c")
ADDRESSES, RANKS_OF_HOST, PORT, SECONDS = ("10.213.9.1", "10.213.9.2"), 2, "29500", 60


def missing() -> str:
    if os.geteuid() != 0:
        return "this example needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "this example needs ip (Debian: iproute2)"
    if compiler() is None:
        return "this example needs a C compiler (cc, gcc or clang)"
    text, size = ffi.new("char[]", 4096), ffi.new("size_t *")  # lines "name: value"
    lib.phx_ucx_describe(text, len(text), size)
    problem: str = ffi.string(text).decode().partition("\nproblem: ")[2]
    return problem.splitlines()[0]


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compiled(folder: str) -> str:
    include, lib = (
        subprocess.run([sys.executable, "-m", "phalanx.core", what], check=True, capture_output=True, text=True)
        for what in ("--include-dir", "--lib-dir")
    )
    library = Path(os.environ.get("PHALANX_LIBRARY") or Path(lib.stdout.strip(), "libphalanx.so.0"))
    program = os.path.join(folder, "hosts")
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-I", include.stdout.strip()]
    subprocess.run(
        [str(compiler()), *flags, str(SOURCE), "-o", program, str(library), f"-Wl,-rpath,{library.parent}"], check=True
    )
    return program


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names of two network namespaces, with a cable from eth0 of one to eth0 of the other."""
    names = [f"phalanx-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        deadline = time.monotonic() + SECONDS
        while not all(" state UP " in ip("-n", name, "-o", "link", "show", "eth0") for name in names):
            assert time.monotonic() < deadline, "the cable does not come up"
            time.sleep(0.01)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def main() -> int:
    if need := missing():
        print(f"skipped: {need}")
        return 0
    environment = {**os.environ, "PHALANX_EXAMPLE_TOKEN": secrets.token_hex(16)}
    size = len(ADDRESSES) * RANKS_OF_HOST
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        program = compiled(folder)
        try:
            hosts = stack.enter_context(two_hosts())
        except subprocess.CalledProcessError as error:
            print(f"skipped: no network namespaces can be made here: {error.stderr.strip()}")
            return 0
        ranks = []
        for rank in range(size):
            command = ["ip", "netns", "exec", hosts[rank // RANKS_OF_HOST], program]
            command += [ADDRESSES[0], PORT, str(rank), str(size)]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)  # one that has ended is left alone
            ranks.append(process)
        output = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    print("".join(output), end="")
    assert all(process.returncode == 0 for process in ranks)
    assert output == [f"rank {rank} of 4 on 2 host(s): 10.0\n" for rank in range(size)]
    return 0


if __name__ == "__main__":
    sys.exit(main())
