"""Coalesced collectives, permute_tensor, and torch's other names and forms."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as theirs

import phalanx.collectives as pc
from ranks import run_ranks

SHAPES = ((12,), (4, 3), (4, 0, 2), (4, 1, 2), (8,))


def inputs(rank, dtype=torch.float32, shapes=SHAPES):
    """A tensor of each shape; rank r has r times the first rank's, plus r."""
    return [(torch.arange(torch.Size(shape).numel()).view(shape) * (rank + 1) + rank).to(dtype) for shape in shapes]


def same(found, wanted):
    assert isinstance(found, list) and len(found) == len(wanted)
    for each, other in zip(found, wanted, strict=True):
        assert isinstance(each, pc.AsyncCollectiveTensor)
        assert each.shape == other.shape and each.dtype == other.dtype and torch.equal(each + 0, other)


def values(rank, size):
    group = dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
        every = [inputs(r, dtype) for r in range(size)]
        mine = every[rank]
        sums = [sum(each[1:], each[0]) for each in zip(*every, strict=True)]
        same(pc.all_reduce_coalesced(mine, "SUM", group), sums)
        same(pc.all_gather_into_tensor_coalesced(mine, group), [torch.cat(each) for each in zip(*every, strict=True)])
        parts = [each.chunk(size)[rank] for each in sums]
        same(pc.reduce_scatter_tensor_coalesced(mine, "sum", [0] * len(mine), group), parts)
        for given, kept in zip(mine, inputs(rank, dtype), strict=True):
            assert torch.equal(given, kept)  # F23: neither list nor tensors change
        assert len(mine) == len(SHAPES)
    mixed = [torch.ones(3), torch.ones(2, dtype=torch.int32), torch.tensor(2.0), torch.ones(2, 3).t()]
    same(pc.all_reduce_coalesced(mixed, "sum", group), [each.contiguous() * size for each in mixed])
    same(pc.all_gather_single_coalesced([torch.tensor(7.0)], group), [torch.full((size,), 7.0)])  # F25
    columns = torch.arange(4.0 * size).view(4, size)
    (found,) = pc.reduce_scatter_single_coalesced([columns], "sum", [-1], group)  # F9
    assert torch.equal(found + 0, columns[:, rank : rank + 1] * size)
    assert pc.all_reduce_coalesced([], "sum", group) == [] == pc.all_gather_into_tensor_coalesced((), group)
    large = [torch.full((300_000,), float(rank)), torch.full((5,), float(rank))]  # more than is kept at the start
    total = float(sum(range(size)))
    same(pc.all_reduce_coalesced(large, "sum", group), [torch.full_like(each, total) for each in large])
    many = [torch.full((i % 7,), float(rank)) for i in range(200)]
    same(pc.all_reduce_coalesced(many, "max", group), [torch.full_like(each, size - 1.0) for each in many])


@pytest.mark.parametrize("size", [2, 4])
def test_coalesced_ones_give_what_one_by_one_gives(size):  # P5, F23, F25
    run_ranks(values, size, start_torch=True)


def pending(rank, size):
    group = dist.group.WORLD
    one, two = pc.all_reduce_coalesced([torch.ones(4), torch.ones(2)], "sum", group)
    assert not one.completed and not two.completed
    view = two[:1]
    assert torch.equal(one + 0, torch.full((4,), float(size))) and one.completed
    assert view.item() == size
    x, y = torch.ones(4), torch.ones(2, 3).t()
    before = x._version, y._version
    torch.ops.phalanx.all_reduce_coalesced_([x, y], "sum", group.group_name)
    for each in (x, y):
        torch.ops.phalanx.wait_tensor(each)
        assert torch.equal(each, torch.full_like(each, size))
    assert x._version > before[0] and y._version > before[1]
    dropped = pc.all_reduce_coalesced([torch.ones(4)] * 3, "sum", group)
    del dropped
    assert pc.all_reduce(torch.ones(1), "sum", group).item() == size


def test_their_results_are_pending_and_complete_together():  # A1, A10
    run_ranks(pending, 2, start_torch=True)


def gradients(rank, size):
    group = dist.group.WORLD
    share = [torch.full((2, 3), rank + 1.0), torch.full((4,), 10.0 * (rank + 1))]
    total = [
        sum(torch.full_like(each, float(r + 1) * (10 if i else 1)) for r in range(size)) for i, each in enumerate(share)
    ]

    def leaves():
        return [torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True), torch.ones(2)]

    a, b, c = leaves()
    x, y, _ = pc.all_reduce_coalesced([a, b, c], "sum", group)
    ((x * share[0]).sum() + (y * share[1]).sum()).backward()
    assert torch.equal(a.grad, total[0]) and torch.equal(b.grad, total[1]) and c.grad is None
    a, b, c = leaves()
    x, y, _ = pc.all_gather_into_tensor_coalesced([a, b, c], group)
    ((x * (rank + 1)).sum() + (y * 10 * (rank + 1)).sum()).backward()
    assert torch.equal(a.grad, total[0]) and torch.equal(b.grad, total[1])
    a, b, _ = leaves()
    x, y = pc.reduce_scatter_tensor_coalesced([a, b], "avg", [0, 0], group)
    ((x * (rank + 1)).sum() + (y * 10 * (rank + 1)).sum()).backward()
    assert torch.equal(a.grad, torch.tensor([r + 1.0 for r in range(size)]).view(-1, 1).expand(2, 3) / size)
    a, b, _ = leaves()
    with pytest.raises(RuntimeError, match="the reduction 'max' has none"):
        pc.all_reduce_coalesced([a, b], "max", group)
    with pytest.raises(RuntimeError, match="writes into its argument has no gradient"):
        torch.ops.phalanx.all_reduce_coalesced_([a], "sum", group.group_name)
    a, *_ = leaves()  # by the op itself, as a compiled graph calls it
    (x,) = torch.ops.phalanx.all_reduce_coalesced([a], "sum", group.group_name)
    torch.ops.phalanx.wait_tensor(x).mul(rank + 1).sum().backward()
    assert torch.equal(a.grad, total[0])


def test_gradients_of_coalesced_ones():  # F26
    run_ranks(gradients, 2, start_torch=True)


def wrong(rank, size):
    group = dist.group.WORLD
    with pytest.raises(TypeError, match="all_reduce_coalesced: expected a list of tensors, not Tensor"):
        pc.all_reduce_coalesced(torch.ones(2), "sum", group)
    with pytest.raises(TypeError, match="expected a list of tensors"):
        pc.all_gather_into_tensor_coalesced([1.0], group)
    with pytest.raises(ValueError, match=r"reduce op\w* '?median"):
        pc.all_reduce_coalesced([torch.ones(2)], "median", group)
    with pytest.raises(AssertionError, match="coalesced: dim 0 has size 3, which is not divisible by the group size 2"):
        pc.reduce_scatter_tensor_coalesced([torch.ones(2), torch.ones(3)], "sum", [0, 0], group)
    with pytest.raises(AssertionError, match="scatter_dim has 1 entries for 2 tensors"):
        pc.reduce_scatter_tensor_coalesced([torch.ones(2), torch.ones(2)], "sum", [0], group)
    with pytest.raises(ValueError, match="has no dims"):
        pc.reduce_scatter_tensor_coalesced([torch.tensor(1.0)], "sum", [0], group)  # F25
    with pytest.raises(ValueError, match=r"src_dst is \[0, 0\]; it must be a permutation of the ranks 0 to 1"):
        pc.permute_tensor(torch.ones(2), [0, 0], group)
    with pytest.raises(AssertionError, match="async_op is True and must be False"):
        pc.all_reduce_inplace(torch.ones(2), async_op=True)
    with pytest.raises(AssertionError, match="1 tensors for 2 ranks"):
        pc.all_gather_inplace([torch.ones(2)], torch.ones(2))
    with pytest.raises(AssertionError, match="must have the shape of the input"):
        pc.all_gather_inplace([torch.ones(2), torch.ones(3)], torch.ones(2))
    assert pc.all_reduce(torch.ones(1), "sum", group).item() == size  # nothing was sent


def test_wrong_arguments_of_these_are_told_before_anything_is_sent():  # F6, F8, F25
    run_ranks(wrong, 2, start_torch=True)


def permuted(rank, size):
    group = dist.group.WORLD
    ring = [(i + 1) % size for i in range(size)]
    for shape in ((), (3,), (2, 3), (0, 2), (2, 0, 3), (2, 3, 4)):  # F24
        x = torch.full(shape, float(rank))
        got = pc.permute_tensor(x, ring, group)
        assert got.shape == x.shape and torch.equal(got + 0, torch.full(shape, float((rank - 1) % size)))
    columns = torch.arange(6.0).view(2, 3).t() + 10 * rank
    wanted = torch.arange(6.0).view(2, 3).t() + 10 * ((rank - 1) % size)
    assert torch.equal(pc.permute_tensor(columns, ring, group) + 0, wanted)
    x = torch.ones(2, 2, requires_grad=True)
    (pc.permute_tensor(x, ring, group) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), (rank + 1) % size + 1.0))


@pytest.mark.parametrize("size", [2, 3])
def test_permute_takes_tensors_of_any_shape(size):  # F24
    run_ranks(permuted, size, start_torch=True)


def into(rank, size):
    x = torch.arange(4.0) + rank
    every = [torch.arange(4.0) + r for r in range(size)]
    y = x.clone()
    assert pc.all_reduce_inplace(y, "max") is y and torch.equal(y, every[-1])
    out = torch.empty(4 * size)
    assert pc.all_gather_tensor_inplace(out, x) is out and torch.equal(out, torch.cat(every))
    listed = [torch.empty(4) for _ in range(size)]
    assert pc.all_gather_inplace(listed, x) is listed and all(map(torch.equal, listed, every))
    scalars = [torch.empty(()) for _ in range(size)]
    pc.all_gather_inplace(scalars, torch.tensor(float(rank)))
    assert [each.item() for each in scalars] == list(range(size))
    part = torch.empty(4 // size)
    pc.reduce_scatter_tensor_inplace(part, x, "sum", dist.group.WORLD)
    assert torch.equal(part, sum(every).chunk(size)[rank])
    pc.all_to_all_inplace(y, x)
    assert torch.equal(y, torch.cat([each.chunk(size)[rank] for each in every]))
    assert torch.equal(pc.broadcast_inplace(y.copy_(x), 1), every[1])


def test_forms_that_write_into_a_tensor():  # F21
    run_ranks(into, 2, start_torch=True)


def test_every_public_function_of_torch_is_here():  # F1 to F3
    own = {"allow_inflight_collective_as_graph_input_ctx"}
    names = {
        name
        for name, value in vars(theirs).items()
        if callable(value)
        and getattr(value, "__module__", "") == theirs.__name__
        and not name.startswith("_")
        and not name.endswith(("_backward", "_setup_context"))
    }
    missing = names - set(pc.__all__) - own
    assert not missing, missing


def compiled(rank, size):
    group = dist.group.WORLD
    ring = [(i + 1) % size for i in range(size)]

    def coalesced(x, y):
        a, b = pc.all_reduce_coalesced([x, y], "sum", group)
        c, d = pc.all_gather_into_tensor_coalesced([a, b], group)
        e, f = pc.reduce_scatter_tensor_coalesced([c * 2, d], "sum", [0, 1], group)
        return a, b, c, d, e, f

    def forms(x, y):
        z = pc.all_reduce_inplace(y.clone(), "max", group)
        return z, pc.permute_tensor(x, ring, group), pc.broadcast_inplace(x.clone(), 1, group)

    for function in (coalesced, forms):
        torch.compiler.reset()
        graph = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (size, 3 * size):
            x, y = torch.rand(rows, 2) + rank, torch.rand(rows, size, 2)
            for found, wanted in zip(graph(x, y), function(x, y), strict=True):
                assert torch.equal(found, wanted + 0)
    torch.compiler.reset()
    x = torch.rand(4, 2, requires_grad=True)
    graph = torch.compile(lambda t: sum(pc.all_reduce_coalesced([t, t * 2], "sum", group)), fullgraph=True)
    (graph(x) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0 * sum(range(1, size + 1))))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_they_compile_into_one_graph_with_dynamic_shapes():  # F19
    run_ranks(compiled, 2, start_torch=True, timeout=300)


def checked(rank, size):
    name = dist.group.WORLD.group_name
    pc.enable_group(name)
    tensors = [torch.rand(4, 2), torch.rand(6)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, *args in (
        ("all_reduce_coalesced", "sum", name),
        ("all_gather_into_tensor_coalesced", size, name),
        ("reduce_scatter_tensor_coalesced", "sum", size, name),
        ("all_reduce_coalesced_", "sum", name),
    ):
        torch.library.opcheck(getattr(torch.ops.phalanx, op).default, (tensors, *args), test_utils=tests)


def test_opcheck_finds_nothing():  # F19
    run_ranks(checked, 1, start_torch=True)
