"""phalanx trace: the report, the verdict, the command line."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from flight_dumps import SECOND, channel, dump, entry, failure, group, member, stuck, write

from phalanx.core import _cli

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "howto"


@pytest.fixture
def trace(tmp_path, monkeypatch, capsys):
    """Runs the command on dumps, in a folder of its own; gives its status, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(*given):
        names = [arg for arg in given if isinstance(arg, str)]
        write(tmp_path, *(arg for arg in given if not isinstance(arg, str)))
        files = [f"{number}.json" for number in range(len(given) - len(names))]
        status = _cli.main(["trace", *files, *names])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def verdicts(trace):
    """What the command concludes of some groups, without the word "verdict"."""

    def conclude(*groups, **changes):
        status, out, err = trace(dump(*groups, **changes))
        assert (status, err) == (0, "")
        return [line.removeprefix("verdict: ") for line in out.splitlines() if line.startswith("verdict: ")]

    return conclude


def test_the_report_of_a_world_that_is_stuck(trace):
    status, out, err = trace(stuck())
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "0.json: rank 0 of 4 (pid 4121) on node1, 2025-10-09 08:53:20 UTC, phalanx 0.1.0",
        "",
        "group 'tp' (0xtp) of 4 on node1: active",
        "",
        "  channel 0: 3 on record",
        "    #  call                                     took  last to start",
        "    1  broadcast(float32, 512, root 0)          8 us  rank 2, +3 us",
        "    2  all_reduce(float32, 512, sum)         12.5 us  rank 2, +10 us",
        (
            "    3  all_reduce(float32, 512, sum)    4.2 s so far                  "
            "not started: rank 2; not completed: ranks 0, 1, 3"
        ),
        "",
        "    rank   pid  process   collectives  waited  times last  others waited",
        "       0  4121  sleeping            3   4.2 s           0           0 ns",
        "       1  4122  sleeping            3   4.2 s           0           0 ns",
        "       2  4123  stopped             2    0 ns           3         12.6 s",
        "       3  4124  sleeping            3   4.2 s           0           0 ns",
        "",
        (
            "verdict: group 'tp': rank 2 (pid 4123, stopped) has not started all_reduce #3, for which ranks 0, 1, 3 "
            "have waited 4.2 s"
        ),
    ]


def stuck_and_failed():
    """What stuck() becomes when rank 3 runs into its timeout first, and the ranks dump what they know."""
    text = (
        "all_reduce #3 on group 'tp': timed out after 4200 ms (the timeout of the group): rank 3 still waits for rank "
        "2 (pid 4123, sleeping; its last call was all_reduce(float32, 512, sum) #2). Find out what rank 2 is doing "
        "(for example `py-spy dump --pid 4123`, or `phalanx trace`), or raise timeout_ms."
    )
    made = stuck()
    made["groups"][0] |= {
        "id": "0x6219a068f1f173b7",
        "state": "failed",
        "error": failure("PHX_ERR_TIMEOUT", 3, rank=3, text=text),
    }
    for each in made["groups"][0]["members"]:
        each["process"] = "sleeping" if each["rank"] == 2 else "running"
    return made


def test_the_how_to_shows_what_the_command_gives(trace, tmp_path):
    out = trace(stuck_and_failed(), "--picture", "trace.svg")[1]
    out = out.replace("0.json", "dumps/phalanx-1760000000-rank0-pid4121-1.json", 1)
    assert f"```text\n{out}```\n" in (HOW_TO / "trace.md").read_text()
    assert (tmp_path / "trace.svg").read_text() == (HOW_TO / "trace.svg").read_text()


def test_the_report_of_a_group_that_failed(trace):
    error = failure("PHX_ERR_PEER_DEAD", 7, text="all_reduce #7 on group 'dp': rank 1 (pid 4122, gone) has died")
    dead = member(1, channel(entry(6, 100, 900)), process="gone")
    survivor = member(0, channel(entry(6, 200, 950), entry(7, 1_000, 2_500_000, status="PHX_ERR_PEER_DEAD")))
    status, out, err = trace(dump(group(survivor, dead, name="dp", state="failed", error=error | {"peer": 1})))
    assert (status, err) == (0, "")
    assert out.splitlines()[2:] == [
        "group 'dp' (0xdp) of 2 on node1: failed",
        "  first error: PHX_ERR_PEER_DEAD in all_reduce #7, seen by rank 0, about rank 1",
        "    all_reduce #7 on group 'dp': rank 1 (pid 4122, gone) has died",
        "",
        "  channel 0: 2 on record",
        "    #  call                             took  last to start",
        "    6  all_reduce(float32, 512, sum)  850 ns  rank 0, +100 ns",
        "    7  all_reduce(float32, 512, sum)  2.5 ms                   not started: rank 1; PHX_ERR_PEER_DEAD: rank 0",
        "",
        "    rank   pid  process   collectives  waited  times last  others waited",
        "       0  4121  sleeping            2  2.5 ms           1         100 ns",
        "       1  4122  gone                1  100 ns           1         2.5 ms",
        "",
        (
            "verdict: group 'dp': rank 1 (pid 4122, gone) has not started all_reduce #7, which ended with "
            "PHX_ERR_PEER_DEAD on rank 0 after 2.5 ms"
        ),
    ]


def test_a_world_at_rest_is_said_to_be_so(verdicts, trace):
    healthy = group(member(0, channel(entry(1, 5, 9))), member(1, channel(entry(1, 6, 9))))
    nothing = ["nothing is stuck; what was started is completed on all ranks"]
    assert verdicts(healthy) == verdicts() == nothing
    assert "no collective is on record" in trace(dump(group(member(0), member(1))))[1]


def test_calls_that_differ_are_both_named(verdicts):
    calls = [entry(1, rank, 50, status="PHX_ERR_MISMATCH") for rank in range(4)]
    calls[2] = entry(1, 20, 50, call="all_gather", count=1024, status="PHX_ERR_MISMATCH")
    error = failure("PHX_ERR_MISMATCH", 1)
    members = [member(rank, channel(call)) for rank, call in enumerate(calls)]
    assert verdicts(group(*members, state="failed", error=error)) == [
        (
            "group 'tp': the ranks called different things as #1: ranks 0, 1, 3 called all_reduce(float32, 512, sum), "
            "while rank 2 (pid 4123, sleeping) called all_gather(float32, 1024)"
        )
    ]


def test_counts_that_may_differ_are_no_mismatch(verdicts):
    members = [member(rank, channel(entry(1, 5, 9, call="all_gather_v", count=10 + rank))) for rank in range(2)]
    assert verdicts(group(*members)) == ["nothing is stuck; what was started is completed on all ranks"]


def test_a_collective_that_all_started_and_some_have_not_completed_is_named(verdicts):
    done = member(0, channel(entry(1, SECOND, 2 * SECOND), number=3))
    pending = member(1, channel(entry(1, 2 * SECOND - 5), number=3))
    assert verdicts(group(done, pending)) == [
        (
            "group 'tp': rank 1 (pid 4122, sleeping) has started and not completed all_reduce #1 on channel 3, unlike "
            "rank 0; the last to start was rank 1, 8 s ago; a rank moves on only inside calls of Phalanx"
        )
    ]


def test_an_error_that_only_some_ranks_saw_is_named_with_them(verdicts):
    members = [member(rank, channel(entry(1, 5, 9))) for rank in range(4)]
    members[1]["channels"][0]["entries"][0]["status"] = "PHX_ERR_TIMEOUT"
    assert verdicts(group(*members)) == ["group 'tp': all_reduce #1 ended with PHX_ERR_TIMEOUT on rank 1"]
    members[1]["channels"][0]["entries"][0]["status"] = "ok"
    failed = group(*members, state="failed", error=failure("PHX_ERR_PEER_DEAD", operation=""))
    assert verdicts(failed) == ["group 'tp': has failed, though every collective on record was completed"]


def test_only_the_first_trouble_of_a_channel_is_named(verdicts):
    ahead = [member(rank, channel(entry(1, 5), entry(2, 6), entry(3, 7), started=3)) for rank in (0, 1)]
    behind = member(2, channel(entry(1, 4)), process="running")
    assert verdicts(group(*ahead, behind)) == [
        (
            "group 'tp': rank 0 (pid 4121, sleeping), rank 1 (pid 4122, sleeping), rank 2 (pid 4123, running) have "
            "started and not completed all_reduce #1; the last to start was rank 0, 10 s ago; a rank moves on only "
            "inside calls of Phalanx"
        )
    ]


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_circle(verdicts):
    one = group(member(0, channel(entry(4, 8 * SECOND))), member(1), name="one")
    two = group(member(0), member(1, channel(entry(2, 9 * SECOND, call="all_gather"))), name="two")
    assert verdicts(one, two) == [
        (
            "group 'one': rank 1 (pid 4122, sleeping) has not started all_reduce #4, for which rank 0 has waited 2 s; "
            "rank 1 is in all_gather #2 of group 'two'"
        ),
        (
            "group 'two': rank 0 (pid 4121, sleeping) has not started all_gather #2, for which rank 1 has waited 1 s; "
            "rank 0 is in all_reduce #4 of group 'one'"
        ),
        (
            "ranks wait in a circle, each for the next: rank 0 in all_reduce #4 of group 'one', rank 1 in all_gather "
            "#2 of group 'two', and again rank 0"
        ),
    ]


def test_absent_ranks_that_are_in_one_other_place_are_named_together(verdicts):
    one = group(member(0, channel(entry(1, 8 * SECOND))), member(1), member(2), member(3), name="one")
    two = group(*(member(rank, channel(entry(5, 9 * SECOND + rank))) for rank in (1, 2)), name="two")
    assert verdicts(one, two)[0].endswith(
        "rank 3 (pid 4124, sleeping) have not started all_reduce #1, for which rank 0 has waited 2 s; "
        "ranks 1, 2 are in all_reduce #5 of group 'two'"
    )


def test_a_chain_of_ranks_that_wait_is_no_circle(verdicts):
    one = group(member(0, channel(entry(4, 8 * SECOND))), member(1), name="one")
    two = group(member(1, channel(entry(2, 9 * SECOND))), member(2, process="running"), name="two")
    assert verdicts(one, two) == [
        (
            "group 'one': rank 1 (pid 4122, sleeping) has not started all_reduce #4, for which rank 0 has waited 2 s; "
            "rank 1 is in all_reduce #2 of group 'two'"
        ),
        "group 'two': rank 2 (pid 4123, running) has not started all_reduce #2, for which rank 1 has waited 1 s",
    ]


def test_last_shortens_the_table_and_nothing_else(trace):
    whole, short = trace(stuck())[1].splitlines(), trace(stuck(), "--last", "1")[1].splitlines()
    table = short.index("  channel 0: the last 1 of 3 on record")
    assert short[table + 2].split()[:2] == ["3", "all_reduce(float32,"] and short[table + 3] == ""
    assert short[table + 3 :] == whole[whole.index("", table) :]


def test_group_chooses_groups_by_name(trace):
    groups = [group(member(0), name=name) for name in ("tp", "dp")]
    out = trace(dump(*groups), "--group", "dp")[1]
    assert "group 'dp'" in out and "group 'tp'" not in out
    status, out, err = trace(dump(*groups), "--group", "pp")
    assert (status, out, err) == (2, "", "phalanx trace: no group is called 'pp'; there are: dp, tp\n")


def test_the_exit_status_says_whether_something_is_stuck_if_that_is_asked_for(trace):
    healthy = dump(group(member(0, channel(entry(1, 5, 9))), member(1, channel(entry(1, 6, 9)))))
    assert (trace(stuck())[0], trace(healthy)[0]) == (0, 0)
    assert (trace(stuck(), "--exit-code")[0], trace(healthy, "--exit-code")[0]) == (1, 0)


def test_a_folder_stands_for_the_dumps_in_it(trace, tmp_path):
    (tmp_path / "dumps").mkdir()
    names = write(tmp_path / "dumps", stuck())
    assert trace("dumps")[1] == trace(*(str(Path(name).relative_to(tmp_path)) for name in names))[1]
    (tmp_path / "empty").mkdir()
    assert trace("empty") == (2, "", "phalanx trace: empty: the folder has no file *.json\n")


def test_json_says_what_the_report_says(trace):
    status, out, err = trace(stuck(), "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (
        found["stuck"] is True
        and [f"verdict: {text}" for text in found["verdicts"]] == trace(stuck())[1].splitlines()[-1:]
    )
    assert found["dumps"] == [{"file": "0.json", "rank": 0, "pid": 4121, "host": "node1"}]
    (tp,) = found["groups"]
    assert (tp["name"], tp["state"], tp["error"]) == ("tp", "active", None)
    assert [(rank["rank"], rank["process"], rank["times_last"]) for rank in tp["ranks"]][2] == (2, "stopped", 3)
    last = tp["collectives"][-1]
    assert last["calls"] == {"all_reduce(float32, 512, sum)": [0, 1, 3]}
    assert (last["not_started"], last["not_completed"], last["took_ns"]) == ([2], [0, 1, 3], 4_200_000_000)
    assert json.loads(trace(stuck_and_failed(), "--json")[1])["groups"][0]["error"]["status"] == "PHX_ERR_TIMEOUT"
    assert json.loads(trace(dump(group(member(0))), "--json")[1])["stuck"] is False


def test_the_verdict_has_a_colour_on_a_terminal_only(trace, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in trace(stuck())[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\n\x1b[31mverdict: group 'tp': rank 2" in trace(stuck())[1]
    assert trace(dump(group(member(0))))[1].splitlines()[-1].startswith("\x1b[32mverdict: nothing is stuck")


def test_a_file_that_cannot_be_read_or_written_is_status_2_and_one_line(trace, tmp_path):
    assert trace("missing.json") == (2, "", "phalanx trace: missing.json: No such file or directory\n")
    (tmp_path / "folder.svg").mkdir()
    status, _, err = trace(stuck(), "--picture", "folder.svg")
    assert (status, err) == (2, "phalanx trace: folder.svg: Is a directory\n")


def test_a_file_that_is_not_a_dump_is_status_2_and_one_line(trace, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    assert trace("empty.json")[2] == "phalanx trace: empty.json: not a flight-recorder dump (no field 'format')\n"
    (tmp_path / "bad.json").write_text('{"format": "phalanx-flight-rec')
    status, out, err = trace(stuck(), "bad.json")
    assert (status, out) == (2, "")
    assert err.startswith("phalanx trace: bad.json: not valid JSON (line 1, column 12: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--last", "0"), "--last: expected a whole number of 1 or more, got '0'"),
        (("--chrome", "no/such/folder.json"), "no/such does not exist"),
        (("--picture", "no/such/folder.svg"), "no/such does not exist"),
        (("--picture", "x.pdf"), "must end in .svg or .png"),
        (("--picture", "x.png"), "pip install matplotlib"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(trace, monkeypatch, capsys, tmp_path, words, text):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        trace(stuck(), *words)
    assert caught.value.code == 2 and text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json"]


def test_names_from_a_dump_cannot_write_to_the_terminal(trace):
    out = trace(dump(group(member(0), name="\x1b[2Jé\n\ud800"), host="\x07"))[1]
    assert "group '\\x1b[2Jé\\n\\ud800'" in out and "on \\x07" in out
