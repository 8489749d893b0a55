"""Pending tensors inside torch.func: there another object stands for the tensor."""

import torch
import torch.distributed as dist

import phalanx.collectives as pc
from ranks import run_ranks


def transformed(rank, size):
    group = dist.group.WORLD
    x = torch.arange(6.0).view(2, 3)
    total = x * size + sum(range(size))

    def pending():
        result = pc.all_reduce(x + rank, "sum", group)
        assert type(result) is pc.AsyncCollectiveTensor and not result.completed
        return result

    def row_sum(row):
        return row.sum()

    pc.enable_group(group)
    y = pending()
    assert torch.equal(torch.vmap(row_sum)(y), total.sum(1)) and y.completed
    assert torch.equal(torch.vmap(row_sum, in_dims=1)(pending()[:, 1:]), total[:, 1:].sum(0))  # of a view
    y = pending()  # from outside, as what every row is multiplied by
    assert torch.equal(torch.vmap(lambda row: row @ y.t())(x), x @ total.t())
    y = pending()
    assert torch.equal(torch.func.grad(lambda t: (t * y).sum())(x), total)
    assert torch.equal(torch.func.grad(lambda t: (t * t).sum())(pending()), 2 * total)


def test_a_pending_tensor_is_waited_for_whatever_stands_for_it():  # A4
    run_ranks(transformed, 2, start_torch=True)
