"""The differential sweep (sweep.py): samples of it, and that it can fail."""

import pytest
import torch
from others import Other
from reasons import REASONS
from sweep import Report, cases_of, sweep
from sweep_calls import Case, arguments, expected
from sweep_rank import judged

from c10d_groups import has_compiler, native_folder

CASE = Case("all_reduce", "dist.all_reduce", "strided")


def environment():
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    return {"PHALANX_NATIVE": native_folder()}


def test_a_sample_of_calls_leaves_what_one_process_computes():
    report = sweep([2], "all_*", sample=41, env=environment())
    assert not report.wrong, "\n".join(report.wrong)
    assert report.counts["cases"] > 40 and report.counts["equal"] > 20


# The whole, on 2, 3 and 4 ranks, is run by hand: python tests/differential/sweep.py
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_call_of_every_function_leaves_what_one_process_computes():
    report = sweep([2], sample=5, env=environment())
    assert not report.wrong, "\n".join(report.wrong)


def test_a_sample_has_every_function_and_is_the_same_each_time():
    whole = {(case.kind, case.entry) for case in cases_of(2)}
    assert {(case.kind, case.entry) for case in cases_of(2, sample=100)} == whole
    assert cases_of(2, sample=100) == cases_of(2, sample=100)


def test_what_is_written_beside_a_view_is_seen():
    memory = expected(CASE, 0, 2)
    assert memory is not None
    assert judged(CASE, 0, 2, ("returned", memory))[0] == "right"
    for element in (0, 1, -1):  # in the view, between its elements, after them
        spoilt = [memory[0].clone()]
        spoilt[0][element] += 1
        assert judged(CASE, 0, 2, ("returned", spoilt))[0] == "wrong"
    untouched = arguments(CASE, 0, 2).memory
    assert judged(CASE, 0, 2, ("returned", untouched))[0] == "wrong"


def test_one_process_computes_the_sum_of_the_values_of_all_ranks():
    case = Case("all_reduce", "dist.all_reduce")
    values = [arguments(case, rank, 3).memory[0] for rank in range(3)]
    memory = expected(case, 1, 3)
    assert memory is not None
    assert torch.equal(memory[0], values[0] + values[1] + values[2])


def test_outputs_that_share_memory_have_no_one_meaning():
    assert expected(Case("all_gather", "dist.all_gather", "same"), 0, 2) is None
    assert expected(Case("all_reduce_coalesced", "dist.all_reduce_coalesced", "same"), 0, 2) is not None


@pytest.mark.parametrize(
    ("gloo", "ours", "key"),
    [
        ("right", "right", "equal"),
        ("RuntimeError", "NotImplementedError", "equal"),
        ("RuntimeError", "InvalidArgumentError", "equal"),
        ("ValueError", "InvalidArgumentError", "equal"),
        ("ValueError", "RuntimeError", "wrong"),
        ("right", "wrong", "wrong"),
        ("wrong", "wrong", "wrong"),
        ("right", "Timeout", "wrong"),
        ("wrong", "right", "different"),
        ("right", "died", "wrong"),
    ],
)
def test_what_no_reason_explains_counts_as_wrong(gloo, ours, key):
    report = Report()
    report.add(CASE, 2, [[("right", ""), ("right", "")], [(gloo, "a text"), (ours, "another")]])
    assert report.counts[key] == 1
    assert bool(report.wrong) == (key == "wrong")


def test_each_reason_has_a_text_that_says_who_differs():
    assert all(reason.why and reason.gloo != reason.ours for reason in REASONS)
    assert not any("*" in reason.kind + reason.gloo + reason.ours for reason in REASONS)
    assert not any(reason.fitting(Other("objects", "all_gather_object"), "right", "wrong") for reason in REASONS)


def test_what_explains_no_case_is_named():
    report = Report()
    everything = len(report.stale())
    report.add(CASE, 2, [[("wrong", ""), ("right", "")]])
    used = {(name, text) for _, name, text in report.used}
    assert {("kind", "all_reduce"), ("layout", "strided"), ("gloo", "wrong"), ("ours", "right")} <= used
    assert len(report.stale()) == everything - len(used)
    assert any("kind='scatter'" in text and "as if it were contiguous" in text for text in report.stale())
