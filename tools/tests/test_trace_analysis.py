"""What phalanx trace makes of the records of several ranks, and of several dumps."""

import json

import pytest
from flight_dumps import SECOND, channel, dump, entry, failure, group, member, stuck

from phalanx.tools.trace import _text
from phalanx.tools.trace._analysis import analyse, lanes, merge
from phalanx.tools.trace._read import DumpError, parse


def groups_of(*dumps):
    return merge([parse(json.dumps(each).encode(), f"{number}.json") for number, each in enumerate(dumps)])


def only(*dumps):
    (found,) = groups_of(*dumps)
    return analyse(found)


def test_a_rank_waits_from_its_own_start_to_the_last_start():
    starts = {0: 40, 1: 10, 2: 90, 3: 25}
    (each,) = only(dump(group(*(member(r, channel(entry(1, s, 100))) for r, s in starts.items())))).channels[0]
    assert each.waits_ns == {rank: 90 - start for rank, start in starts.items()}
    assert (each.last, each.late_ns, each.took_ns) == (2, 80, 90)


def test_a_rank_that_ends_before_the_last_starts_waits_no_longer():
    root = member(0, channel(entry(1, 10, 30, call="broadcast", root=0)))
    other = member(1, channel(entry(1, 70, 90, call="broadcast", root=0)))
    (each,) = only(dump(group(root, other))).channels[0]
    assert (each.waits_ns, each.last) == ({0: 20, 1: 0}, 1)


def test_nobody_is_last_where_all_start_at_once_or_a_start_is_unknown():
    together = group(member(0, channel(entry(1, 5, 9))), member(1, channel(entry(1, 5, 9))))
    assert only(dump(together)).channels[0][0].last is None
    forgotten = group(member(0, channel(entry(1, 5, 9))), member(1, channel(entry(9, 50, 60))))
    (first, ninth) = only(dump(forgotten)).channels[0]
    assert (first.last, first.waits_ns, first.absent) == (None, {}, ())
    assert ninth.absent == (0,)


def test_the_summary_adds_up_what_each_rank_waited_and_was_waited_for():
    analysis = only(stuck())
    since = {0: 4_200_000_000, 1: 4_199_999_000, 3: 4_199_997_000}
    waited = {0: 3_000 + 10_000 + since[0], 1: 2_000 + 9_500 + since[1], 2: 0, 3: 1_000 + 8_000 + since[3]}
    assert {each.rank: each.waited_ns for each in analysis.summaries} == waited
    late = next(each for each in analysis.summaries if each.rank == 2)
    assert (late.joined, late.times_last, late.awaited_ns) == (2, 3, sum(waited.values()))
    assert {each.awaited_ns for each in analysis.summaries} == {0, late.awaited_ns}


def test_what_all_completed_is_never_a_mismatch():
    calls = [entry(1, 5, 9, count=rank) for rank in range(2)]
    made = group(*(member(rank, channel(call)) for rank, call in enumerate(calls)))
    assert not only(dump(made)).channels[0][0].differs
    calls[1]["status"] = "PHX_ERR_MISMATCH"
    assert only(dump(made)).channels[0][0].differs


def test_a_rank_without_a_record_of_what_it_started_is_not_absent():
    busy = member(1, channel(entry(3, 5, 9), started=4, completed=3))
    (_, each) = only(dump(group(member(0, channel(entry(3, 5, 9), entry(4, 20))), busy))).channels[0]
    assert (each.absent, each.under_way, each.waits_ns) == ((), (0, 1), {})


def test_collectives_in_flight_together_get_lanes_and_others_share_one():
    spans = [(1, 10, 50), (2, 20, 60), (3, 30, 40), (4, 50, 70), (5, 65, 80)]
    analysis = only(dump(group(member(0, channel(*(entry(*span) for span in spans))))))
    assert [[each.sequence for each in lane] for lane in lanes(analysis.channels[0], 0)] == [[1, 4], [2, 5], [3]]


def test_calls_are_described_as_the_core_does():
    calls = {
        "all_reduce(float32, 512, sum)": {},
        "broadcast(float32, 512, root 0)": {"call": "broadcast", "root": 0},
        "reduce(float32, 512, max, root 3)": {"call": "reduce", "op": "max", "root": 3},
        "barrier()": {"call": "barrier", "dtype": None, "count": 0},
        "coalesced(7 calls)": {"call": "coalesced", "dtype": None, "count": 7},
        "all_gather(int8, 0)": {"call": "all_gather", "dtype": "int8", "count": 0},
    }
    entries = [entry(number, 5, 9, **changes) for number, changes in enumerate(calls.values(), 1)]
    found = only(dump(group(member(0, channel(*entries))))).channels[0]
    assert [next(iter(each.descriptions)) for each in found] == list(calls)


# ---- several dumps ----------------------------------------------------------------------------------------------


def test_a_later_dump_completes_what_an_earlier_one_saw_pending():
    early = dump(group(member(0, channel(entry(1, 10), started=1, completed=0)), member(1)), dumped_ns=5 * SECOND)
    late = dump(
        group(member(0, channel(entry(1, 10, 80))), member(1, channel(entry(1, 70, 80)), process="running")), rank=1
    )
    for order in ((early, late), (late, early)):
        (each,) = only(*order).channels[0]
        assert (each.calls[0].end_ns, each.absent, each.under_way, each.last) == (80, (), (), 1)
        assert [member.process for member in only(*order).group.members] == ["sleeping", "running"]


def test_what_one_dump_saw_ended_has_ended_also_where_another_says_that_it_looked_later():
    ended = dump(group(member(0, channel(entry(1, 10, 80))), member(1, channel(entry(1, 70, 80)))), dumped_ns=SECOND)
    stale = dump(group(member(0, channel(entry(1, 10, 80))), member(1, channel(entry(1, 70), started=1, completed=0))))
    for order in ((ended, stale), (stale, ended)):
        (each,) = only(*order).channels[0]
        assert (each.calls[1].end_ns, each.under_way) == (80, ())


def test_dumps_add_up_to_more_collectives_than_each_of_them_remembers():
    early = dump(group(member(0, channel(entry(1, 10, 20), entry(2, 30, 40), entry(3, 50)))), dumped_ns=SECOND)
    late = dump(group(member(0, channel(entry(4, 70, 80), entry(5, 90, 95)))))
    (collectives,) = only(early, late).channels.values()
    # The third was pending and is forgotten: nobody knows when it ended, and it is not stuck.
    assert [each.sequence for each in collectives] == [1, 2, 4, 5]
    assert not any(each.under_way for each in collectives)


def test_the_earliest_error_is_kept_and_a_failed_group_stays_failed():
    members = [member(0), member(1)]
    first = dump(group(*members, state="failed", error=failure("PHX_ERR_TIMEOUT")), dumped_ns=SECOND)
    second = dump(group(*members, state="failed", error=failure("PHX_ERR_REVOKED")), rank=1)
    (found,) = groups_of(second, first)
    assert (found.state, found.error.status) == ("failed", "PHX_ERR_TIMEOUT")


def test_groups_of_one_name_and_different_ids_stay_apart():
    assert len(groups_of(dump(group(member(0), id="0x1")), dump(group(member(0), id="0x2")))) == 2
    assert len(groups_of(dump(group(member(0))), dump(group(member(0)), host="node2"))) == 2


def test_dumps_that_disagree_about_the_ranks_of_a_group_are_refused():
    with pytest.raises(DumpError, match=r"0\.json and 1\.json disagree about the ranks of group 'tp' \(0xtp\)"):
        groups_of(dump(group(member(0), member(1))), dump(group(member(0), member(2)), rank=2))


# ---- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1 us"),
        (12_345, "12.3 us"),
        (999_499, "999 us"),
        (999_500, "1 ms"),
        (4_200_000_000, "4.2 s"),
        (119_400_000_000, "119 s"),
        (120_000_000_000, "2 min"),
        (200_400_000_000, "3 min 20 s"),
        (7_505_000_000_000, "2 h 5 min"),
        (3_600_000_000_000, "1 h"),
        ((1 << 63) - 1, "106751 d 23 h"),
    ],
)
def test_times_have_a_unit_that_fits(nanoseconds, text):
    assert _text.duration(nanoseconds) == text


def test_ranks_in_a_row_are_shortened():
    assert [_text.ranks(numbers) for numbers in ((3,), (3, 1, 0), (0, 1, 2), (9, 4, 5, 6, 7, 1))] == [
        "rank 3",
        "ranks 0, 1, 3",
        "ranks 0-2",
        "ranks 1, 4-7, 9",
    ]
