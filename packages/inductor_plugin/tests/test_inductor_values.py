"""Compiled functions on real ranks give what eager gives, whatever the route, the wrapper and the dtype."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor.utils import run_and_get_code

import phalanx.collectives as pc
from phalanx.inductor_plugin import Route, clear_reports, reports
from ranks import run_ranks

ALL = {"phalanx.zero_copy_bytes": 0}  # whatever the size
ROUTES = {
    "zero copy": ALL,
    "slots": {},
}


def join(rank, size):
    from ranks import scratch

    store = dist.FileStore(str(scratch() / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist.group.WORLD.group_name


def data(seed, *sizes, dtype=torch.float32):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(function, *inputs, options=None, calls=3, **compile_options):
    """Compiled gives what eager gives, in every call. Returns the generated code."""
    torch._dynamo.reset()
    clear_reports()
    compiled = torch.compile(function, backend="phalanx", options=options or {}, fullgraph=True, **compile_options)
    wanted = function(*inputs)
    result, code = run_and_get_code(compiled, *inputs)
    for _ in range(calls):
        torch.testing.assert_close(result, wanted)
        inputs = [one + 1 if one.is_floating_point() else one for one in inputs]
        wanted, result = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(result, wanted)
    return code


def everything(group, size):
    def function(x):
        y = x.relu()
        parts = [
            fc.all_reduce(y + 1, "avg", group),
            *fc.all_reduce_coalesced([y + 2, y + 3], "max", group),
            fc.all_gather_tensor(y + 4, 0, group),
            pc.all_gather_tensor(y + 4, 1, group),  # torch 2.11 cannot trace its own along another dim
            *fc.all_gather_into_tensor_coalesced([y + 5, y + 6], group),
            fc.reduce_scatter_tensor(y + 7, "sum", 0, group),
            fc.reduce_scatter_tensor(y + 7, "sum", 1, group),
            *fc.reduce_scatter_tensor_coalesced([y + 8, y + 9], "sum", [0, 0], group),
            fc.all_to_all_single(y + 10, None, None, group),
            fc.broadcast(y + 11, size - 1, group),
            torch.ops._dtensor.shard_dim_alltoall(y + 12, 0, 1, group),
            pc.all_reduce(y + 13, "min", group),
            pc.all_gather_tensor(y + 14, 0, group),
            pc.reduce_scatter_tensor(y + 15, "sum", 0, group),
            pc.all_to_all_single(y + 16, None, None, group),
        ]
        return [part * 2 for part in parts]

    return function


def every_collective(rank, size):
    group = join(rank, size)
    for options in (ALL, {"phalanx.bucket_bytes": 0}, {**ALL, "cpp_wrapper": True}):
        check(everything(group, size), data(rank, 2 * size, 3 * size), options=options, calls=1)
        lines = [line for report in reports() for line in report.collectives]
        assert len(lines) == 15
        assert not [line for line in lines if line.route is Route.FALLBACK]
        if "phalanx.zero_copy_bytes" in options:
            assert sum(line.route is Route.ZERO_COPY for line in lines) >= 13
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_what_eager_gives(size):  # I8
    run_ranks(every_collective, size, timeout=280)


def block(group, dtype):
    a, b, c = (data(seed, 16, 16, dtype=dtype) / 4 for seed in range(3))

    def function(x):
        x = fc.all_reduce(x @ a, "sum", group) + x
        y = fc.all_reduce((x @ b).relu() @ c, "sum", group) + x
        y = torch.nn.functional.rms_norm(y, [16])
        z = fc.all_reduce((y * y).t().contiguous().view(-1), "max", group)
        return (z.view(16, 16).t() * y).sum(1), y

    return function


def each_route(rank, size, wrapper):
    group = join(rank, size)
    for name, options in ROUTES.items():
        dtypes = (torch.float32, torch.bfloat16) if wrapper == "python" else (torch.float32,)
        for dtype in dtypes:
            given = {**options, "cpp_wrapper": True} if wrapper == "cpp" else options
            torch.set_float32_matmul_precision("highest")
            function, x = block(group, dtype), data(rank, 16, 16, dtype=dtype)
            torch._dynamo.reset()
            clear_reports()
            compiled = torch.compile(function, backend="phalanx", options=given, fullgraph=True)
            for call in range(4):
                found, wanted = compiled(x + call), function(x + call)
                loose = {"rtol": 3e-2, "atol": 3e-1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
                torch.testing.assert_close(found, wanted, **loose)
            routes = {line.route.value for report in reports() for line in report.collectives}
            assert name in routes, routes
            both = [torch.empty_like(found[1]) for _ in range(size)]
            dist.all_gather(both, found[1].contiguous())
            for line in reports()[0].collectives:
                assert line.route is not Route.FALLBACK
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_every_route_gives_what_eager_gives(wrapper):
    run_ranks(each_route, 2, wrapper, timeout=280)


def relu_add(rank, size):
    group = join(rank, size)
    x, w, bias = data(rank, 64, 32), data(9, 32, 128), data(10, 64, 128)

    def function(x, w, bias):
        return fc.all_reduce(torch.relu(x @ w), "sum", group) + bias

    (code,) = check(function, x, w, bias, options=ALL)
    body = code[code.index("def call") :]
    assert "clone" not in body
    assert "copy_" not in body
    assert "wait_tensor" not in body
    assert len(re.findall(r"phalanx_ordered\.all_reduce_\.default\(", body)) == 1
    assert len(re.findall(r"cpp_fused\w*\(", body)) == 2  # relu into the arena, and the addition
    dist.destroy_process_group()


def test_relu_then_all_reduce_then_add_has_no_clone_copy_or_wait():
    run_ranks(relu_add, 2, timeout=200)


def same_address(rank, size):
    group = join(rank, size)
    w = data(9, 32, 128)

    def function(x):
        y = fc.all_reduce(torch.relu(x @ w), "sum", group) + 1
        return fc.all_gather_tensor((y * 2).view(-1), 0, group) + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="phalanx", options=ALL)
    x = data(rank, 64, 32)
    _, (code,) = run_and_get_code(compiled, x)
    nbytes, plan = re.search(r"symm_arena\.default\((\d+), (\".*?\"), '0', -1\)", code).groups()
    places = [int(one) for one in re.findall(r"arena_view\.default\(\w+, (\d+), ", code)]
    assert len(places) == 2
    plan = eval(plan)

    def seen():
        arena = torch.ops.phalanx.symm_arena(int(nbytes), plan, group)
        return [torch.ops.phalanx.arena_view(arena, place, [64, 128], torch.float32) for place in places]

    addresses = [view.data_ptr() for view in seen()]
    before = pc.core_group(group).zero_copies
    for i in range(5):
        compiled(x + i)
        assert [view.data_ptr() for view in seen()] == addresses
        total = sum(torch.relu((data(r, 64, 32) + i) @ w) for r in range(size))
        if places[0] != places[1]:
            torch.testing.assert_close(seen()[0], total)
        torch.testing.assert_close(seen()[1], (total + 1) * 2)
    assert pc.core_group(group).zero_copies - before == 2 * 5
    dist.destroy_process_group()


@pytest.mark.slow
def test_values_lie_at_the_same_address_in_every_iteration():  # I1
    run_ranks(same_address, 2, timeout=200)


def lying_in_the_arena(rank, size):
    """Results of a graph are new memory: the next iteration does not write over them."""
    group = join(rank, size)

    def function(x):
        y = fc.all_reduce(x.relu(), "sum", group)
        return y, y.view(-1)[1:], y + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="phalanx", options=ALL)
    first = compiled(data(rank, 8, 8))
    kept = [one.clone() for one in first]
    for i in range(3):
        compiled(data(rank, 8, 8) + i)
    for one, copy in zip(first, kept, strict=True):
        torch.testing.assert_close(one, copy)
    dist.destroy_process_group()


@pytest.mark.slow
def test_results_of_a_graph_are_not_written_over_by_its_next_call():
    run_ranks(lying_in_the_arena, 2, timeout=200)


def in_place(rank, size):
    group = join(rank, size)

    def function(x):
        y = x.relu()
        dist.all_reduce(y, group=dist.group.WORLD)
        return y + 1

    check(function, data(rank, 8, 8), options=ALL)
    assert {line.route for report in reports() for line in report.collectives} == {Route.ZERO_COPY}
    assert group is not None
    dist.destroy_process_group()


def test_all_reduce_in_place_of_torch_distributed_is_lowered():  # I6
    run_ranks(in_place, 2, timeout=200)
