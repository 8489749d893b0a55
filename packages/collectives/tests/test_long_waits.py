"""What a rank logs while it waits for others to connect a group."""

import logging

import pytest
import torch.distributed as dist

from phalanx.collectives._bootstrap import Bootstrap
from phalanx.core import WaitTimeoutError


def lines(monkeypatch, caplog, position, interval):
    monkeypatch.setenv("PHALANX_WAIT_WARNING_S", interval)
    with caplog.at_level(logging.WARNING, "phalanx.collectives"), pytest.raises(WaitTimeoutError) as caught:
        Bootstrap(dist.HashStore(), "tp", [2, 3, 5], position, timeout_ms=300).run("")
    assert "still waits for rank(s)" in str(caught.value) and "Check that all processes were started" in str(
        caught.value
    )
    return caplog.messages


def test_a_rank_that_waits_long_logs_for_whom(monkeypatch, caplog):
    first, *more = lines(monkeypatch, caplog, 0, "0.02")
    assert first.startswith("rank 2: still waiting for ranks 3, 5 on group 'tp': connecting its ranks (0.0")
    assert first.endswith(" s of 0.3 s)")
    assert len(more) <= 4  # after 3 and 6 intervals, then after every 6


def test_a_rank_that_is_not_the_first_names_those_that_it_has_not_heard_of(monkeypatch, caplog):
    assert lines(monkeypatch, caplog, 1, "0.1")[0].startswith("rank 3: still waiting for ranks 2, 5 on group 'tp'")


@pytest.mark.parametrize("interval", ["0", "5", "often", "-1", ""])
def test_nothing_is_logged_before_the_interval_or_without_one(monkeypatch, caplog, interval):
    assert lines(monkeypatch, caplog, 0, interval) == []
