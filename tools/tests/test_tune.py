"""phalanx tune: what it makes of times, the table that it writes, and what it refuses."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core import FileStore, Tuning, World, _cli
from phalanx.core.tuning import rows_of_host
from phalanx.tools.tune import _main
from phalanx.tools.tune._measure import best_value, crossover_above, crossover_below, settled_ratio
from ranks import run_ranks, scratch


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of the table that new groups of this process, and of ranks, read. There is none yet."""
    path = tmp_path / "deep" / "tuning"
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    return path


def save(rank, world_size):
    with World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000) as world:
        group = world.create_group("all", range(world_size))
        group.set_tuning(Tuning(one_shot_bytes=2048, chunk_bytes=65536, streaming_bytes=1 << 20, push_bytes=4096))
        if rank == 0:
            group.save_tuning()
        group.barrier()


def get(rank, world_size):
    with World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000) as world:
        return world.create_group("all", range(world_size)).get_tuning()


# ---- decisions ----------------------------------------------------------------------------------


def test_a_crossover_moves_only_where_the_other_side_clearly_wins():
    # One-shot, used up to 512, takes this much of the time of two-shot:
    assert crossover_below({256: 0.5, 512: 0.9, 1024: 1.2, 2048: 0.5}, 512) == (512, [])
    assert crossover_below({256: 0.5, 512: 0.9, 1024: 0.98, 2048: 0.5}, 512) == (512, [])
    assert crossover_below({256: 0.5, 512: 0.9, 1024: 0.9, 2048: 0.8, 4096: 1.0}, 512) == (2048, [1024, 2048])
    assert crossover_below({128: 0.9, 256: 1.2, 512: 1.3, 1024: 2.0}, 512) == (128, [512, 256])
    assert crossover_below({256: 1.2, 512: 1.3}, 512) == (1, [512, 256])
    # Streaming, used from 8 on:
    assert crossover_above({2: 2.0, 4: 1.0, 8: 0.9, 16: 0.5}, 8) == (8, [])
    assert crossover_above({2: 1.1, 4: 0.9, 8: 0.9, 16: 0.5}, 8) == (4, [4])
    assert crossover_above({4: 1.5, 8: 1.2, 16: 0.5}, 8) == (16, [8])
    assert crossover_above({4: 1.5, 8: 1.2, 16: 1.1}, 8) == (32, [8, 16])


def test_a_value_must_win_clearly_and_lose_nowhere():
    assert best_value({64: [0.99, 0.98], 128: [1.0, 1.0]}, 128) == 128
    assert best_value({64: [0.5, 1.1], 128: [1.0, 1.0]}, 128) == 128
    assert best_value({64: [0.9, 1.0], 128: [1.0, 1.0], 256: [0.8, 0.9]}, 128) == 256


def test_rounds_that_disagree_decide_nothing():
    assert settled_ratio([1, 2, 3, 4], [2, 4, 6, 8]) == 0.5
    assert settled_ratio([1, 9, 1, 9], [2, 4, 2, 4]) == 1


def test_group_sizes_fit_the_cores():
    assert _main.default_ranks(1) == [2, 4]
    assert _main.default_ranks(2) == [2, 4]
    assert _main.default_ranks(6) == [2, 3, 4, 5, 6]
    assert _main.default_ranks(24) == [2, 3, 4, 5, 6, 7, 8, 16, 24]
    assert _main.default_ranks(200)[-1] == 64


# ---- the command --------------------------------------------------------------------------------

QUICK = ["--seconds", "0.1", "--largest", "64k"]


def test_tune_writes_a_table_that_new_groups_read(table, capsys):
    assert _cli.main(["tune", "--ranks", "2,3", *QUICK]) == 0
    text = capsys.readouterr().out
    assert f"table: {table} (does not exist)" in text
    assert f"wrote {table}" in text
    for name in vars(Tuning()):
        assert text.count(f"  {name} ") == (2 if name != "push_bytes" else 0)  # which means nothing to few ranks
    rows = rows_of_host(table.read_text())
    assert list(rows) == [2, 3]
    for values in run_ranks(get, 2):
        assert {name: str(value) for name, value in vars(values).items()} == rows[2]


def test_tune_writes_to_another_file_or_nowhere(table, tmp_path, capsys):
    other = tmp_path / "other"
    assert _cli.main(["tune", "--ranks", "2", *QUICK, "--output", str(other)]) == 0
    assert list(rows_of_host(other.read_text())) == [2]
    assert f"wrote {other}: groups use it where the environment variable PHALANX_TUNING is" in capsys.readouterr().out
    assert _cli.main(["tune", "--ranks", "2", *QUICK, "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not table.exists()


def test_a_program_reads_one_object(table, capsys):
    assert _cli.main(["tune", "--ranks", "2", *QUICK, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (group,) = found["groups"]
    assert (found["table"], found["written"], group["ranks"]) == (str(table), False, 2)
    assert {each["name"]: each["chosen"] for each in group["findings"]}.items() <= group["chosen"].items()
    assert _cli.main(["tune", "--show", "--ranks", "2", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["present"] == group["built_in"] and "findings" not in group


def test_tune_shows_the_values_that_groups_have(table, capsys):
    assert _cli.main(["tune", "--show", "--ranks", "2"]) == 0
    assert "built-in" not in capsys.readouterr().out
    run_ranks(save, 2)
    assert _cli.main(["tune", "--show", "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["chunk_bytes", "64k"] for line in lines)
    assert any("built-in" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "1"], "2 to 64"),
        (["--ranks", "two"], "expected numbers separated by commas, such as 2,4; got 'two'"),
        (["--seconds", "0"], "expected a positive number, got '0'"),
        (["--largest", "1k"], "between 64k and 1g"),
        (["--largest", "big"], "invalid size 'big'; examples: 4096, 4k, 1m"),
        (["--output", "/nowhere/at/all"], "the folder /nowhere/at does not exist"),
    ],
)
def test_tune_refuses_what_makes_no_sense(table, words, text, capsys):
    with pytest.raises(SystemExit) as caught:
        _cli.main(["tune", *words])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_tune_says_which_rank_failed_and_why(table, monkeypatch, capsys):
    monkeypatch.setitem(_main._RANKS, "cpu", "raise SystemExit('no luck')")
    assert _cli.main(["tune", "--ranks", "2", *QUICK]) == 1
    assert "failed: no luck" in capsys.readouterr().err
    assert not table.exists()


def test_ranks_of_tune_do_not_outlive_it(table):
    code = "import sys; from phalanx.tools.tune._main import main; main(sys.argv[1:])"
    paths = os.pathsep.join(path for path in sys.path if path)
    words = [sys.executable, "-c", code, "--ranks", "2", "--seconds", "100", "--largest", "64k"]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        ranks = []
        while len(ranks) < 2:
            assert process.poll() is None
            ranks = children.read_text().split()
        fds = [os.pidfd_open(int(pid)) for pid in ranks]
        process.kill()
    for fd in fds:
        assert select.select([fd], [], [], 60)[0]  # readable when the process has ended
        os.close(fd)
