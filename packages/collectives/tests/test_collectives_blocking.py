"""The ops that are complete on return: torch.ops.phalanx.blocking_*."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx.collectives as pc
from c10d_groups import apart
from ranks import run_ranks

ops = torch.ops.phalanx


def calls(size, name):
    """Each functional op and its blocking form, on a tensor of [size, 3]."""
    even = [1] * size
    for op, *args in (
        ("all_reduce", "sum", name),
        ("all_reduce", "avg", name),
        ("all_gather_into_tensor", size, name),
        ("reduce_scatter_tensor", "sum", size, name),
        ("all_gather_v", [size] * size, 0, name),
        ("reduce_scatter_v", "sum", even, 1, 0, name),
        ("all_to_all_single", even, even, name),
        ("shard_dim_alltoall", [3] * size, even, 1, 1, 0, name),
        ("broadcast", size - 1, name),
    ):
        yield getattr(ops, op), getattr(ops, f"blocking_{op}"), args


def agreeing(rank, size, enabled):
    group = dist.group.WORLD
    name = group.group_name
    if enabled:
        assert pc.enable_group(group)
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(rank))
    for op, blocking, args in calls(size, name):
        expected = ops.wait_tensor(op(x, *args))
        assert torch.equal(blocking(x, *args), expected), op
        mine, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        wanted, found = ops.wait_tensor(op(mine, *args)), blocking(ours, *args)
        assert type(found) is torch.Tensor and torch.equal(found.detach(), expected)
        for y in wanted, found:
            (y.sin() * (rank + 1)).sum().backward()
        assert torch.equal(ours.grad, mine.grad), op
    y = x.clone()
    before = y._version
    ops.blocking_all_reduce_(y, "sum", name)
    assert torch.equal(y, ops.wait_tensor(ops.all_reduce(x, "sum", name))) and y._version > before
    lists = ops.blocking_all_reduce_coalesced([x, x.clone().requires_grad_()], "sum", name)
    assert torch.equal(lists[0], y) and lists[1].requires_grad
    with pytest.raises(RuntimeError, match="blocking_all_reduce_: .*writes into its argument.*use all_reduce"):
        ops.blocking_all_reduce_(x.clone().requires_grad_(), "sum", name)
    assert (ops.blocking_all_reduce(x, "sum", name) == y).all()


@pytest.mark.parametrize("size", [2, 3])
def test_they_give_what_the_op_and_a_wait_give_and_the_same_gradients(size):  # F26
    run_ranks(agreeing, size, True, start_torch=True)


def test_the_first_call_on_a_group_may_be_one():
    run_ranks(agreeing, 2, False, start_torch=True)


def elsewhere(rank, size):
    assert not pc.enable_group(dist.group.WORLD)
    agreeing(rank, size, False)


def test_so_do_they_on_a_group_that_the_core_does_not_serve():
    run_ranks(elsewhere, 2, start_torch=True, env=apart(2))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def out_of_the_ordinary(rank, size):
    group = dist.group.WORLD
    assert pc.enable_group(group)
    name = group.group_name
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    whole = ops.wait_tensor(ops.all_reduce(x, "sum", name))
    assert torch.equal(ops.blocking_all_reduce(x.t(), "sum", name), whole.t())
    strided = x.t().clone(memory_format=torch.preserve_format)
    ops.blocking_all_reduce_(strided, "sum", name)
    assert torch.equal(strided, whole.t())
    assert ops.blocking_all_reduce(x[:0], "sum", name).shape == (0, 3)
    z = torch.complex(x, -x)
    assert torch.equal(ops.blocking_all_reduce(z.conj(), "sum", name), torch.complex(whole, whole))
    assert torch.equal(ops.blocking_all_reduce(torch._neg_view(x), "sum", name), -whole)
    with torch.inference_mode():
        assert torch.equal(ops.blocking_all_reduce(x, "sum", name), whole)
    with Seen() as seen:
        ops.blocking_all_reduce(x, "sum", name)
    assert any("blocking_all_reduce" in each for each in seen.names)
    with FakeTensorMode():
        assert ops.blocking_all_reduce(torch.empty(5), "sum", name).shape == (5,)
    y = x.clone()
    ops.all_reduce_(y, "sum", name)  # pending, and what comes next reads it
    assert torch.equal(ops.blocking_all_reduce(y, "max", name), whole)
    ops.wait_tensor(y)
    leaf = x.clone().requires_grad_()
    before = leaf._version
    with torch.no_grad():
        assert not ops.blocking_all_reduce(leaf, "sum", name).requires_grad
        ops.blocking_all_reduce_(leaf, "sum", name)
    assert torch.equal(leaf.detach(), whole) and leaf._version > before
    for op in (ops.blocking_all_reduce, ops.blocking_all_reduce_):
        with pytest.raises(ValueError, match=r"reduce op\w* '?most"):
            op(x, "most", name)
        with pytest.raises(RuntimeError, match="only sum and avg are defined for complex64"):
            op(z.clone(), "max", name)


def test_what_is_out_of_the_ordinary_is_as_with_the_op_and_a_wait():  # F26
    run_ranks(out_of_the_ordinary, 2, start_torch=True)


def compiled(rank, size):
    group = dist.group.WORLD
    assert pc.enable_group(group)
    name = group.group_name
    x = torch.rand(size, 3, requires_grad=True)

    def function(x):
        y = ops.blocking_all_reduce(x.relu(), "sum", name) + 1
        z = y.detach().clone()
        ops.blocking_all_reduce_(z, "max", name)
        return y * 2, z

    expected = function(x)
    expected[0].sum().backward()
    gradient, x.grad = x.grad, None
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        found = torch.compile(function, backend=backend, fullgraph=True)(x)
        found[0].sum().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(x.grad, gradient)
        x.grad = None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_they_compile():  # F19
    run_ranks(compiled, 2, start_torch=True, timeout=240)


def checked(rank, size):
    name = dist.group.WORLD.group_name
    pc.enable_group(name)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for needs in (False, True):
        for _, blocking, args in calls(size, name):
            x = torch.rand(size, 3, requires_grad=needs)
            torch.library.opcheck(blocking.default, (x, *args), test_utils=tests)


def test_opcheck_finds_nothing():  # F19
    run_ranks(checked, 1, start_torch=True, timeout=120)
