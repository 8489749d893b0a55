"""What a case came to: hang, wrong, leak, crash, or right; and how long it took to notice and to recover."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import Any

import calls
from cases import CREATE_MS, MISMATCHES, SHRINK_MS, TIMEOUT_MS, Case
from process import Process

FAILURES = ("hang", "wrong", "leak", "crash")
LATEST_MS = 2000  # from a death, or from a timeout, to the error: more is wrong
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
SHORTAGES = {
    "nofile": re.compile(r"too many open files|descriptor", re.IGNORECASE),
    "nomem": re.compile(r"memory|mmap", re.IGNORECASE),
}


@dataclass
class Outcome:
    """What was seen of a case."""

    case: Case
    ranks: list[Process]
    fault_ns: int = 0  # CLOCK_MONOTONIC; 0: it was not reached
    left: list[str] = field(default_factory=list)  # after all processes had ended


@dataclass
class Verdict:
    """What it came to. problems: kind of failure and text."""

    name: str
    kind: str
    ranks: int
    problems: list[tuple[str, str]] = field(default_factory=list)
    error_ms: list[float] = field(default_factory=list)
    shrink_ms: list[float] = field(default_factory=list)
    exact: int = 0

    def has(self, failure: str) -> bool:
        return any(kind == failure for kind, _ in self.problems)


def judge(outcome: Outcome) -> Verdict:
    case = outcome.case
    verdict = Verdict(case.name, case.kind, case.ranks)
    for rank in outcome.ranks:
        verdict.problems += _ending(case, rank)
        verdict.exact += (rank.said("done") or {}).get("exact", 0)
    verdict.problems += [("leak", text) for text in outcome.left]
    if verdict.problems:
        return verdict  # what follows would only repeat it
    if case.kind in MISMATCHES:
        wrong = _disagreement(outcome)
    elif case.kind in SHORTAGES:
        wrong = _shortage(outcome)
    elif case.phase == "knock" or case.kind == "fork":
        wrong = [f"rank {each.rank} raised {each.said('error')}" for each in outcome.ranks if each.said("error")]
    else:
        wrong = _loss(outcome)
    if case.phase != "knock":
        wrong += _recovery(outcome)
    verdict.problems += [("wrong", text) for text in wrong]
    verdict.error_ms = _times_to_error(outcome)
    verdict.shrink_ms = [said["ms"] for each in outcome.ranks if (said := each.said("shrunk"))]
    return verdict


def _ending(case: Case, rank: Process) -> list[tuple[str, str]]:
    who = f"rank {rank.rank}"
    problems = []
    killed = rank.rank == case.first_victim or (rank.rank == case.victim and case.kind in ("kill", "stop"))
    if rank.hung:
        problems.append(("hang", f"{who} was still running at the deadline"))
    elif rank.exit is not None and -rank.exit in CRASHES:
        problems.append(("crash", f"{who} was ended by {signal.Signals(-rank.exit).name}"))
    elif rank.exit == -signal.SIGKILL and not killed:
        problems.append(("crash", f"{who} was killed, though that was not planned"))
    elif rank.exit not in (0, -signal.SIGKILL):
        problems.append(("crash", f"{who} ended with exit status {rank.exit}"))
    elif rank.exit == 0 and not rank.said("done"):
        problems.append(("wrong", f"{who} ended before it was done"))
    problems += [("wrong", f"{who}: {each['text']}") for each in rank.events if each["event"] == "wrong"]
    problems += [("leak", f"{who} left {each['found']}") for each in rank.events if each["event"] == "leak"]
    return problems


def _survivors(outcome: Outcome) -> list[Process]:
    return [outcome.ranks[rank] for rank in outcome.case.survivors]


def _names(text: str, rank: int) -> bool:
    return re.search(rf"\branks?(\(s\))? ([\d, ]*\b)?{rank}\b", text) is not None


def _loss(outcome: Outcome) -> list[str]:
    """Killed, stopped, late: an error of the right kind that names who, on every survivor."""
    case, wrong = outcome.case, []
    short_of_time = case.phase == "shrink" and case.kind != "kill"  # a silent rank can end an attempt before the step
    if not outcome.fault_ns and not short_of_time:
        return [f"{case.step} was never passed"]
    if case.phase == "shrink":
        return []  # the agreement goes on without whoever fails in it
    for each in _survivors(outcome):
        error = each.said("error")
        who = f"rank {each.rank}"
        if error is None:
            if each.rank != case.victim:
                wrong.append(f"{who} raised nothing")
            continue
        if each.rank == case.victim:
            continue  # late itself: any error says that the others gave up
        expected, limit = _expected(case)
        if error["status"] not in expected:
            wrong.append(f"{who} raised {error['status']} instead of {' or '.join(expected)}: {error['text']}")
        elif case.call == calls.MESSAGES and case.kind != "kill":
            pass  # each waits for the one before it, and names that one
        elif not _names(error["text"], case.named):
            wrong.append(f"{who} does not name rank {case.named}: {error['text']}")
        elif _pid_is_known(case) and str(outcome.ranks[case.victim].pid) not in error["text"]:
            wrong.append(f"{who} does not give the process of rank {case.victim}: {error['text']}")
        elif case.kind == "stop" and _pid_is_known(case) and "stopped" not in error["text"]:
            wrong.append(f"{who} does not say that rank {case.victim} is stopped: {error['text']}")
        late_ms = (error["raised_at"] - outcome.fault_ns) / 1e6
        if late_ms > limit + LATEST_MS:
            wrong.append(f"{who} raised after {late_ms:.0f} ms")
        later = each.said("later")
        # A barrier of symmetric memory and a signal that ran into the timeout may be tried again.
        if later is not None and later["status"] != "RevokedError" and case.call not in calls.STEPLESS:
            wrong.append(f"{who}: a later call raised {later['status'] or 'nothing'} instead of RevokedError")
    return wrong


def _expected(case: Case) -> tuple[tuple[str, ...], int]:
    """Errors that survivors may raise, and after how many milliseconds at the latest."""
    if case.with_torch:  # torch raises what a callback raised as a RuntimeError with its text
        status = ("DistBackendError", "RuntimeError") if case.phase == "nested" else ("DistBackendError",)
        return status, 0 if case.kind == "kill" else 2 * TIMEOUT_MS
    if case.kind == "kill":
        # Before its record is in the store nobody knows of it.
        if case.step == "group_create.1":
            return ("WaitTimeoutError",), CREATE_MS
        return ("PeerDeadError",), 0
    if case.phase == "create":
        return ("WaitTimeoutError",), CREATE_MS + TIMEOUT_MS
    if case.phase == "agree":
        return ("WaitTimeoutError",), SHRINK_MS // 2 + 2 * TIMEOUT_MS
    return ("WaitTimeoutError",), 2 * TIMEOUT_MS


def _pid_is_known(case: Case) -> bool:
    """Whether survivors can know the process: not before the record of the rank that failed was read."""
    return case.step != "group_create.1"


def _disagreement(outcome: Outcome) -> list[str]:
    case, wrong = outcome.case, []
    laters = set()
    for each in outcome.ranks:
        error = each.said("error")
        who = f"rank {each.rank}"
        if error is None:
            wrong.append(f"{who} raised nothing")
            continue
        # Of what was started, the work has the error: when the next call comes first, that one raises the cause.
        if error["status"] not in ("MismatchError", "RevokedError" if case.mode == "started" else ""):
            wrong.append(f"{who} raised {error['status']} instead of MismatchError: {error['text']}")
        elif not _names(error["text"], case.victim):
            wrong.append(f"{who} does not name rank {case.victim}: {error['text']}")
        later = each.said("later")
        laters.add(later["status"] if later else "nothing was called")
    # all_to_all_v compares the counts before data moves, and leaves the group usable: on all ranks alike.
    allowed = ({"RevokedError"}, {""}) if case.call.endswith("all_to_all_v") else ({"RevokedError"},)
    if not wrong and laters not in allowed:
        wrong.append(f"later calls raised {sorted(laters)} instead of RevokedError")
    return wrong


def _shortage(outcome: Outcome) -> list[str]:
    """All ranks get an error that names the cause, or none does: nothing more was needed."""
    case = outcome.case
    if not outcome.fault_ns:
        return [f"{case.step} was never passed"]
    errors = {each.rank: error for each in outcome.ranks if (error := each.said("error"))}
    if not errors:
        return []
    wrong = [f"rank {each} raised nothing, others did" for each in range(case.ranks) if each not in errors]
    for rank, error in errors.items():
        if not SHORTAGES[case.kind].search(error["text"]):
            wrong.append(f"rank {rank} is not told the cause: {error['status']}: {error['text']}")
    return wrong


def _recovery(outcome: Outcome) -> list[str]:
    """All survivors are in one group, which works, and they agree on who is in it."""
    case, wrong = outcome.case, []
    groups = {}
    for each in _survivors(outcome):
        last = [event for event in each.events if event["event"] == "sum"]
        if each.rank == case.victim and case.may_be_left_out and each.said("shut out"):
            continue
        groups[each.rank] = tuple(last[-1]["ranks"]) if last else ()
    if any(members != tuple(sorted(groups)) for members in groups.values()):
        wrong.append(f"the survivors are not in one group: {groups}")
    victim: Any = outcome.ranks[case.victim]
    if case.shut_out and case.phase != "create":
        told = victim.said("shut out")
        known = ("DistBackendError",) if case.with_torch else ("RevokedError", "PeerDeadError", "WaitTimeoutError")
        if told is None or told["status"] not in known:
            wrong.append(f"rank {case.victim}, which was stopped, was not told that the others went on: {told}")
    agreed = [(each.said("agreed") or {}) for each in _survivors(outcome) if each.rank != case.victim]
    if case.phase == "agree" and len({(each.get("bits"), tuple(each.get("alive", ()))) for each in agreed}) != 1:
        wrong.append(f"the survivors agreed on different things: {agreed}")
    return wrong


def _times_to_error(outcome: Outcome) -> list[float]:
    case = outcome.case
    if not outcome.fault_ns or (case.kind == "kill" and case.step == "group_create.1"):
        return []
    errors = [error for each in _survivors(outcome) if (error := each.said("error")) and each.rank != case.victim]
    return [(error["raised_at"] - outcome.fault_ns) / 1e6 for error in errors]
