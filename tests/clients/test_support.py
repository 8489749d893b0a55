"""What tests of clients rely on: tests/support/clients.py."""

import os
from typing import Any

import pytest

import clients
from clients import Client, Rank, assert_equal
from ranks import RanksFailed

installed = Client("phalanx-core", options=["--no-index"])  # the environment of the tests has it


def says_who_it_is(rank: Rank, word: str) -> dict[str, Any]:
    import torch

    import phalanx.core

    assert phalanx.core.__file__
    for _ in rank.steps(3):
        pass
    return {"backend": rank.backend, "rank": int(os.environ["RANK"]), "word": word, "tensor": torch.ones(2) * rank.rank}


def fails_on_one_rank(rank: Rank) -> None:
    print("printed before")
    if rank.rank == 1:
        raise ValueError("the fault of this rank")


def test_each_rank_of_each_backend_returns_what_the_function_did() -> None:
    results = installed.run(says_who_it_is, "word")
    for backend in ("phalanx", "gloo"):
        assert [result["rank"] for result in results[backend]] == [0, 1]
        assert {result["backend"] for result in results[backend]} == {backend}
        assert results[backend][1]["tensor"].tolist() == [1.0, 1.0] and results[backend][1]["word"] == "word"


def test_a_rank_that_raises_is_named_with_its_error_and_its_output() -> None:
    with pytest.raises(RanksFailed) as caught:
        installed.run(fails_on_one_rank, backends=["gloo"])
    assert list(caught.value.failures) == ["1 of gloo"]
    assert "the fault of this rank" in str(caught.value) and "printed before" in str(caught.value)


def test_with_times_the_backends_take_turns_and_a_row_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(clients, "times", rows)
    monkeypatch.setattr(clients, "in_turns", True)
    installed.run(says_who_it_is, "word", what="a case")
    assert [(row["client"], row["case"], row["ranks"]) for row in rows] == [("phalanx-core", "a case", 2)]
    assert rows[0]["phalanx_over_gloo"] > 0


def test_a_client_that_cannot_be_installed_is_skipped_with_the_reason() -> None:
    missing = Client("phalanx-no-such-client==1.0", options=["--no-index"])
    with pytest.raises(pytest.skip.Exception, match="phalanx-no-such-client cannot be installed here: ERROR: "):
        missing.run(says_who_it_is, "word")


def test_results_that_differ_are_named_by_where_they_are() -> None:
    import torch

    assert_equal({"losses": [1.0, torch.ones(2)]}, {"losses": [1.0, torch.ones(2)]})
    with pytest.raises(AssertionError, match=r"\['losses'\]\[0\]"):
        assert_equal({"losses": [1.0]}, {"losses": [1.0 + 1e-9]})
    assert_equal({"losses": [1.0]}, {"losses": [1.0 + 1e-9]}, rtol=1e-6)
