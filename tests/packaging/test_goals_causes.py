"""The rules that say what stands in the way of a cell: one made-up cell for each letter."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

SIZES = [64 << 2 * step for step in range(11)]
MOVES = ("stage", "pull_staged", "reduce_staged", "pull", "reduce", "exchange", "copy")


@pytest.fixture(scope="module")
def causes(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("goals_causes")


def table(slow_from: int = 1 << 62) -> dict[str, Any]:
    """A machine that moves 10 bytes in a nanosecond, and larger blocks at a quarter of that."""
    times = {str(size): size / 10 * (4 if size >= slow_from else 1) for size in SIZES}
    moves = dict.fromkeys(MOVES, times)
    return {"barrier_ns": 50.0, "barrier_once_ns": 100.0, "round_trip_ns": 100.0, "clock_ns": 20.0, "moves_ns": moves}


def cell(causes: ModuleType, **given: Any) -> Any:
    """A cell of two ranks that misses both goals; `given` changes its row, its run, and what it is."""
    size, us = given.get("size", 1 << 20), given.get("us", 400.0)
    row = {
        "collective": given.get("collective", "all_gather"),
        "who": "phalanx",
        "dtype": given.get("dtype", "float32"),
        "median_us": us,
        "p10_us": given.get("p10", us * 0.95),
        "p90_us": given.get("p90", us * 1.05),
        "calls": 100,
        "switches": given.get("switches", 0.0),
        "limit": {"us": given.get("limit", 100.0), "barriers": 1, "bytes": {"pull_staged": size}, "table": 0},
        **given.get("row", {}),
    }
    barrier = {"collective": "barrier", "who": "phalanx", "dtype": row["dtype"], "median_us": 4.0, "switches": 3.0}
    result = {
        "machine": {"cpu": "one"},
        "ranks": given.get("ranks", 2),
        "cores": 2,
        "call_ns": 120.0,
        "probes": table(),
        "probe_tables": [table(given.get("slow_from", 1 << 62))],
        "rows": [row, barrier],
    }
    peer = {"median_us": given.get("peer", 300.0), "rank0_median_us": given.get("peer_root", 300.0)}
    run = causes.Run("file.json", result, row["dtype"])
    float32 = given.get("in_float32")
    return causes.Cell(run, row["collective"], size, "user", row, "mpich", peer, 0.7, 1.3, in_float32=float32)


def test_a_broadcast_whose_peer_does_not_wait(causes: ModuleType) -> None:
    small = {"collective": "broadcast", "size": 256, "limit": 0.2}
    assert causes.of_goal(cell(causes, **small, us=0.21, peer=0.15)) == "O"
    crowded = {**small, "ranks": 4, "limit": 4.0, "us": 4.1, "peer": 1.0}
    assert causes.of_goal(cell(causes, **crowded, peer_root=0.05)) == "O"
    assert causes.of_goal(cell(causes, **crowded, peer_root=0.5)) != "O"


def test_limits_that_stand_in_the_way(causes: ModuleType) -> None:
    assert causes.of_goal(cell(causes, limit=350.0, us=360.0)) == "P"
    assert causes.of_goal(cell(causes, limit=250.0, us=260.0)) == "L"
    assert causes.of_goal(cell(causes, limit=200.0, us=230.0)) == "N"
    # One that is no excuse has a second letter.
    assert causes.of_goal(cell(causes, limit=250.0, us=400.0, p10=250.0, p90=600.0)) == "LD"


def test_calls_of_two_kinds(causes: ModuleType) -> None:
    assert causes.of_limit(cell(causes, p10=120.0, p90=420.0)) == "D"
    far = {"far_calls": 60, "near_median_us": 120.0, "far_median_us": 410.0}
    assert causes.of_limit(cell(causes, p10=120.0, p90=200.0, row=far)) == "D"
    assert causes.of_limit(cell(causes, p10=200.0, p90=420.0)) == "U"  # the fast ones do not reach it either


def test_sums_of_bfloat16(causes: ModuleType) -> None:
    sums = {"collective": "reduce_scatter", "dtype": "bfloat16"}
    assert causes.of_limit(cell(causes, **sums, in_float32=300.0)) == "C"
    assert causes.of_limit(cell(causes, **sums, in_float32=390.0)) == "U"
    assert causes.of_limit(cell(causes, **sums)) == "U"  # there is nothing to compare it with


def test_small_calls(causes: ModuleType) -> None:
    # 0.1 us for a call, twice: up to 0.2 above the limit.
    assert causes.of_limit(cell(causes, size=1024, limit=0.2, us=0.39)) == "F"
    assert causes.of_limit(cell(causes, size=1024, limit=0.2, us=0.41)) == "U"
    # Crowded: our barrier takes 4 us and not 0.1, and a core that is given away once more costs 4.
    crowded = {"size": 1024, "ranks": 4, "limit": 3.0}
    assert causes.of_limit(cell(causes, **crowded, us=8.9, switches=3.0)) == "S"
    assert causes.of_limit(cell(causes, **crowded, us=12.0, switches=3.0)) == "U"
    assert causes.of_limit(cell(causes, **crowded, us=12.0, switches=4.0)) == "S"


def test_caches_and_arrivals(causes: ModuleType) -> None:
    assert causes.of_limit(cell(causes, us=400.0, slow_from=1 << 20)) == "M"
    # 1 MiB is four chunks, so five arrivals of 4 us; at 10 bytes in a nanosecond the moves of two turns take 210.
    crowded = {"ranks": 4, "limit": 200.0}
    assert causes.of_limit(cell(causes, **crowded, us=290.0)) == "A"
    assert causes.of_limit(cell(causes, **crowded, us=300.0)) == "U"
