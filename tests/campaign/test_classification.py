"""The campaign can fail: what hangs, lies, crashes or is left behind is seen, in real processes too."""

import os
import signal
import socket
import sys
import time

import judge
import leaks
import process
import pytest
from cases import Case, full, matching, quick
from judge import Outcome

CASE = Case("kill", "collective", 3, "all_reduce", "all_reduce.4", 2)
VICTIM = CASE.victim
OTHERS = [rank for rank in range(3) if rank != VICTIM]
FAULT_NS = 1_000_000_000
PID = 4000


def said(event, after_ms=5.0, **fields):
    return {"event": event, "at": 0, "raised_at": FAULT_NS + int(after_ms * 1e6), **fields}


def survivor(rank, **changes):
    error = {"status": "PeerDeadError", "peer": VICTIM, "text": f"rank {VICTIM} (pid {PID + VICTIM}) died"}
    events = {
        "error": said("error", **error),
        "later": said("later", status="RevokedError", text=""),
        "sum": said("sum", ranks=OTHERS),
        "shrunk": said("shrunk", ranks=OTHERS, ms=3.0),
        "done": said("done", exact=2),
    }
    events |= changes
    return process.Process(rank, PID + rank, -1, -1, None, [each for each in events.values() if each], exit=0)


def outcome(case=CASE, changes=None, left=()):
    """A right one, but for the changes to what one survivor said."""
    ranks = [survivor(rank) for rank in range(3)]
    ranks[OTHERS[0]] = survivor(OTHERS[0], **(changes or {}))
    ranks[VICTIM] = process.Process(VICTIM, PID + VICTIM, -1, -1, None, [], exit=-signal.SIGKILL)
    return Outcome(case, ranks, FAULT_NS, list(left))


def kinds(found):
    return {kind for kind, _ in found.problems}


def test_a_case_in_which_all_is_right_has_no_problem_and_its_times():
    verdict = judge.judge(outcome())
    assert verdict.problems == []
    assert verdict.error_ms == [5.0, 5.0] and verdict.shrink_ms == [3.0, 3.0]
    assert verdict.exact == 4


ERROR = {"status": "PeerDeadError", "peer": VICTIM, "text": f"rank {VICTIM} (pid {PID + VICTIM}) died"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": None}, "raised nothing"),
        ({"error": said("error", **{**ERROR, "status": "WaitTimeoutError"})}, "instead of PeerDeadError"),
        ({"error": said("error", **{**ERROR, "text": f"rank {OTHERS[0]} (pid 1) died"})}, "does not name"),
        ({"error": said("error", **{**ERROR, "text": f"rank {VICTIM} died"})}, "does not give the process"),
        ({"error": said("error", after_ms=2500.0, **ERROR)}, "raised after 2500 ms"),
        ({"later": said("later", status="", text="")}, "a later call raised nothing"),
        ({"sum": None}, "not in one group"),
        ({"sum": said("sum", ranks=[0, 1, 2])}, "not in one group"),
        ({"wrong": said("wrong", text="element 3 of 96 is 7.0 instead of 6.0")}, "instead of 6.0"),
        ({"done": None}, "ended before it was done"),
    ],
)
def test_a_survivor_that_is_not_told_the_truth_is_wrong(changes, words):
    verdict = judge.judge(outcome(changes=changes))
    assert kinds(verdict) == {"wrong"}
    assert words in verdict.problems[0][1]


def test_a_failpoint_that_was_never_passed_proves_nothing():
    found = outcome()
    found.fault_ns = 0
    assert "never passed" in judge.judge(found).problems[0][1]


def test_a_stopped_rank_must_be_called_stopped():
    case = Case("stop", "collective", 3, "all_reduce", "all_reduce.4", 2, ending="killed")
    gone = f"rank {case.victim} (pid {PID + case.victim}, sleeping)"
    found = Outcome(case, [survivor(rank) for rank in range(3)], FAULT_NS)
    for each in found.ranks:
        others = [rank for rank in range(3) if rank != case.victim]
        each.events[0] = said("error", after_ms=400, status="WaitTimeoutError", text=gone)
        each.events[2] = said("sum", ranks=others)
    found.ranks[case.victim].exit = -signal.SIGKILL
    assert "does not say that" in judge.judge(found).problems[0][1]
    for each in found.ranks:
        each.events[0]["text"] = gone.replace("sleeping", "stopped")
    assert judge.judge(found).problems == []


def disagreement(texts, later="RevokedError"):
    case = Case("size", "collective", 2, "all_reduce")
    ranks = []
    for rank, text in enumerate(texts):
        ranks.append(survivor(rank, later=said("later", status=later), sum=said("sum", ranks=[0, 1])))
        ranks[-1].events[0] = said("error", status="MismatchError", text=text.format(case.victim))
    return judge.judge(Outcome(case, ranks))


def test_ranks_that_disagree_must_all_be_told_with_whom():
    assert disagreement(["rank {} called", "rank {} called"]).problems == []
    assert kinds(disagreement(["rank {} called", "something is wrong"])) == {"wrong"}
    assert kinds(disagreement(["rank {} called", "rank {} called"], later="")) == {"wrong"}


def test_a_shortage_that_only_one_rank_is_told_of_is_wrong():
    case = Case("nofile", "create", 2, step="group_create.4")
    told = said("error", status="SystemCallError", text="Too many open files (errno 24)")
    ranks = [survivor(rank, error=told, sum=said("sum", ranks=[0, 1])) for rank in range(2)]
    assert judge.judge(Outcome(case, ranks, FAULT_NS)).problems == []
    ranks[1].events.remove(told)
    assert "raised nothing, others did" in judge.judge(Outcome(case, ranks, FAULT_NS)).problems[0][1]


def test_what_the_case_left_is_a_leak():
    assert kinds(judge.judge(outcome(left=["socket @phalanx-1"]))) == {"leak"}
    assert kinds(judge.judge(outcome(changes={"leak": said("leak", found=["descriptor 9"])}))) == {"leak"}


# ---- in real processes -----------------------------------------------------------------------------------------


def run(body, tmp_path, seconds=20.0):
    """One process that does body(pipe), as the only rank of a case that has no fault."""
    rank = process.start(0, tmp_path / "output", body)
    process.run([rank], seconds, lambda: None)
    return rank, judge.judge(Outcome(Case("garbage", "knock", 1), [rank]))


def test_a_process_that_sleeps_for_ever_is_a_hang_and_its_stack_is_printed(tmp_path):
    def sleep_for_ever(pipe):
        while True:
            time.sleep(1)

    rank, verdict = run(sleep_for_ever, tmp_path, seconds=0.3)
    assert kinds(verdict) == {"hang"}
    assert "sleep_for_ever" in rank.output.read_text()


def test_a_process_that_ends_by_a_signal_is_a_crash(tmp_path):
    assert kinds(run(lambda pipe: os.abort(), tmp_path)[1]) == {"crash"}
    assert kinds(run(lambda pipe: sys.exit(3), tmp_path)[1]) == {"crash"}
    assert kinds(run(lambda pipe: os.kill(os.getpid(), signal.SIGKILL), tmp_path)[1]) == {"crash"}


def test_a_process_that_says_nothing_is_wrong(tmp_path):
    assert kinds(run(lambda pipe: 0, tmp_path)[1]) == {"wrong"}


def test_what_a_process_holds_is_seen():
    before = leaks.held()
    made = os.memfd_create("phalanx-test")
    try:
        assert any("phalanx-test" in each for each in leaks.held() - before)
    finally:
        os.close(made)
    assert leaks.held() == before


def test_what_a_case_left_on_the_host_is_seen(tmp_path):
    files, others = leaks.shared_files(), set(leaks.sockets())  # such as those of the worlds of this very process
    name = f"phalanx-campaign-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        assert set(leaks.sockets()) - others == {"@" + name}
        assert leaks.left_by_case(["@" + name], files) == {f"socket @{name}"}
    assert leaks.left_by_case(["@" + name], files) == set()
    file = f"/dev/shm/{name}"
    with open(file, "w"):
        assert leaks.left_by_case([], files) == {f"file {file}"}
    os.unlink(file)


# ---- the list --------------------------------------------------------------------------------------------------


def test_every_case_has_a_name_of_its_own_by_which_it_is_found():
    cases = full([2, 4, 8])
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) > 1000
    assert [Case.parse(name) for name in names] == cases
    assert matching(cases, names[5]) == [cases[5]]
    assert set(matching(cases, "all_to_all_v.4@")) == {case for case in cases if "all_to_all_v.4@" in case.step + "@"}
    assert {case.kind for case in quick([2, 4, 8])} == {case.kind for case in cases}
    assert {case.ranks for case in quick([2, 4, 8])} == {2, 4}
