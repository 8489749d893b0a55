"""get, put_signal and wait_signal of the module: data and the news of it."""

import pytest
import torch

from phalanx import symm_mem
from phalanx.core import FileStore, InvalidArgumentError, MemoryStore
from ranks import run_ranks, scratch


def passes_on(rank, world_size):
    symm_mem.set_group_info("tp", rank, world_size, FileStore(scratch() / "store"))
    tensor = symm_mem.empty(2, 12)
    whole, half = symm_mem.rendezvous(tensor, "tp"), symm_mem.rendezvous(tensor[1], "tp")
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    symm_mem.put_signal(torch.full((2, 12), float(rank)), whole, following)
    symm_mem.wait_signal(whole, previous)
    assert tensor.eq(previous).all()
    whole.barrier()
    # Where the handle's tensor starts, of any strides and dtype, and needing a gradient.
    strided = torch.arange(12.0).view(3, 4).t().requires_grad_() + rank
    symm_mem.put_signal(strided, half, following)
    half.wait_signal(previous)  # a signal as any other
    assert tensor[0].eq(previous).all()
    assert torch.equal(tensor[1], (torch.arange(12.0).view(3, 4).t() + previous).reshape(-1))
    assert not tensor.requires_grad
    whole.barrier()
    symm_mem.put_signal(torch.tensor([7 + rank], dtype=torch.int64), whole, following)
    symm_mem.wait_signal(whole, previous)
    assert tensor.view(torch.int64)[0, 0] == 7 + previous
    whole.barrier()
    tensor.copy_(torch.arange(24.0).view(2, 12) + 100 * rank)
    whole.barrier()
    for peer in range(world_size):
        got = torch.empty(2, 3)
        symm_mem.get(got, whole, peer, offset=4)
        assert torch.equal(got, torch.arange(4.0, 10.0).view(2, 3) + 100 * peer)
        symm_mem.get(got[0], half, peer)  # from where the handle's tensor starts
        assert got[0].tolist() == [12 + 100 * peer, 13 + 100 * peer, 14 + 100 * peer]
    symm_mem.get(torch.empty(0), whole, previous, 24)
    whole.barrier()


def test_what_was_put_is_there_after_the_wait():  # M24 M27 M40
    run_ranks(passes_on, 3)


def test_what_does_not_fit_is_refused_and_nothing_is_sent():
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        tensor = symm_mem.empty(4)
        handle = symm_mem.rendezvous(tensor, "tp")
        odd = symm_mem.rendezvous(tensor.view(torch.uint8)[1:], "tp")
        for call, text in (
            (lambda: symm_mem.put_signal(torch.ones(5), handle, 0), "need 20 bytes"),
            (lambda: symm_mem.put_signal(torch.ones(1), odd, 0), "not a multiple of the 4 bytes"),
            (lambda: symm_mem.put_signal(torch.ones(1), handle, 1), "rank is 1"),
            (lambda: symm_mem.put_signal(torch.ones(1, device="meta"), handle, 0), "src is on meta"),
            (lambda: symm_mem.put_signal([1.0], handle, 0), r"src is \[1.0\]; give a tensor"),
            (lambda: symm_mem.put_signal(torch.ones(1), tensor, 0), "hdl is a Tensor"),
            (lambda: symm_mem.get(torch.ones(5), handle, 0), "need 20 bytes"),
            (lambda: symm_mem.get(torch.ones(2), handle, 0, 3), "need 20 bytes"),
            (lambda: symm_mem.get(torch.ones(2), handle, 0, -1), "offset is -1"),
            (lambda: symm_mem.get(torch.ones(1), odd, 0), "no multiple of the 4 bytes"),
            (lambda: symm_mem.get(torch.ones(1), handle, 1), "rank is 1"),
            (lambda: symm_mem.get(torch.ones(4)[::2], handle, 0), "give a contiguous tensor on cpu"),
            (lambda: symm_mem.get(torch.ones(1, device="meta"), handle, 0), "dst is on meta"),
            (lambda: symm_mem.get(torch.ones(1), tensor, 0), "hdl is a Tensor"),
            (lambda: symm_mem.wait_signal("tp", 0), "hdl is a str"),
            (lambda: symm_mem.wait_signal(handle, 1), "group_rank"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                call()
        assert not tensor.any() and not handle.get_signal_pad(0).view(torch.int32).any()
