"""Messages as ops: functional forms, torch.compile, fake tensors."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as theirs

import phalanx.collectives as pc
from c10d_groups import apart
from ranks import run_ranks


def test_the_forms_have_the_arguments_of_torchs():  # P27
    for name in ("isend_inplace", "irecv_inplace", "batch_p2p_ops_inplace"):
        ours, wanted = (inspect.signature(getattr(module, name)).parameters for module in (pc, theirs))
        assert list(ours) == list(wanted), f"torch {torch.__version__} has changed {name}"
    for name in ("isend", "irecv", "send", "recv"):
        ours, wanted = (inspect.signature(getattr(module, name)).parameters for module in (pc, dist))
        assert list(ours) == list(wanted), f"torch {torch.__version__} has changed {name}"
    assert list(inspect.signature(pc.P2POp).parameters) == list(inspect.signature(dist.P2POp.__init__).parameters)[1:]
    for name in ("isend", "irecv", "batch_p2p_ops"):
        ours, wanted = (
            str(getattr(space, name).default._schema) for space in (torch.ops.phalanx, torch.ops._c10d_functional)
        )
        assert ours.split("::")[1] == wanted.split("::")[1]


def functional(rank, size):
    group = dist.group.WORLD
    right, left = (rank + 1) % size, (rank - 1) % size
    x, got = torch.full((3,), float(rank)), torch.zeros(3)
    y = pc.irecv_inplace(got, left)
    assert type(y) is pc.AsyncCollectiveTensor and not y.completed
    z = pc.isend_inplace(x, right, group=group)
    assert (y + 1).tolist() == [left + 1.0] * 3 and got.tolist() == [left] * 3 and y.completed
    assert z.tolist() == [rank] * 3
    results = pc.batch_p2p_ops_inplace(["irecv", "isend"], [left, right], [3, 3], [got, x * 2], group)
    assert results[0].view(3, 1)[0].item() == 2.0 * left and results[1].tolist() == [2.0 * rank] * 3
    name = group.group_name
    coming = torch.ops.phalanx.irecv(got, left, 0, name)
    kept = x + 5
    token = torch.ops.phalanx.isend(kept, right, 0, name)
    kept.zero_()  # it was copied
    assert token.shape == (0,) and torch.ops.phalanx.wait_tensor(token) is not None
    assert torch.ops.phalanx.wait_tensor(coming).tolist() == [left + 5.0] * 3 and got.tolist() == [2.0 * left] * 3
    for call, text in (
        (
            lambda: pc.batch_p2p_ops_inplace(["isend", "recv"], [0, 0], [0, 0], [x, x]),
            "op_list has 'recv'; its entries must be",
        ),
        (lambda: pc.batch_p2p_ops_inplace(["isend"], [0, 0], [0], [x]), "1 ops, 2 peers, 1 tags and 1 tensors"),
        (lambda: pc.irecv_inplace(x, None), "src is missing"),
        (lambda: pc.isend_inplace(x, 0, group_dst=0), "dst and group_dst are both given"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("by", ["core", "torch"])
def test_functional_forms_give_pending_tensors(by):  # P12
    run_ranks(functional, 2, start_torch=True, env=apart(2) if by == "torch" else None)


def compiled(rank, size):
    group = dist.group.WORLD
    right, left = (rank + 1) % size, (rank - 1) % size

    def exchange(x):
        got = torch.empty_like(x)
        first = pc.batch_p2p_ops_inplace(["isend", "irecv"], [right, left], [0, 0], [x * 2, got], group)[1]
        if rank == 0:
            pc.isend_inplace(x + 1, None, group=group, group_dst=1)
        else:
            first = pc.irecv_inplace(got, 0, group=group) * 10
        return first + 1

    x = torch.full((4,), rank + 1.0)
    wanted = exchange(x)
    for backend in ("aot_eager", "inductor"):
        torch.compiler.reset()
        graph = torch.compile(exchange, fullgraph=True, dynamic=True, backend=backend)
        for _ in range(2):
            assert torch.equal(graph(x), wanted)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3)
        assert pc.irecv_inplace(fake, 0, group=group).shape == (2, 3)
        assert pc.isend_inplace(fake, 0, group=group).shape == (0,)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_they_compile_into_one_graph():  # P12
    run_ranks(compiled, 2, start_torch=True, timeout=300)


def checked(rank, size):
    name = dist.group.WORLD.group_name
    pc.enable_group(name)
    x, ops = torch.rand(4, 2), torch.ops.phalanx
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.isend.default, (x, 0, 0, name), test_utils=tests)
    torch.library.opcheck(
        ops.batch_p2p_ops.default, (["isend", "irecv"], [0, 0], [1, 1], [x, x], name), test_utils=tests
    )


def test_opcheck_finds_nothing():  # P12
    run_ranks(checked, 1, start_torch=True)
