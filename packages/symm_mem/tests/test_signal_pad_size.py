"""How large signal pads are: set before the first allocation, alike on all ranks."""

import pytest

from phalanx import symm_mem
from phalanx.core import FileStore, InUseError, InvalidArgumentError, MemoryStore, MismatchError
from phalanx.symm_mem import SymmetricMemory
from ranks import run_ranks, scratch


def alone():
    """A handle of one rank, whose pad is half of one of two ranks."""
    symm_mem.set_group_info("tp", 0, 1, MemoryStore())
    return symm_mem.rendezvous(symm_mem.empty(1), "tp")


def test_the_default_is_that_of_the_rank_context():
    with symm_mem.rank_context():
        assert symm_mem.get_signal_pad_size() == SymmetricMemory.signal_pad_size == 64 * 2 * 4
        assert alone().signal_channels == 64
    with symm_mem.rank_context(signal_channels=5):
        assert symm_mem.get_signal_pad_size() == 5 * 2 * 4
        symm_mem.set_signal_pad_size(0)
        assert symm_mem.get_signal_pad_size() == 64 * 2 * 4


@pytest.mark.parametrize(("size", "channels"), [(1, 1), (8, 1), (9, 2), (9216, 1152), (524_288, 65_536)])
def test_the_size_gives_the_channels(size, channels):  # M28
    with symm_mem.rank_context(signal_channels=5):
        SymmetricMemory.signal_pad_size = size  # as set_signal_pad_size
        assert symm_mem.get_signal_pad_size() == SymmetricMemory.signal_pad_size == size
        handle = alone()
        assert handle.signal_channels == channels
        assert handle.signal_pad_size == handle.get_signal_pad(0).nbytes == handle.symm.pad_stride * 4 >= channels * 4
        handle.put_signal(0, channels - 1)
        handle.wait_signal(0, channels - 1)
        handle.barrier(channels - 1)


@pytest.mark.parametrize("size", [-1, 524_289, 2**70, "8", None, 8.0])
def test_what_is_no_size_is_refused(size):
    with symm_mem.rank_context():
        with pytest.raises(InvalidArgumentError, match="expected 0 to 524288 bytes"):
            symm_mem.set_signal_pad_size(size)
        assert symm_mem.get_signal_pad_size() == 512


def test_it_is_set_before_the_first_allocation():
    with symm_mem.rank_context() as context:
        symm_mem.get_mem_stats()  # allocates nothing
        symm_mem.set_signal_pad_size(100)
        tensor = symm_mem.empty(1)
        with pytest.raises(
            InUseError, match="200 bytes make 25 channels, but .* its pads have 13; set the size before"
        ):
            symm_mem.set_signal_pad_size(200)
        symm_mem.set_signal_pad_size(104)  # which makes as many
        assert symm_mem.get_signal_pad_size() == 104
        del tensor
    with context.active(), pytest.raises(InvalidArgumentError, match="was closed"):
        symm_mem.set_signal_pad_size(100)


def sizes(rank, world_size):
    symm_mem.set_signal_pad_size(1000)
    for name, members in (("all", range(world_size)), ("some", range(2))):
        if rank in members:
            symm_mem.set_group_info(name, rank, len(members), FileStore(scratch() / name))
            handle = symm_mem.rendezvous(symm_mem.empty(1), name)
            assert handle.signal_channels == 125
            assert handle.signal_pad_size == 128 * 4 * len(members) >= 1000
            handle.put_signal((rank + 1) % len(members), 124)
            handle.wait_signal((rank - 1) % len(members), 124)
            handle.barrier(124)
    symm_mem.finalize()  # after which a new size may be set
    symm_mem.set_signal_pad_size(1000 if rank != 1 else 2000)
    symm_mem.set_group_info("odd", rank, world_size, FileStore(scratch() / "odd"))
    with pytest.raises(MismatchError) as caught:
        symm_mem.rendezvous(symm_mem.empty(1), "odd")
    return str(caught.value)


def test_pads_have_that_size_in_every_group_and_ranks_that_disagree_are_told():  # M19
    for text in run_ranks(sizes, 3):
        assert "signal_channels" in text
        assert "rank 1" in text and "250 channels" in text and "125 channels" in text
