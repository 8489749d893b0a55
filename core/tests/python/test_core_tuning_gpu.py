"""Tuning values of GPUs from Python."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
fake_torch_cuda = pytest.importorskip("fake_torch_cuda")

from phalanx.core import FileStore, GpuTuning, InvalidArgumentError, World  # noqa: E402
from phalanx.core.tuning import NEVER, GpuRow, one_word, rows_of_gpus, rows_of_host  # noqa: E402
from ranks import run_ranks, scratch  # noqa: E402

MINE = GpuTuning(line_bytes=128, two_shot_bytes=4096, multicast_bytes=5000, copy_bytes=6000, thread_bytes=64)
GPU = ("cuda", 0)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of the table that new groups of this process, and of ranks, read. There is none yet."""
    path = tmp_path / "deep" / "tuning"
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    return path


def join(rank, world_size):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000)


# ---- values -------------------------------------------------------------------------------------


def set_and_get(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        first = group.get_gpu_tuning()
        assert first.copy_bytes == NEVER
        assert first.thread_bytes == 16
        # Group rank 0's hold, and zero is the built-in value.
        group.set_gpu_tuning(MINE if rank == 0 else GpuTuning(line_bytes=1))
        assert group.get_gpu_tuning() == MINE
        group.set_gpu_tuning(GpuTuning(line_bytes=64))
        assert group.get_gpu_tuning() == replace(first, line_bytes=64)
        # Out of range: an error on every rank alike, and nothing changes.
        with pytest.raises(InvalidArgumentError, match="thread_bytes is 17; expected 16 to 4096, a multiple of 16"):
            group.set_gpu_tuning(GpuTuning(thread_bytes=17))
        for wrong, text in ((GpuTuning(copy_bytes=-1), "copy_bytes is -1"), ({}, "phalanx.core.GpuTuning")):
            with pytest.raises(InvalidArgumentError, match=text):
                group.set_gpu_tuning(wrong)
        assert group.get_gpu_tuning() == replace(first, line_bytes=64)
        with pytest.raises(InvalidArgumentError, match="Make a rendezvous of GPU memory first"):
            group.save_gpu_tuning()
        group.barrier()


def test_group_rank_0_sets_values_and_zero_is_the_built_in_one(table):
    run_ranks(set_and_get, 3)
    assert not table.exists()


def save(rank, world_size):
    fake_torch_cuda.load()
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        group.rendezvous(world.alloc(100, device=GPU))
        group.set_gpu_tuning(MINE)
        if rank == 0:
            group.save_gpu_tuning()
        group.barrier()


def get(rank, world_size):
    fake_torch_cuda.load()
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        before = group.get_gpu_tuning()
        group.barrier(device=GPU)
        torch.cuda.synchronize()
        return before, group.get_gpu_tuning()


def test_saved_values_are_those_of_later_groups_of_this_size(table):
    fake_torch_cuda.needs_cuda()
    run_ranks(save, 2)
    ((key, row),) = rows_of_gpus(table.read_text()).items()
    assert (key.ranks, key.shared) == (2, True)
    assert row == {name: str(value) for name, value in vars(MINE).items()}
    for before, after in run_ranks(get, 2):
        assert before != after == MINE
    for before, after in run_ranks(get, 3):
        assert before == after


def test_rows_of_gpus_and_of_hosts_are_told_apart():
    text = "host=1 ranks=2 chunk_bytes=4\ngpu=b ranks=2 shared=1 line_bytes=5\n# gpu\ngpu=a ranks=8 shared=0 x=y\n"
    rows = rows_of_gpus(text)
    assert list(rows) == [GpuRow("a", 8, False), GpuRow("b", 2, True)]
    assert rows[GpuRow("b", 2, True)] == {"line_bytes": "5"}
    assert rows_of_host(text) == {}
    assert one_word("NVIDIA H100 80GB=x\té") == "NVIDIA_H100_80GB_x___"
