"""Tuning values, the table that holds them, and the command that measures them."""

import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core import FileStore, InvalidArgumentError, SystemCallError, Tuning, World, _cli, doctor, tune
from phalanx.core._tune_measure import best_value, crossover_above, crossover_below, settled_ratio
from phalanx.core.tuning import rows_of_host, table_path
from ranks import run_ranks, scratch

MINE = Tuning(one_shot_bytes=2048, chunk_bytes=65536, streaming_bytes=1 << 20, push_bytes=4096)


def join(rank, world_size):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of the table that new groups of this process, and of ranks, read. There is none yet."""
    path = tmp_path / "deep" / "tuning"
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    return path


def built_in(group):
    present = group.get_tuning()
    group.set_tuning(Tuning())
    values = group.get_tuning()
    group.set_tuning(present)
    return values


# ---- values -------------------------------------------------------------------------------------


def set_and_get(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        first = group.get_tuning()
        assert first == built_in(group)
        assert min(first.one_shot_bytes, first.chunk_bytes, first.streaming_bytes, first.push_bytes) > 0
        # Group rank 0's hold.
        group.set_tuning(MINE if rank == 0 else Tuning(chunk_bytes=1 << 20))
        assert group.get_tuning() == MINE
        assert group.eager_bytes <= MINE.chunk_bytes
        group.set_tuning(Tuning(push_bytes=8192))
        changed = group.get_tuning()
        assert (changed.push_bytes, changed.chunk_bytes) == (8192, first.chunk_bytes)
        # Out of range: an error on every rank alike, and nothing changes.
        with pytest.raises(InvalidArgumentError, match="chunk_bytes"):
            group.set_tuning(Tuning(chunk_bytes=1))
        for wrong, text in ((Tuning(push_bytes=-1), "push_bytes is -1"), ({}, "phalanx.core.Tuning")):
            with pytest.raises(InvalidArgumentError, match=text):
                group.set_tuning(wrong)
        assert group.get_tuning() == changed
        assert group.state == "active"
        group.barrier()


def test_values_are_those_of_group_rank_0_and_zero_is_the_built_in_one(table):
    run_ranks(set_and_get, 3)


def results_stay(rank, world_size):
    np = pytest.importorskip("numpy", reason="needs numpy")
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        memory = world.alloc(400_000)
        symm, block = group.rendezvous(memory), np.frombuffer(memory.buffer(), np.float32)
        for tuning in (Tuning(), MINE, Tuning(1, 4096, 1, 64), Tuning(1 << 40, 1 << 30, 1 << 40, 1 << 30)):
            group.set_tuning(tuning)
            for count in (1, 300, 100_000):
                mine, out = np.full(count, rank + 1, np.float32), np.empty(count, np.float32)
                group.all_reduce(mine, out)
                assert (out == sum(range(1, world_size + 1))).all()
                symm.barrier()
                block[:count] = rank + 1
                symm.all_reduce(0, None, count, "float32")
                assert (block[:count] == out).all()


def test_no_values_change_a_result(table):
    run_ranks(results_stay, 3)


# ---- the table ----------------------------------------------------------------------------------


def save(rank, world_size, path):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        group.set_tuning(MINE)
        if rank == 0:
            group.save_tuning(path)
        group.barrier()


def get(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        return group.get_tuning(), built_in(group)


def test_saved_values_are_those_of_later_groups_of_this_size(table, tmp_path):
    run_ranks(save, 2, None)
    assert rows_of_host(table.read_text()) == {2: {name: str(value) for name, value in vars(MINE).items()}}
    assert [values for values, _ in run_ranks(get, 2)] == [MINE] * 2
    for values, default in run_ranks(get, 3):
        assert values == default != MINE
    run_ranks(save, 3, tmp_path / "other")
    assert list(rows_of_host(table.read_text())) == [2]
    assert list(rows_of_host((tmp_path / "other").read_text())) == [3]


def test_all_ranks_use_the_table_of_group_rank_0(table, tmp_path):
    run_ranks(save, 2, table)
    missing = {"PHALANX_TUNING": str(tmp_path / "missing")}
    assert [values for values, _ in run_ranks(get, 2, env=[{}, missing])] == [MINE] * 2
    for values, default in run_ranks(get, 2, env=[missing, {}]):
        assert values == default


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: "",
        lambda row: "\0\xff nonsense = = =\n" * 100,
        lambda row: (
            row.replace("=65536", "=many").replace("=2048", "=-1").replace("=4096", "=").replace("=1048576", "")
        ),
        lambda row: row.replace("chunk_bytes=65536", "chunk_bytes=1"),
        lambda row: row.replace("push_bytes=4096", "push_bytes=99999999999999999999999"),
        lambda row: row.replace("host=", "host=0"),
        lambda row: row.replace("ranks=2", "ranks=2x"),
    ],
    ids=["empty", "no table", "no numbers", "too small", "too long", "another host", "no size"],
)
def test_nonsense_in_the_table_is_passed_over(table, spoil, request):
    one_is_too_long = request.node.callspec.id == "too long"
    run_ranks(save, 2, table)
    table.write_text(spoil(table.read_text()), errors="replace")
    for values, default in run_ranks(get, 2):
        assert values == (replace(MINE, push_bytes=default.push_bytes) if one_is_too_long else default)


def test_where_the_table_is(monkeypatch):
    for name in ("PHALANX_TUNING", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert table_path() is None
    monkeypatch.setenv("HOME", "/users/me")
    assert table_path() == Path("/users/me/.cache/phalanx/tuning")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert table_path() == Path("/cache/phalanx/tuning")
    monkeypatch.setenv("PHALANX_TUNING", "/t")
    assert table_path() == Path("/t")


def test_a_table_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with World(0, 1) as world:
        group = world.create_group("g", [0])
        (tmp_path / "file").touch()
        with pytest.raises(SystemCallError, match=r"file/tuning"):
            group.save_tuning(tmp_path / "file" / "tuning")
        for path, text in ((7, "give a str or a Path"), ("", "names no file"), ("a\0b", "names no file")):
            with pytest.raises(InvalidArgumentError, match=text):
                group.save_tuning(path)


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
    assert tune.default_ranks(1) == [2, 4]
    assert tune.default_ranks(2) == [2, 4]
    assert tune.default_ranks(6) == [2, 3, 4, 5, 6]
    assert tune.default_ranks(24) == [2, 3, 4, 5, 6, 7, 8, 16, 24]
    assert tune.default_ranks(200)[-1] == 64


# ---- the command --------------------------------------------------------------------------------

QUICK = ["--seconds", "0.1", "--largest", "64k"]


def test_tune_writes_a_table_that_new_groups_read(table, capsys):
    assert _cli.main(["tune", "--ranks", "2,3", *QUICK]) == 0
    text = capsys.readouterr().out
    assert f"table: {table} (not there)" in text
    assert f"wrote {table}" in text
    for name in vars(MINE):
        assert text.count(f"  {name} ") == (2 if name != "push_bytes" else 0)  # which means nothing to few ranks
    rows = rows_of_host(table.read_text())
    assert list(rows) == [2, 3]
    for values, _ in run_ranks(get, 2):
        assert {name: str(value) for name, value in vars(values).items()} == rows[2]


def test_tune_writes_to_another_file_or_nowhere(table, tmp_path, capsys):
    other = tmp_path / "other"
    assert _cli.main(["tune", "--ranks", "2", *QUICK, "--output", str(other)]) == 0
    assert list(rows_of_host(other.read_text())) == [2]
    assert f"wrote {other}: groups use it where the environment variable PHALANX_TUNING is" in capsys.readouterr().out
    assert _cli.main(["tune", "--ranks", "2", *QUICK, "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not table.exists()


def test_tune_shows_the_values_that_groups_have(table, capsys):
    assert _cli.main(["tune", "--show", "--ranks", "2"]) == 0
    assert "built-in" not in capsys.readouterr().out
    run_ranks(save, 2, table)
    assert _cli.main(["tune", "--show", "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["chunk_bytes", "64k"] for line in lines)
    assert any("built-in" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "1"], "2 to 64"),
        (["--ranks", "two"], "no list of numbers"),
        (["--seconds", "0"], "must be positive"),
        (["--largest", "1k"], "between 64k and 1g"),
        (["--largest", "big"], "no size"),
        (["--output", "/nowhere/at/all"], "there is no such directory"),
    ],
)
def test_tune_refuses_what_makes_no_sense(table, words, text, capsys):
    with pytest.raises(SystemExit) as caught:
        _cli.main(["tune", *words])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_tune_says_which_rank_failed_and_why(table, monkeypatch, capsys):
    monkeypatch.setitem(tune._RANKS, "cpu", "raise SystemExit('no luck')")
    assert _cli.main(["tune", "--ranks", "2", *QUICK]) == 1
    assert "failed: no luck" in capsys.readouterr().err
    assert not table.exists()


def test_ranks_of_tune_do_not_outlive_it(table):
    code = "import sys; from phalanx.core import tune; tune.main(sys.argv[1:])"
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


def test_doctor_mentions_the_table(table):
    def look():
        return next(each for each in doctor.examine() if each.name == "tuning")

    finding = look()
    assert finding.level == "ok"
    assert str(table) in finding.text
    assert "phalanx tune" in finding.text
    run_ranks(save, 2, table)
    finding = look()
    assert finding.level == "ok"
    assert finding.text == f"{table}, for groups of 2 ranks"
    table.write_text(table.read_text().replace("=65536", "=many"))
    assert look().level == "warn"
    table.write_text("host=1 ranks=2\n")
    assert "none for this host" in look().text
