"""Tuning values, and the table that holds them."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core import FileStore, InvalidArgumentError, SystemCallError, Tuning, World, doctor
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
