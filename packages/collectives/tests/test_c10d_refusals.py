"""Arguments that are wrong on one rank alone, on the backend `phalanx`: the other ranks do not wait for it."""

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups
from phalanx.core import InvalidArgumentError

HOUR = 3600  # of the groups: a rank that waits for it is ended by the limit of the test


def x(*shape):
    return torch.zeros(shape)


# By name: the call, for a rank whose arguments are wrong or not; and what the text of the refusal says.
SHARED = "more than one element of the written-to tensor"
CALLS = {
    "all_reduce": (lambda n, r, wrong: dist.all_reduce(x(1).expand(4) if wrong else x(4)), SHARED),
    "broadcast": (lambda n, r, wrong: dist.broadcast(x(1).expand(4) if wrong else x(4), 0), SHARED),
    "reduce": (lambda n, r, wrong: dist.reduce(x(1).expand(4) if wrong else x(4), n - 1), SHARED),
    "gather": (
        lambda n, r, wrong: dist.gather(
            x(4), [x(4)] * n if wrong else [x(4) for _ in range(n)] if r == n - 1 else None, n - 1
        ),
        SHARED,
    ),
    "scatter": (
        lambda n, r, wrong: dist.scatter(x(1).expand(4) if wrong else x(4), [x(4)] * n if r == 0 else None, 0),
        SHARED,
    ),
    "all_gather": (
        lambda n, r, wrong: dist.all_gather([x(4)] * n if wrong else [x(4) for _ in range(n)], x(4)),
        SHARED,
    ),
    "all_gather of another size": (
        lambda n, r, wrong: dist.all_gather([x(4) for _ in range(n)], x(5) if wrong else x(4)),
        "the input has 5 elements",
    ),
    "all_gather_into_tensor": (
        lambda n, r, wrong: dist.all_gather_into_tensor(x(4 * n + wrong), x(4)),
        "needs 3 times",
    ),
    "all_gather_coalesced": (
        lambda n, r, wrong: dist.all_gather_coalesced([[x(4)] for _ in range(n + wrong)], [x(4)]),
        "3 lists of outputs are needed",
    ),
    "all_reduce_coalesced": (
        lambda n, r, wrong: dist.all_reduce_coalesced([x(1).expand(4), x(4)] if wrong else [x(4), x(4)]),
        SHARED,
    ),
    "reduce_scatter": (
        lambda n, r, wrong: dist.reduce_scatter(x(1).expand(4) if wrong else x(4), [x(4)] * n),
        SHARED,
    ),
    "reduce_scatter of a dtype that is not reduced": (
        lambda n, r, wrong: dist.reduce_scatter_tensor(
            *(t.to(torch.complex32) if wrong else t for t in (x(2), x(2 * n)))
        ),
        "does not reduce tensors of dtype",
    ),
    "all_to_all": (
        lambda n, r, wrong: dist.all_to_all([x(4)] * n if wrong else [x(4) for _ in range(n)], [x(4)] * n),
        SHARED,
    ),
    "all_to_all_single": (
        lambda n, r, wrong: dist.all_to_all_single(x(n), x(n), [1] * n, [2] + [1] * (n - 1) if wrong else [1] * n),
        "add up to 4",
    ),
}


def one_refuses(rank, size, before):
    join(rank, size, HOUR)
    for name, (call, text) in CALLS.items():
        group = dist.new_group(list(range(size)), backend="phalanx")
        if before:
            dist.barrier(group)
        world = dist.group.WORLD
        dist.distributed_c10d._update_default_pg(group)
        wrong = size - 1
        try:
            with pytest.raises(RuntimeError) as caught:
                call(size, rank, rank == wrong)
        finally:
            dist.distributed_c10d._update_default_pg(world)
        message = str(caught.value)
        assert text in message, (name, message)
        if rank != wrong:
            assert isinstance(caught.value, dist.DistBackendError), (name, message)
            assert f"rank {wrong} " in message and "refused its own call" in message, (name, message)
    dist.barrier()  # a rank that leaves sooner is told of as one that has left
    dist.destroy_process_group()


@pytest.mark.parametrize("before", [True, False], ids=["after a collective", "as the first"])
def test_ranks_whose_peer_refuses_its_call_fail_at_once(before):
    run_groups(one_refuses, 3, before)


BY_ITS_ROOT = ("broadcast", "reduce", "gather")  # or by all ranks but the root: never by all


def all_refuse(rank, size):
    join(rank, size, HOUR)
    for name, (call, _) in CALLS.items():
        if name in BY_ITS_ROOT:
            continue
        with pytest.raises(RuntimeError):
            call(size, rank, True)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [size] * 2, name
    with pytest.raises(InvalidArgumentError) as caught:
        dist.all_gather_into_tensor(x(3), x(4))
    assert isinstance(caught.value, ValueError)
    dist.barrier()


def test_a_group_whose_ranks_all_refuse_a_call_works_on():
    run_groups(all_refuse, 3)
