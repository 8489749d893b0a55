"""`phalanx doctor`: checks this host and this installation.

Each theme has a file with checks: functions that take a `Host`, look at one thing each, and say what they found. A
check changes nothing, leaves nothing behind, and says so if it cannot read what it looks at. Tests give it a `Host`
with other files.
"""

import argparse
import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from phalanx.core.commands import Parser, number_from, paint
from phalanx.core.doctor import _cuda, _library, _limits, _machine, _trials
from phalanx.core.doctor._cuda import ask_cuda_driver
from phalanx.core.doctor._host import FAIL, OK, WARN, Check, Finding, Host, findings_of
from phalanx.core.doctor._library import core_version, installed_versions, torch_version

__all__ = [
    "FAIL",
    "OK",
    "WARN",
    "Finding",
    "ask_cuda_driver",
    "core_version",
    "examine",
    "installed_versions",
    "main",
    "parser",
    "torch_version",
]

_CHECKS: tuple[Check, ...] = (
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
        ranks: The number of ranks that are to run on this host. None takes LOCAL_WORLD_SIZE, else the number of cores
            that this process may use, at least 2.
    """
    host = Host(_machine.default_ranks() if ranks is None else ranks)
    for look in _CHECKS:
        try:
            yield from findings_of(look, host)
        except Exception as error:
            name = look.__name__.removeprefix("check_")
            yield Finding(FAIL, name, f"{type(error).__name__}: {error}", "please report this")


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx doctor`."""
    made = Parser(
        prog="phalanx doctor",
        description="Check this host and this installation: what is wrong comes first, with what to do about it. "
        "Nothing is changed. The exit status is 1 if ranks cannot work here.",
    )
    made.add_argument(
        "--ranks",
        type=number_from(1),
        metavar="N",
        help="the number of ranks that are to run on this host (default: LOCAL_WORLD_SIZE, else the number of cores)",
    )
    made.add_argument("-v", "--verbose", action="store_true", help="also print what is in order, with tips")
    made.add_argument("--json", action="store_true", help="print everything as a JSON array instead of lines")
    return made


def main(argv: list[str]) -> int:
    """Print the report.

    Args:
        argv: Arguments after "doctor".

    Returns:
        Exit status: 1 if something fails, else 0.
    """
    options = parser().parse_args(argv)
    logging.getLogger("phalanx.core").addHandler(logging.NullHandler())  # what the core warns of is in the report
    findings = list(examine(options.ranks))
    levels = [finding.level for finding in findings]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in sorted(findings, key=lambda finding: list(_VERDICTS).index(finding.level)):
            if finding.level != OK or options.verbose:
                print(_lines(finding))
        print(_summary(findings, options.verbose))
    return 1 if FAIL in levels else 0


_VERDICTS = {  # by the worst level that there is, the worst first: a colour, and what it means for the host
    FAIL: ("red", "ranks cannot work here"),
    WARN: ("yellow", "ranks work here, with warnings"),
    OK: ("green", "nothing is wrong"),
}


def _lines(finding: Finding) -> str:
    """A finding, with its advice below. Only a terminal gets lines of its own width: a program reads whole ones."""
    columns = shutil.get_terminal_size((100, 24)).columns if sys.stdout is not None and sys.stdout.isatty() else 1 << 20

    def below(text: str) -> str:
        width = max(40, columns - 24)
        return f"\n{'':24}".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))

    text = f"{paint(f'{finding.level:4}', _VERDICTS[finding.level][0])}  {finding.name:16}  {below(finding.text)}"
    mark = "tip: " if finding.level == OK else "-> "
    return text + (f"\n{'':24}{below(mark + finding.advice)}" if finding.advice else "")


def _summary(findings: list[Finding], verbose: bool) -> str:
    levels = [finding.level for finding in findings]
    counts = [f"{levels.count(level)} {level}" for level in (OK, WARN, FAIL)]
    colour, verdict = next((words for level, words in _VERDICTS.items() if level in levels), _VERDICTS[OK])
    tips = sum(finding.level == OK and finding.advice != "" for finding in findings)
    more = "" if verbose else f" (`phalanx doctor -v` shows all{f', with {tips} tips' if tips > 1 else ''})"
    return f"{paint(verdict, colour)}: {', '.join(counts)}{more}"
