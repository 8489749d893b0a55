"""Compiled functions on ranks whose shards differ: the same collectives on all, or an error on all."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from phalanx.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from ranks import run_ranks

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


# The ranks of one group take the same of the two; another group may have parts of other sizes.
UNEVEN = {"all_gather_v": "all_gather_into_tensor", "reduce_scatter_v": "reduce_scatter_tensor"}


class Listing:
    """A backend that lists the collectives of the forward and backward graphs."""

    def __init__(self):
        self.found = {"forward": [], "backward": []}
        self.backend = aot_autograd(
            fw_compiler=self.listing("forward"),
            bw_compiler=self.listing("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def listing(self, kind):
        def compiler(module, inputs):
            targets = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
            for one in targets:
                if any(name in one for name in NAMES):
                    space, name, *rest = one.split(".")
                    self.found[kind].append(".".join((space, UNEVEN.get(name, name), *rest)))
            return make_boxed_func(module.forward)

        return compiler


def check(function, tensors, mesh, placements, compiled):
    """Values and gradients of a compiled function on DTensors are those of one process."""
    whole = [one.clone().requires_grad_() for one in tensors]
    spread = [distribute_tensor(one, mesh, own).requires_grad_() for one, own in zip(tensors, placements, strict=True)]
    wanted, found = function(*whole), compiled(*spread)
    wanted.pow(2).sum().backward()
    found.pow(2).sum().backward()
    torch.testing.assert_close(found.full_tensor(), wanted)
    for one, other in zip(spread, whole, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


# ---- the same on all ranks -------------------------------------------------------------------------------------------


def product(a, b):
    return functional.gelu(a @ b).softmax(-1)


def outer(x):
    return (x[:, None] * x[None]).sum(-1)


def batched(x):
    return x[None] @ x[None].mT


def listed(rank, size, dynamic):
    mesh, random = init_device_mesh("cpu", (2, 2)), torch.Generator().manual_seed(0)
    shards, whole = Shard, Replicate()
    x, w = torch.randn(6, 8, generator=random), torch.randn(8, 10, generator=random)
    ways = (([shards(0), whole], [whole, shards(1)]), ([shards(0), shards(1)], [whole, shards(0)]))
    found = []
    listing = Listing()
    compiled = torch.compile(product, backend=listing.backend, dynamic=dynamic)
    for placements in ways:
        check(product, (x, w), mesh, placements, compiled)
    found.append({kind: list(names) for kind, names in listing.found.items()})
    torch._dynamo.reset()
    listing = Listing()
    compiled = torch.compile(outer, backend=listing.backend, dynamic=dynamic)
    for rows in (8, 7):
        one = torch.randn(rows, 4, generator=random)
        check(outer, (one,), mesh, ([shards(0), shards(0)],), compiled)
    found.append({kind: list(names) for kind, names in listing.found.items()})
    # A rank has nothing to do in some collectives of the others where their groups have no element.
    check(outer, (torch.randn(1, 4, generator=random),), mesh, ([shards(0), shards(0)],), compiled)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.thorough)])
def test_ranks_with_other_sizes_compile_the_same_collectives(dynamic):
    first, *others = run_ranks(listed, 4, dynamic, start_torch=True, timeout=280)
    assert all(one == first for one in others)
    # The gradient of a product is gathered once, and no collective of forward is done again.
    assert first[0]["forward"].count("phalanx.reduce_scatter_tensor.default") == 1
    assert first[0]["backward"].count("phalanx.reduce_scatter_tensor.default") == 0
    assert first[0]["backward"].count("phalanx.all_gather_into_tensor.default") == 1


def sizes(rank, size, ways):
    mesh, random = init_device_mesh("cpu", (size,)), torch.Generator().manual_seed(0)
    rows = [Shard(0)]

    def attention(x):
        return functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])

    for function in (outer, batched, attention):
        for dynamic in ways:
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager", dynamic=dynamic)
            for length in (8, 12, 7):
                check(function, (torch.randn(length, 4, generator=random),), mesh, (rows,), compiled)
    for dynamic in ways:
        torch._dynamo.reset()
        compiled = torch.compile(torch.mm, backend="aot_eager", dynamic=dynamic)
        for length in (6, 7, 8, 1):
            tensors = torch.randn(length, 8, generator=random), torch.randn(8, 10, generator=random)
            check(torch.mm, tensors, mesh, (rows, rows), compiled)


@pytest.mark.parametrize(
    "ways", [pytest.param((None,), marks=pytest.mark.slow), pytest.param((True, False), marks=pytest.mark.thorough)]
)
def test_sizes_may_change_and_be_cut_unevenly(ways):
    run_ranks(sizes, 2, ways, start_torch=True, timeout=280)


# ---- blocks that are computed again ----------------------------------------------------------------------------------


def again(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    reference = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    reference.load_state_dict(net.state_dict())
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def block(x):
        return functional.gelu(checkpoint(net, x, use_reentrant=False)) * 2

    compiled = torch.compile(block, backend="aot_eager")
    for length in (4, 5):
        x = torch.randn(length, 6)
        mine, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(mine).pow(2).sum().backward()
        (functional.gelu(reference(whole)) * 2).pow(2).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad)

    def rows(x, w):  # each rank has other sizes in the block
        return functional.gelu(checkpoint(lambda x: (x @ w).softmax(-1), x, use_reentrant=False)) * 2

    def plain(x, w):
        return functional.gelu((x @ w).softmax(-1)) * 2

    for options in ({}, {"dynamic": True}):
        torch._dynamo.reset()
        compiled = torch.compile(rows, backend="aot_eager", **options)
        for length in (7, 5):
            x, w = torch.randn(length, 6), torch.randn(6, 5)
            whole = [one.clone().requires_grad_() for one in (x, w)]
            spread = [distribute_tensor(one, mesh, [Shard(1)]).requires_grad_() for one in (x, w)]
            compiled(*spread).pow(2).sum().backward()
            plain(*whole).pow(2).sum().backward()
            for one, other in zip(spread, whole, strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.thorough
def test_a_checkpointed_block_is_the_first_that_a_process_compiles():
    run_ranks(again, 2, start_torch=True, timeout=200, fresh=True)


# ---- an error on all ranks -------------------------------------------------------------------------------------------


def differing(rank, size):
    mesh = init_device_mesh("cpu", (2, 2))
    whole = [Replicate(), Replicate()]

    def function(x):
        y = x.redistribute(placements=whole)
        if rank == 3:
            y = (y * x).sum().redistribute(placements=whole)
        return y.to_local()

    texts = []
    for needs_grad in (False, True):
        torch._dynamo.reset()
        x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0), Shard(1)]).requires_grad_(needs_grad)
        try:
            torch.compile(function, backend="aot_eager")(x)
        except RuntimeError as error:
            texts.append(str(error))
        # Nothing of the graphs was sent, so the mesh is as before.
        assert torch.equal(x.full_tensor(), torch.arange(32.0).view(8, 4))
    return texts


def test_where_graphs_differ_every_rank_raises_and_names_both():
    found = run_ranks(differing, 4, start_torch=True, timeout=120)
    for texts in found:
        assert len(texts) == 2
        for text in texts:
            assert "ranks compiled different graphs" in text
            assert "ranks 0, 1, 2: graph 0/0" in text
            assert "rank 3: graph 0/0" in text
            assert "all_reduce over mesh dims (1,) of (2, 2) of float32" in text


def shared(rank, size):
    mesh = init_device_mesh("cpu", (size,))

    def function(x, y):
        first = x + y  # moves x
        second = x * y
        x = x.clone().add_(1)
        return first + second + (x - y)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    tensors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24.0).view(6, 4)
    check(function, tensors, mesh, ([Shard(0)], [Shard(1)]), compiled)
    x = distribute_tensor(tensors[0], mesh, [Shard(0)])

    def written(x, y):
        total = x + y
        x.mul_(2)
        return total + (x + y)

    wanted = written(tensors[0].clone(), tensors[1])
    found = torch.compile(written, backend="aot_eager")(x, distribute_tensor(tensors[1], mesh, [Shard(1)]))
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), wanted)


def test_a_move_that_several_ops_need_is_done_once_and_sees_what_was_written():
    run_ranks(shared, 2, start_torch=True, timeout=120)


def kernels_first(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(0))
    x = DTensor.from_local(whole / size, mesh, [Partial()]).requires_grad_()
    found = torch.compile(torch.masked.std, backend="inductor")(x, unbiased=False)
    found.backward()
    plain = whole.clone().requires_grad_()
    wanted = torch.masked.std(plain, unbiased=False)
    wanted.backward()
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(found.full_tensor(), wanted)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.slow
def test_inductor_keeps_what_kernels_read_that_come_before_the_first_collective():
    run_ranks(kernels_first, 2, start_torch=True, timeout=280)
