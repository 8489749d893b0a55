"""Which calls take the fast path of eager mode, and what they do; with and without what `phalanx build` compiles."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx.collectives as pc
from phalanx.collectives._fast_path import FastPath
from ranks import run_ranks


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def is_open(*args):
    """Whether it was taken; then the result has been waited for."""
    begun = FastPath("all_reduce").fast(*args)
    assert begun is None or type(begun) is pc.AsyncCollectiveTensor
    return begun is not None and torch.equal(begun + 0, args[0])


def opens(rank, size):
    name = dist.group.WORLD.group_name
    pc.enable_group(dist.group.WORLD)
    x = torch.arange(6.0).view(2, 3)
    assert is_open(x, "max", name)
    assert is_open(x.t(), "MAX", name)  # any strides
    assert is_open(torch.nn.Parameter(x, requires_grad=False), "max", name)
    needs = x.clone().requires_grad_()
    assert not is_open(needs, "max", name)
    with torch.no_grad():
        assert is_open(needs, "max", name)
    assert not is_open(x.as_subclass(Subclass), "max", name)
    assert not is_open(torch.empty(3, device="meta"), "max", name)
    assert not is_open(x.to(torch.complex64).conj(), "sum", name)
    with torch.inference_mode():
        made_here = x.clone()
    assert not is_open(made_here, "max", name)
    with Watch():
        assert not is_open(x, "max", name)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not is_open(x, "max", name)
    assert is_open(x, "max", name)


def test_it_is_open_where_the_dispatcher_would_only_call_the_kernel():  # F26
    run_ranks(opens, 1, start_torch=True)


def pending_results(rank, size):
    group = dist.group.WORLD
    pc.enable_group(group)
    for shape in ((), (0,), (5,), (2, 0, 3), (2, 3, 4)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = torch.full(shape, rank + 1).to(dtype)
            y = pc.all_reduce(x, "sum", group)
            assert type(y) is pc.AsyncCollectiveTensor and not y.completed
            assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)
            assert not y.requires_grad and y.is_contiguous() and y.is_leaf
            keys = torch._C._dispatch_keys(y)
            assert keys.has(torch._C.DispatchKey.Python) and keys.has(torch._C.DispatchKey.AutogradCPU)
            assert torch.equal(y + 0, torch.full(shape, sum(range(1, size + 1))).to(dtype)) and y.completed
    gc.collect()


def test_its_results_are_like_any_others_that_are_pending():  # A1
    run_ranks(pending_results, 2, start_torch=True)


def in_place(rank, size):
    group = dist.group.WORLD
    pc.enable_group(group)
    x = torch.full((3,), float(rank))
    before = x._version
    assert FastPath("all_reduce_").fast(x, "max", group.group_name) is x
    assert torch.equal(x, torch.full((3,), size - 1.0)) and x._version == before + 1
    assert FastPath("broadcast_").fast(x.requires_grad_(), 0, group.group_name) is None
    leaf = torch.ones(3, requires_grad=True)
    used = leaf * 2
    saved = used**2  # needs `used` for its gradient
    with torch.no_grad():
        pc.broadcast_(used, 0, group)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_what_writes_in_place_counts_the_version():  # F21
    run_ranks(in_place, 2, start_torch=True)


def odd_arguments(rank, size):
    """What is not of the kind that the schema names is the dispatcher's to convert, or to refuse."""
    group, name = dist.group.WORLD, dist.group.WORLD.group_name
    pc.enable_group(group)
    x = torch.ones(4)
    source = torch.tensor(0)  # torch takes it for an int
    assert torch.equal(pc.broadcast(x, source.item(), group) + 0, x)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        pc.all_reduce(x, 7, group)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        pc.broadcast(x, "0", group)
    with pytest.raises((ValueError, RuntimeError), match="src"):  # torch refuses it where nothing is compiled
        pc.broadcast(x, 2**70, group)
    with pytest.raises(TypeError):
        pc.all_reduce([1.0], "sum", group)
    with pytest.raises(ValueError, match=r"reduce op\w* '?nonsense"):
        pc.all_reduce(x, "nonsense", group)
    with pytest.raises(ValueError, match="src is 9"):
        pc.broadcast(x, 9, group)
    assert is_open(x, "max", name)


def test_arguments_of_another_kind_are_not_misread():
    run_ranks(odd_arguments, 1, start_torch=True)
