"""The autograd kernels of the backend for the ops of c10d, which warn where torch's fallback would."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

from c10d_groups import has_compiler, join, native_folder, run_groups
from phalanx.collectives import c10d
from ranks import run_ranks, scratch

OPS = [
    "broadcast_",
    "allreduce_",
    "reduce_",
    "allgather_",
    "_allgather_base_",
    "gather_",
    "scatter_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
]
OTHERS = """
import torch
others = torch.library.Library("c10d", "IMPL")
others.impl("send", lambda *given: None, "AutogradCPU")
from phalanx.collectives import c10d
c10d.load()
for op in ("send", "recv_"):
    table = torch._C._dispatch_dump_table(f"c10d::{op}").splitlines()
    print(*(line for line in table if line.startswith("AutogradCPU:")))
"""


def kernel_of(op):
    table = torch._C._dispatch_dump_table(f"c10d::{op}").splitlines()
    return next(line for line in table if line.startswith("AutogradCPU:"))


def kernels(rank, size):
    c10d.load()
    return [op for op in OPS if "autograd.cpp" not in kernel_of(op)]


def told(call, tensors):
    """The warnings of a call with tensors of a graph through which somebody differentiates."""
    leaf = torch.full((2,), 3.0, requires_grad=True)
    given = [leaf * 2 for _ in range(tensors)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(*given)
        sum(given).sum().backward()
    return [str(each.message) for each in seen if "autograd kernel" in str(each.message)]


def calls(size):
    def ones():
        return [torch.ones(2) for _ in range(size)]

    yield dist.all_reduce, 1
    yield (lambda x: dist.broadcast(x, 0)), 1
    yield (lambda x: dist.reduce(x, 1)), 1
    yield (lambda x: dist.all_gather(ones(), x)), 1
    yield (lambda x, y: dist.all_gather([x, y], torch.ones(2))), 2
    yield (lambda x, y: dist.all_to_all([x, y], ones())), 2
    yield (lambda x, y: dist.all_to_all_single(x, y)), 2
    yield (lambda x: dist.gather(x, ones() if dist.get_rank() == 0 else None)), 1
    yield (lambda x: dist.scatter(x, ones() if dist.get_rank() == 0 else None)), 1


def warned(rank, size, backend):
    torch.set_warn_always(True)
    if backend == "gloo":
        dist.init_process_group("gloo", init_method=f"file://{scratch()}/store", rank=rank, world_size=size)
        assert not any("autograd.cpp" in kernel_of(op) for op in OPS)
    else:
        join(rank, size)
    texts = [told(*call) for call in calls(size)]
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(x)
    assert x.tolist() == [size, size] and x.is_leaf
    dist.destroy_process_group()
    return texts


def test_each_op_has_a_kernel_of_ours_on_the_installed_torch():
    assert run_groups(kernels, 1) == [[]]


def test_calls_on_tensors_of_a_graph_warn_as_they_do_without_it():  # P2
    ours, gloos = run_groups(warned, 2, "phalanx"), run_ranks(warned, 2, "gloo")
    assert ours == gloos
    assert all("c10d::allreduce_" in texts[0][0] for texts in ours)


def test_a_kernel_that_somebody_else_has_stays():
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    env = {**os.environ, "PHALANX_NATIVE": native_folder()}
    done = subprocess.run([sys.executable, "-c", OTHERS], env=env, capture_output=True, text=True, timeout=280)
    send, receive = done.stdout.splitlines()
    assert "autograd.cpp" not in send and "autograd.cpp" in receive, done.stderr
