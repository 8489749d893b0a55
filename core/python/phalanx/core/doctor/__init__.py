"""`phalanx doctor`: what this host offers, and what is wrong with it.

Each theme has a file with checks: functions that take a `Host`, look at one thing each, and yield what they found. A
check changes nothing, leaves nothing behind, and says so if it cannot read what it looks at. Tests give it a `Host`
with other files.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from phalanx.core.doctor import _cuda, _library, _limits, _machine, _trials
from phalanx.core.doctor._cuda import ask_cuda_driver
from phalanx.core.doctor._host import FAIL, OK, WARN, Finding, Host
from phalanx.core.doctor._library import installed_versions

__all__ = ["FAIL", "OK", "WARN", "Finding", "ask_cuda_driver", "examine", "installed_versions", "main"]

_CHECKS: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    _library.check_python,
    _library.check_torch,
    _library.check_packages,
    _library.check_native,
    _machine.check_kernel,
    _machine.check_container,
    _machine.check_namespaces,
    _machine.check_user,
    _machine.check_host_id,
    _machine.check_security,
    _machine.check_ptrace,
    _trials.check_pidfd,
    _trials.check_memfd,
    _trials.check_sockets,
    _trials.check_processes,
    _machine.check_membarrier,
    _machine.check_cores,
    _machine.check_siblings,
    _machine.check_instructions,
    _machine.check_clock,
    _limits.check_memory,
    _limits.check_dev_shm,
    _limits.check_huge_pages,
    _limits.check_hugetlb,
    _machine.check_nodes,
    _machine.check_binding,
    _limits.check_files,
    _limits.check_file_size,
    _limits.check_address_space,
    _limits.check_processes,
    _limits.check_locked_memory,
    _cuda.check_cuda,
    _library.check_environment,
    _library.check_library,
    _library.check_tuning,
    _trials.check_trial,
    _trials.check_hosts,
)


def examine(ranks: int | None = None) -> Iterator[Finding]:
    """Look at everything, in a fixed order. Changes nothing, and leaves nothing behind.

    Args:
        ranks: How many are to run on this host. None takes LOCAL_WORLD_SIZE, else as many as cores that this process
            may use, two at least.
    """
    host = Host(_machine.default_ranks() if ranks is None else ranks)
    for look in _CHECKS:
        try:
            yield from look(host)
        except Exception as error:
            name = look.__name__.removeprefix("check_")
            yield Finding(FAIL, name, f"{type(error).__name__}: {error}", "please report this")


def main(argv: list[str]) -> int:
    """Print the report.

    Args:
        argv: Arguments after "doctor".

    Returns:
        Exit status: 1 if something fails, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="phalanx doctor", description="What this host offers, and what is wrong with it."
    )
    parser.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="how many ranks are to run here (default: $LOCAL_WORLD_SIZE, else as many as cores)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of lines")
    options = parser.parse_args(argv)
    findings = list(examine(options.ranks))
    levels = [finding.level for finding in findings]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for each in findings:
            print(f"{each.level:4}  {each.name:16}  {each.text}")
            if each.advice:
                print(f"{'':24}-> {each.advice}")
        print(f"{levels.count(OK)} ok, {levels.count(WARN)} warn, {levels.count(FAIL)} fail")
    return 1 if FAIL in levels else 0


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; give 1 or more")
    return number
