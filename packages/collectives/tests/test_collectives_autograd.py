"""Gradients: a rank's gradient is that of the sum of all ranks' losses."""

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from ranks import run_ranks


def leaf(rank, shape, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def loss(y, rank):
    """Not linear, and another one on every rank."""
    return ((rank + 1) * y.sin() * torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)).sum()


def cases(size):
    """Name, shape, our call of (x, group), the same on the list of all inputs: a list of all outputs."""

    def scatter(inputs, op, dim):
        total = sum(inputs) / (size if op == "avg" else 1)
        return list(total.chunk(size, dim))

    def exchange(inputs, rows):
        return [torch.cat([inputs[i].split(rows[i])[j] for i in range(size)]) for j in range(size)]

    rows = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    even = [[1] * size for _ in range(size)]
    shape = (size, 3, 2 * size)
    yield "sum", shape, lambda x, g: pc.all_reduce(x, "sum", g), lambda xs: [sum(xs)] * size
    yield "avg", shape, lambda x, g: pc.all_reduce(x, "AVG", g), lambda xs: [sum(xs) / size] * size
    for dim in (0, 2):
        yield (
            f"gather {dim}",
            shape,
            lambda x, g, d=dim: pc.all_gather_tensor(x, d, g),
            lambda xs, d=dim: [torch.cat(xs, d)] * size,
        )
        for op in ("sum", "avg"):
            yield (
                f"{op} scatter {dim}",
                shape,
                lambda x, g, o=op, d=dim: pc.reduce_scatter_tensor(x, o, d, g),
                lambda xs, o=op, d=dim: scatter(xs, o, d),
            )
    sizes = [1, 0, 2, 0][:size]  # F27
    for dim in (0, 2):
        yield (
            f"uneven gather {dim}",
            shape,
            lambda x, g, d=dim: pc.all_gather_v(x.narrow(d, 0, sizes[dist.get_rank()]), sizes, d, g),
            lambda xs, d=dim: [torch.cat([x.narrow(d, 0, sizes[i]) for i, x in enumerate(xs)], d)] * size,
        )
        for op in ("sum", "avg"):
            yield (
                f"{op} uneven scatter {dim}",
                shape,
                lambda x, g, o=op, d=dim: pc.reduce_scatter_v(x.narrow(d, 0, sum(sizes)), o, sizes, d, g),
                lambda xs, o=op, d=dim: [
                    *(sum(xs) / (size if o == "avg" else 1)).narrow(d, 0, sum(sizes)).split(sizes, d)
                ],
            )
    yield "gather of a scalar", (), lambda x, g: pc.all_gather_tensor(x, 0, g), lambda xs: [torch.stack(xs)] * size
    yield "broadcast", shape, lambda x, g: pc.broadcast(x, size - 1, g), lambda xs: [xs[-1]] * size
    yield "all_to_all", shape, lambda x, g: pc.all_to_all_single(x, None, None, g), lambda xs: exchange(xs, even)
    yield (
        "shard_dim_alltoall",  # F29
        shape,
        lambda x, g: pc.shard_dim_alltoall(x, 1, 0, g),
        lambda xs: [torch.cat([x.chunk(size)[i] for x in xs], 1) for i in range(size)],
    )
    lengths, cuts = [1, 2, 1, 2][:size], [0, shape[0], *[0] * (size - 2)]
    yield (
        "uneven shard_dim_alltoall",
        shape,
        lambda x, g: pc.shard_dim_alltoall(x[:, : lengths[dist.get_rank()]], 1, 0, g, "", lengths, cuts),
        lambda xs: [torch.cat([x[:, : lengths[i]].split(cuts)[r] for i, x in enumerate(xs)], 1) for r in range(size)],
    )
    yield (
        "strided",
        shape,
        lambda x, g: pc.all_reduce(x.permute(2, 0, 1), "sum", g),
        lambda xs: [sum(xs).permute(2, 0, 1)] * size,
    )

    def uneven(x, g):
        rank = dist.get_rank()
        mine = x[: sum(rows[rank])]
        return pc.all_to_all_single(mine, [rows[i][rank] for i in range(size)], rows[rank], g)

    yield (
        "uneven all_to_all",
        (3 * size, 2),
        uneven,
        lambda xs: exchange([x[: sum(rows[i])] for i, x in enumerate(xs)], rows),
    )


def gradients(rank, size, eager):
    group = dist.group.WORLD
    assert pc.enable_group(group)
    for name, shape, ours, theirs in cases(size):
        inputs = [leaf(r, shape) for r in range(size)]
        outputs = theirs(inputs)
        sum(loss(y, r) for r, y in enumerate(outputs)).backward()
        x = leaf(rank, shape)
        y = ours(x, group)
        assert y.requires_grad, name
        assert isinstance(y, pc.AsyncCollectiveTensor) or name == "gather 2" or "uneven" in name, (name, type(y))
        if eager == "waited":
            y = pc.wait_tensor(y)
            assert type(y) is torch.Tensor and y.requires_grad
        torch.testing.assert_close(y.detach() + 0, outputs[rank].detach(), msg=name)
        loss(y, rank).backward()
        wanted = inputs[rank].grad if inputs[rank].grad is not None else torch.zeros(shape, dtype=torch.float64)
        torch.testing.assert_close(x.grad, wanted, msg=f"{name}: {x.grad} instead of {wanted}")
        assert type(x.grad) is torch.Tensor


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("eager", ["pending", "waited"])
def test_gradients_equal_those_of_one_process(size, eager):  # F26
    run_ranks(gradients, size, eager, start_torch=True)


def native_ops(rank, size):
    name = dist.group.WORLD.group_name
    ops = torch.ops.phalanx
    for call, expected in (
        (lambda x: ops.all_reduce(x, "sum", name), sum(range(1, size + 1))),
        (lambda x: ops.all_reduce(x, "avg", name), sum(range(1, size + 1)) / size),
        (lambda x: ops.all_gather_into_tensor(x, size, name), sum(range(1, size + 1))),
        (lambda x: ops.reduce_scatter_tensor(x, "sum", size, name), None),
        (lambda x: ops.broadcast(x, 0, name), sum(range(1, size + 1)) if rank == 0 else 0),
    ):
        x = torch.ones(size, dtype=torch.float64, requires_grad=True)
        y = ops.wait_tensor(call(x))
        assert type(y) is torch.Tensor and y.requires_grad
        (y * (rank + 1)).sum().backward()
        wanted = torch.full((size,), float(expected)) if expected is not None else torch.arange(1.0, size + 1)
        assert torch.equal(x.grad, wanted.double()), (x.grad, wanted)


def test_ops_called_directly_are_differentiable():  # F26
    run_ranks(native_ops, 2, start_torch=True)


def double_backward(rank, size):
    group = dist.group.WORLD
    inputs = [leaf(r, (3,)) for r in range(size)]
    total = sum((sum(inputs) ** 3).sum() * (r + 1) for r in range(size))
    first = torch.autograd.grad(total, inputs, create_graph=True)
    second = torch.autograd.grad(sum((g * g).sum() for g in first), inputs)
    x = leaf(rank, (3,))
    y = pc.all_reduce(x, "sum", group)
    (g,) = torch.autograd.grad((y**3).sum() * (rank + 1), x, create_graph=True)
    torch.testing.assert_close(g.detach(), first[rank].detach())
    (h,) = torch.autograd.grad((g * g).sum(), x)
    torch.testing.assert_close(h, second[rank])


def test_gradients_of_gradients_are_right():
    run_ranks(double_backward, 2, start_torch=True)


def finite_differences(rank, size):
    """gradcheck with all ranks in step: only rank 0's input moves, and the loss is the sum over ranks."""
    group = dist.group.WORLD
    for _, shape, ours, _ in cases(size):
        x = leaf(rank, shape)
        loss(ours(x, group), rank).backward()
        for i in range(0, x.numel(), 17):
            values = []
            for step in (1e-6, -1e-6):
                moved = x.detach().clone()
                if rank == 0:
                    moved.view(-1)[i] += step
                total = loss(ours(moved, group), rank)
                values.append(pc.all_reduce(total.reshape(1), "sum", group).item())
            slope = (values[0] - values[1]) / 2e-6
            if rank == 0:
                assert abs(slope - x.grad.view(-1)[i].item()) < 1e-4 * max(1, abs(slope))


def test_gradients_equal_finite_differences():
    run_ranks(finite_differences, 2, start_torch=True)


def without_gradient(rank, size):
    group = dist.group.WORLD
    pc.enable_group(group)
    name = group.group_name
    x = torch.ones(4, requires_grad=True)
    if rank == 0:  # the other rank makes no such call: nothing may be sent
        for op in ("max", "MIN", "product"):
            for call in (
                lambda o=op: pc.all_reduce(x, o, group),
                lambda o=op: pc.reduce_scatter_tensor(x, o, 0, group),
                lambda o=op: torch.ops.phalanx.all_reduce(x, o, name),
                lambda o=op: torch.ops.phalanx.reduce_scatter_tensor(x, o, size, name),
            ):
                with pytest.raises(RuntimeError, match="the input needs a gradient, but the reduction"):
                    call()
        for call in (
            lambda: pc.all_reduce_(x, "sum", group),
            lambda: pc.all_reduce_(x * 2, "sum", group),
            lambda: pc.broadcast_(x, 0, group),
            lambda: torch.ops.phalanx.all_reduce_(x, "sum", name),
            lambda: torch.ops.phalanx.all_gather_into_tensor_out(x, size, name, out=torch.empty(8)),
        ):
            with pytest.raises(RuntimeError, match="writes into its argument has no gradient"):
                call()
    assert pc.all_reduce(x.detach(), "max", group).tolist() == [1.0] * 4
    with torch.no_grad():
        y = pc.all_reduce(x, "max", group)
        assert not y.requires_grad and y.tolist() == [1.0] * 4
        pc.all_reduce_(x, "sum", group)
    assert x.tolist() == [float(size)] * 4


def test_a_reduction_without_gradient_is_refused_in_the_forward_pass():  # F26
    run_ranks(without_gradient, 2, start_torch=True)


def saved_then_written(rank, size):
    group = dist.group.WORLD
    x = torch.ones(3, requires_grad=True)
    for write in (
        lambda y: pc.all_reduce_(y, "sum", group),  # the first one meets the others, the second takes the fast path
        lambda y: pc.all_reduce_(y, "sum", group),
        lambda y: pc.broadcast_(y, 0, group),
    ):
        y = x * 2
        z = y * y  # saves y
        version = y._version
        write(y.detach())
        assert y._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_writing_over_a_saved_tensor_is_noticed():
    run_ranks(saved_then_written, 2, start_torch=True)


def pending_keeps_gradients(rank, size):
    """A pending tensor may be viewed, used twice and backed through twice."""
    group = dist.group.WORLD
    x = torch.arange(6.0, requires_grad=True)
    y = pc.all_reduce(x * (rank + 1), "sum", group)
    left, right = y.view(2, 3)
    assert left.requires_grad
    (left * right).sum().backward(retain_graph=True)
    first = x.grad.clone()
    total = sum(range(1, size + 1))
    wanted = total * size * (rank + 1) * torch.arange(6.0).roll(3)
    assert torch.equal(first, wanted), (first, wanted)
    (left * right).sum().backward()
    assert torch.equal(x.grad, 2 * first)
    z = pc.all_reduce(x, "sum", group)
    assert torch.equal(pc.wait_tensor(z), pc.wait_tensor(z))


def test_a_pending_tensor_can_be_viewed_and_used_twice_with_gradients():
    run_ranks(pending_keeps_gradients, 2, start_torch=True)
