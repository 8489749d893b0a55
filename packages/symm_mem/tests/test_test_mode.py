"""Which groups symmetric memory is to be had for, and the pretence of it."""

import threading

import pytest
import torch.distributed as dist

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError, MemoryStore
from ranks import run_ranks

enabled = symm_mem.is_symm_mem_enabled_for_group


def test_groups_of_names_are_enabled_once_they_are_known():
    with symm_mem.rank_context():
        assert not enabled("tp")
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        assert enabled("tp")
        with pytest.raises(InvalidArgumentError, match="give a name"):
            enabled(None)


def test_the_test_mode_says_yes_for_groups_that_need_not_exist():
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        with symm_mem._test_mode(group_names={"0", "1"}):
            assert enabled("0") and enabled("1")
            assert not enabled("tp")
            with symm_mem._test_mode():
                assert enabled("0") and enabled("anything")
            with symm_mem._test_mode(set()):
                assert not enabled("0")
            assert enabled("0") and not enabled("anything")
            seen = []
            other = threading.Thread(target=lambda: seen.append(enabled("0")))
            other.start()
            other.join()
            assert seen == [False]  # it is this thread that pretends
        with pytest.raises(ZeroDivisionError), symm_mem._test_mode():
            raise ZeroDivisionError
        assert enabled("tp") and not enabled("0")


def of_torch(rank, size):
    name = dist.group.WORLD.group_name
    assert enabled(name)  # and nobody has met
    assert not enabled("no such group")
    dist.destroy_process_group()
    assert not enabled(name)
    dist.init_process_group("fake", rank=rank, world_size=4)
    assert not enabled(dist.group.WORLD.group_name)  # there is no memory to share
    with symm_mem._test_mode():
        assert enabled(dist.group.WORLD.group_name)


def test_process_groups_of_torch_are_enabled_while_they_last():
    run_ranks(of_torch, 1, start_torch=True)
