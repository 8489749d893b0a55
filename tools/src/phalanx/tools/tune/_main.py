"""`phalanx tune`: measures which algorithm is fastest at which size, and writes the table that groups read."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core import PeerDeadError
from phalanx.core.commands import CommandError, Parser
from phalanx.core.doctor import ask_cuda_driver
from phalanx.core.tuning import NEVER, table_path
from phalanx.tools._arguments import new_file, positive_number, short, size_between
from phalanx.tools._progress import Progress

SECONDS = 60.0
_MAX_RANKS = 64
_START_SECONDS = 120.0
_END_SECONDS = 10.0  # how long the other ranks may take to end after one has failed
_RANKS = {  # by device, what a rank runs
    "cpu": "from phalanx.tools.tune._cpu_rank import main; main()",
    "cuda": "from phalanx.tools.tune._gpu_rank import main; main()",
}


class TuneError(CommandError):
    """A rank failed, or there is no GPU."""


def main(argv: list[str]) -> int:
    """Measure, print what was chosen, write the table.

    Args:
        argv: Arguments after "tune".

    Returns:
        Exit status 0.

    Raises:
        TuneError: Something failed.
    """
    made = parser()
    given = made.parse_args(argv)
    path = given.output or table_path()
    writes = not given.dry_run and not given.show
    if path is None and writes:
        made.error("neither PHALANX_TUNING nor HOME says where the table is: give --output FILE, or --dry-run")
    cores = sorted(os.sched_getaffinity(0))
    gpus = _gpus() if given.device == "cuda" else []
    sizes = given.ranks or (default_ranks(len(cores)) if not gpus else default_ranks_of_gpus(len(gpus)))
    seconds = 0.0 if given.show else given.seconds / len(sizes)
    result: dict[str, Any] = {"table": path and str(path), "device": given.device, "written": False, "groups": []}
    # What was printed goes above the bar; a program reads one object at the end.
    with Progress("phalanx tune", seconds * len(sizes)) as progress:
        say = (lambda text: None) if given.json else progress.say
        say(f"table: {path or 'none'}{'' if path is not None and path.exists() else ' (does not exist)'}")
        for number, ranks in enumerate(sizes):
            plan = {"seconds": seconds, "largest": given.largest, "save": writes, "path": path and str(path)}
            plan |= {"device": given.device, "gpus": len(gpus)}
            progress.title(f"phalanx tune, {ranks} ranks")
            reached = partial(_reach, progress, number * seconds, seconds)
            answer = _run(ranks, cores, plan, path if given.show else None, reached)
            result["groups"].append({"ranks": ranks} | answer)
            say(f"\n{ranks} ranks on " + (_on_gpus(ranks, gpus) if gpus else f"{min(ranks, len(cores))} cores"))
            say(_present(answer) if given.show else _chosen(answer))
    result["written"] = writes
    if given.json:
        print(json.dumps(result, indent=2))
    elif not given.show:
        print(f"\nwrote {path}: {_users(path)}" if writes else "\nnothing was written")
    return 0


def _reach(progress: Progress, before: float, planned: float, seconds: float) -> None:
    progress.reach(before + min(seconds, planned))


def _users(path: Path | None) -> str:
    """Which groups use the table that was written."""
    usual = table_path()
    if path is not None and usual is not None and path.resolve() == usual.resolve():
        return "new groups use it"
    return f"groups use it where the environment variable PHALANX_TUNING is {path}"


def default_ranks(cores: int) -> list[int]:
    """Group sizes to measure where so many cores may be used: at most eight, and the powers of two above."""
    sizes = {2, 4, *range(2, min(cores, 8) + 1), cores, *(1 << i for i in range(3, cores.bit_length()))}
    return sorted(size for size in sizes if 2 <= size <= min(max(cores, 4), _MAX_RANKS))


def default_ranks_of_gpus(gpus: int) -> list[int]:
    """Group sizes to measure on so many GPUs: one rank for each of them, or two that share the only one."""
    return [size for size in default_ranks(gpus) if size <= gpus] or [2]


def _gpus() -> list[str]:
    """The names of the GPUs that this process sees.

    Raises:
        TuneError: There is none.
    """
    found = ask_cuda_driver()
    if "missing" in found:
        raise TuneError(f"there is no CUDA driver on this host ({found['missing']})")
    if "trouble" in found:
        raise TuneError(f"the CUDA driver cannot be used: {found['trouble']}")
    if found["status"] != 0:
        raise TuneError(f"the CUDA driver cannot be used: cuInit says {found['status']} ({found['reason']})")
    names = [device["name"] for device in found["devices"]]
    if not names:
        raise TuneError("the CUDA driver sees no device: CUDA_VISIBLE_DEVICES may hide them")
    return names


def _on_gpus(ranks: int, gpus: list[str]) -> str:
    """Where ranks are, whose numbers go round the GPUs."""
    used = gpus[:ranks]
    names = ", ".join(dict.fromkeys(used))
    return f"{len(used)} GPU{'s' if len(used) > 1 else ''}{', shared' if ranks > len(gpus) else ''} ({names})"


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx tune`."""
    made = Parser(
        prog="phalanx tune",
        description="Measure which algorithm is fastest at which size on this host, or on its GPUs, and write the "
        "table that new groups read. A value replaces the built-in one only if it is faster by more than 3 percent. "
        "Ctrl-C ends it; what was written for earlier group sizes stays.",
    )
    add = made.add_argument
    add("--device", choices=list(_RANKS), default="cpu", help="memory of the CPU (default) or of NVIDIA GPUs")
    add(
        "--ranks",
        type=_ranks,
        metavar="N,...",
        help="group sizes to measure (default: 2 up to the number of cores, and 4; with --device cuda 2 up to the "
        "number of GPUs)",
    )
    add(
        "--seconds",
        type=positive_number,
        default=SECONDS,
        metavar="S",
        help=f"time for all measurements together (default {SECONDS:.0f})",
    )
    add(
        "--largest",
        type=_size,
        default="32m",
        metavar="BYTES",
        help="largest input to measure, 64k to 1g (default 32m)",
    )
    add(
        "--output",
        type=new_file,
        metavar="FILE",
        help="write this file (default: the table that new groups read, which is the one of PHALANX_TUNING, else "
        "phalanx/tuning in the user's cache directory)",
    )
    add("--dry-run", action="store_true", help="measure, and write nothing")
    add("--show", action="store_true", help="measure nothing, and print the values that new groups have now")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return made


def _ranks(text: str) -> list[int]:
    try:
        sizes = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, such as 2,4; got {text!r}") from None
    if not all(2 <= size <= _MAX_RANKS for size in sizes):
        raise argparse.ArgumentTypeError(f"expected 2 to {_MAX_RANKS} ranks, got {text!r}")
    return sizes


def _size(text: str) -> int:
    return size_between(1 << 16, 1 << 30)(text) // 4096 * 4096


# ---- ranks --------------------------------------------------------------------------------------


def _run(
    ranks: int, cores: list[int], plan: dict[str, Any], table: Path | None, reached: Callable[[float], None]
) -> dict[str, Any]:
    """Let ranks do what the plan says, each on a core of its own as far as there are any.

    Args:
        ranks: How many.
        cores: To pin them to, in turns.
        plan: For `_cpu_rank` or `_gpu_rank`.
        table: To be read by the group, instead of the usual one.
        reached: Called again and again with the seconds that they have run.

    Returns:
        What rank 0 says.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-tune-") as folder:
        logs = [Path(folder, f"log.{rank}") for rank in range(ranks)]
        common = plan | {"ranks": ranks, "cores": cores, "store": str(Path(folder, "store")), "parent": os.getpid()}
        # The ranks find this package as this process does.
        paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths}
        if table is not None:
            environment["PHALANX_TUNING"] = str(table)
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                with logs[rank].open("w") as errors:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-c", _RANKS[plan["device"]], json.dumps(common | {"rank": rank})],
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            env=environment,
                            text=True,
                            start_new_session=True,
                        )
                    )
            _await(processes, _START_SECONDS + 5 * plan["seconds"], logs, reached)
            output = processes[0].stdout
            assert output is not None
            answer: dict[str, Any] = json.loads(output.read())
            return answer
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def _await(
    processes: list[subprocess.Popen[str]], limit: float, logs: list[Path], reached: Callable[[float], None]
) -> None:
    """Wait until all have ended well, for at most so many seconds.

    Raises:
        TuneError: One did not.
    """
    began = time.monotonic()
    while True:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            raise TuneError(_first_cause(processes, logs))
        if all(status == 0 for status in statuses):
            return
        if time.monotonic() > began + limit:
            raise TuneError(f"measuring timed out after {limit:.0f} s; is the machine overloaded?")
        reached(time.monotonic() - began)
        time.sleep(0.02)


def _first_cause(processes: list[subprocess.Popen[str]], logs: list[Path]) -> str:
    """What the rank says that failed first. The others report that it is gone, and may end before it does."""
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    failed = {}
    for rank, process in enumerate(processes):
        if process.poll():
            words = logs[rank].read_text(errors="replace").strip().splitlines()
            failed[rank] = words[-1].strip() if words else "it printed nothing"
    first = min(failed, key=lambda rank: (PeerDeadError.__name__ in failed[rank], rank))
    return f"rank {first} failed: {failed[first]}"


# ---- texts --------------------------------------------------------------------------------------


def _present(answer: dict[str, Any]) -> str:
    lines = []
    for name, value in answer["present"].items():
        built_in = answer["built_in"][name]
        lines.append(f"  {name:16} {_text(value):>6}" + ("" if value == built_in else f"  built-in {_text(built_in)}"))
    return "\n".join(lines)


def _chosen(answer: dict[str, Any]) -> str:
    lines = []
    for each in answer["findings"]:
        chosen, built_in = each["chosen"], each["built_in"]
        if chosen == built_in:
            text = "built-in"
            if each["note"]:
                value, gain = each["note"].split(": ")
                direction = "slower" if gain.startswith("-") else "faster"
                text += f" (the best other value, {_text(int(value))}, is {gain[1:]} {direction})"
        else:
            text = f"instead of {_text(built_in)}; calls at sizes that this changes are {each['gain']:.1%} faster"
        lines.append(f"  {each['name']:16} {_text(chosen):>6}  {text}")
    return "\n".join(lines)


def _text(size: int) -> str:
    """ "512", "64k", "8m", "never"."""
    if size >= NEVER:
        return "never"
    return short(size)
