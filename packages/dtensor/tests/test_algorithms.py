"""Algorithms along sharded dims give what one process gives, and move little."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh

from phalanx.dtensor import DTensor, Partial, Replicate, Shard, SizedShard, StridedShard, distribute_tensor
from phalanx.dtensor.debug import CommDebugMode
from ranks import run_ranks

FUNCTIONS = {
    "cumsum": lambda t: t.cumsum(0),
    "cumprod": lambda t: t.cumprod(0),
    "logcumsumexp": lambda t: t.logcumsumexp(0),
    "argmax": lambda t: t.argmax(0),
    "argmin, keepdim": lambda t: t.argmin(0, keepdim=True),
    "argmax of all": lambda t: t.argmax(),
    "argmin of all": lambda t: t.argmin(),
    "max": lambda t: t.max(0)[0],
    "index of max": lambda t: t.max(0)[1],
    "index of min": lambda t: t.min(0)[1],
    "var": lambda t: t.var(0, correction=0),
    "std of all": lambda t: t.std(correction=0),
    "var_mean": lambda t: torch.stack(torch.var_mean(t, 0, correction=0)),
    "topk": lambda t: t.topk(min(2, t.shape[0]), 0)[0],
    "index of topk": lambda t: t.topk(min(2, t.shape[0]), 0)[1],
    "sort": lambda t: t.sort(0)[0],
    "softmax": lambda t: t.softmax(0),
    "norm of all": lambda t: t.norm(),
    "norm": lambda t: torch.linalg.vector_norm(t, 2, 0),
    "norm of order 3, keepdim": lambda t: t.norm(3, 0, keepdim=True),
    "norm in float64": lambda t: torch.linalg.vector_norm(t, 1.5, (0, 1), dtype=torch.float64),
}


class Differences:
    """Collects what is not as it should be, to be shown by the test."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def compare(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        if whole.shape != want.shape or not torch.allclose(
            whole.double(), want.double(), rtol=1e-4, atol=1e-5, equal_nan=True
        ):
            self.found.append(f"{name}: {whole} instead of {want}")


def along_the_sharded_dim(rank, world_size):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    differences = Differences()
    for rows in (8, 7, 2, 1):
        x = torch.randn(rows, 5)
        whole = torch.randint(0, 3, (rows, 5))
        nan = x.clone()
        nan[rows // 2, 1] = torch.nan
        for name, function in FUNCTIONS.items():
            differences.compare(f"{name} of {rows}", function(distribute_tensor(x, mesh, [Shard(0)])), function(x))
        for name in ("argmax", "argmin, keepdim", "argmax of all", "argmin of all", "index of max", "cumsum"):
            function = FUNCTIONS[name]
            differences.compare(f"{name}, ties", function(distribute_tensor(whole, mesh, [Shard(0)])), function(whole))
            differences.compare(f"{name}, NaN", function(distribute_tensor(nan, mesh, [Shard(0)])), function(nan))
    # A Partial is reduced first.
    terms = DTensor.from_local(torch.full((4, 2), float(rank)), mesh, [Partial()])
    differences.compare(
        "cumsum of a Partial", terms.cumsum(0), torch.full((4, 2), sum(range(world_size)) * 1.0).cumsum(0)
    )
    return differences.found


def lookups(rank, world_size):
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (world_size,))
    differences = Differences()
    table, index = torch.randn(10, 4, requires_grad=True), torch.randint(0, 10, (3, 5))
    mine = distribute_tensor(table.detach(), mesh, [Shard(0)]).requires_grad_()
    found = F.embedding(distribute_tensor(index, mesh), mine)
    if found.placements != (Partial("sum"),):
        differences.found.append(f"embedding communicates: {found.placements}")
    differences.compare("embedding", found, F.embedding(index, table))
    F.embedding(index, table).square().sum().backward()
    F.embedding(distribute_tensor(index, mesh), mine).square().sum().backward()
    differences.compare("gradient of embedding", mine.grad, table.grad)
    rows = torch.tensor([1, 9, 3])
    selected = mine.detach().index_select(0, distribute_tensor(rows, mesh))
    differences.compare("index_select", selected, table.detach()[rows])
    # A mean that is weighted by what the targets pick.
    scores = torch.randn(7, 4, requires_grad=True)
    target, weight = torch.randint(0, 4, (7,)), torch.rand(4)
    loss = F.cross_entropy(scores, target, weight=weight, ignore_index=2)
    loss.backward()
    my_scores = distribute_tensor(scores.detach(), mesh, [Shard(0)]).requires_grad_()
    my_target = distribute_tensor(target, mesh, [Shard(0)])
    my_loss = F.cross_entropy(my_scores, my_target, weight=distribute_tensor(weight, mesh), ignore_index=2)
    my_loss.backward()
    differences.compare("weighted mean", my_loss, loss)
    differences.compare("gradient of a weighted mean", my_scores.grad, scores.grad)
    return differences.found


def in_space(rank, world_size):
    torch.manual_seed(2)
    mesh = init_device_mesh("cpu", (world_size,))
    differences = Differences()
    cases = [
        ((2, 3, 9, 5), (4, 3, 3, 3), 1, 1, 1),
        ((2, 3, 8, 8), (4, 3, 3, 3), 2, 1, 1),
        ((1, 2, 10, 4), (2, 2, 5, 1), 1, 0, 2),
        ((2, 2, 3, 3), (2, 2, 2, 2), 1, 1, 1),
    ]
    for shape, kernel, stride, padding, dilation in cases:
        for dim in (2, 3):
            for bias in (None, torch.randn(kernel[0])):
                inputs = [torch.randn(shape), torch.randn(kernel), bias]
                results = []
                for spread in (False, True):
                    made = []
                    for position, one in enumerate(inputs):
                        if one is not None and spread:
                            one = distribute_tensor(one, mesh, [Shard(dim) if position == 0 else Replicate()])
                        made.append(None if one is None else one.detach().clone().requires_grad_())
                    out = F.conv2d(*made, stride=stride, padding=padding, dilation=dilation)
                    if spread and out.placements != (Shard(dim),):
                        differences.found.append(f"convolution gathers: {out.placements}")
                    out.square().sum().backward()
                    results.append([out, *(one.grad for one in made if one is not None)])
                for what, want, got in zip(("out", "grad", "weight", "bias"), *results, strict=False):
                    differences.compare(f"{what} of {shape} {kernel} dim {dim}", got.detach(), want.detach())
    return differences.found


def batch_norms(rank, world_size):
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world_size,))
    differences = Differences()
    for rows in (8, 5, 1):
        for dim in (0, 2):
            inputs = [torch.randn(rows, 3, 6), torch.rand(3), torch.randn(3)]
            sign = torch.randn(rows, 3, 6)
            results = []
            for spread in (False, True):
                running = [torch.zeros(3), torch.ones(3)]
                made, factor = inputs, sign
                if spread:
                    made = [
                        distribute_tensor(one, mesh, [Shard(dim) if one.ndim == 3 else Replicate()]) for one in inputs
                    ]
                    running = [distribute_tensor(one, mesh) for one in running]
                    factor = distribute_tensor(sign, mesh, [Shard(dim)])
                made = [one.detach().clone().requires_grad_() for one in made]
                out = F.batch_norm(made[0], *running, *made[1:], training=True)
                (out * factor).sum().backward()
                results.append([out.detach(), *running, *(one.grad for one in made)])
            for what, want, got in zip(("out", "mean", "var", "grad", "weight", "bias"), *results, strict=True):
                differences.compare(f"{what} of {rows} rows, dim {dim}", got, want)
    return differences.found


def with_empty_pieces(rank, size):
    """A rank with an empty piece takes part as the others do, whatever the order of dims in memory."""
    mesh = init_device_mesh("cpu", (size,))
    differences = Differences()
    torch.manual_seed(4)
    for order in itertools.permutations(range(3)):
        for length in (2, size + 1):
            whole = torch.randn(3, 4, length)
            whole = whole.permute(order).contiguous().permute([order.index(dim) for dim in range(3)])
            spread = distribute_tensor(whole, mesh, [Shard(2)], src_data_rank=None)
            mask = torch.rand(1, 4, length) > 0.4
            name = f"{length} in order {order}"
            differences.compare(name, spread, whole)
            for what, function in (("softmax", torch.softmax), ("cumsum", torch.cumsum)):
                differences.compare(f"{what} of {name}", function(spread, 2), function(whole, 2))
            masked = torch.masked.softmax(spread, 1, mask=distribute_tensor(mask, mesh, src_data_rank=None))
            differences.compare(f"masked softmax of {name}", masked, torch.masked.softmax(whole, 1, mask=mask))
            masked = torch.masked.softmax(spread, 2, mask=distribute_tensor(mask, mesh, src_data_rank=None))
            differences.compare(f"masked softmax along {name}", masked, torch.masked.softmax(whole, 2, mask=mask))
    return differences.found


def _check(function, world_size):
    for found in run_ranks(function, world_size, start_torch=True):
        assert not found, "\n".join(found)


def test_ops_along_a_sharded_dim_give_what_one_process_gives():
    _check(along_the_sharded_dim, 2)
    _check(along_the_sharded_dim, 3)


def test_empty_pieces_lie_as_those_of_other_ranks():
    _check(with_empty_pieces, 4)


def test_lookups_in_a_sharded_table_leave_a_partial():
    _check(lookups, 3)


def test_convolution_takes_borders_from_its_neighbours():
    _check(in_space, 2)
    _check(in_space, 3)


def norms(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    differences = Differences()
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    for placements in (
        [Shard(0), Shard(1)],
        [StridedShard(0, 2), Shard(0)],
        [SizedShard(0, (7, 0)), Replicate()],
        [Shard(1), Shard(1)],
    ):
        for dims in (None, 0, 1, (0, 1)):
            for dtype in (torch.float32, torch.bfloat16):
                given = x.to(dtype)
                with CommDebugMode() as sent:
                    got = torch.linalg.vector_norm(
                        distribute_tensor(given, mesh, placements, src_data_rank=None), 2, dims
                    )
                assert got.dtype == dtype
                if dims is None:
                    assert sum(sent.get_comm_counts().values()) == sum(not one.is_replicate() for one in placements)
                want = torch.linalg.vector_norm(given, 2, dims)
                differences.compare(f"{placements} {dims} {dtype}", got, want)
    return differences.found


def test_a_norm_is_that_of_the_norms_of_all_parts():
    _check(norms, 4)


def test_batch_norm_takes_the_statistics_of_all_ranks():
    _check(batch_norms, 3)
