"""The forms of a group argument, and what is wrong with a group or another argument."""

import gc
import json
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx.collectives as pc
from c10d_groups import run_groups
from phalanx.core import AbiError, FileStore, PhalanxError, World, ffi, lib
from ranks import run_ranks, scratch


def total(group, tag="", value=None):
    rank = dist.get_rank()
    return pc.all_reduce(torch.tensor([float(10**rank if value is None else value)]), "sum", group, tag).item()


def every_form(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flat = init_device_mesh("cpu", (4,))
    row, column = {0: 11.0, 1: 1100.0}[rank // 2], {0: 101.0, 1: 1010.0}[rank % 2]
    everybody = 1111.0
    assert total(dist.group.WORLD) == everybody  # F12
    assert total(dist.group.WORLD.group_name) == everybody
    assert total(flat) == everybody  # F13
    assert total((mesh, 1)) == row  # F14
    assert total((mesh, 0)) == column
    assert total(mesh["b"]) == row
    assert total(mesh.get_group("a")) == column
    assert total(mesh.get_group("a").group_name) == column
    assert total([0, 1, 2, 3]) == everybody  # F10
    assert total([[0, 1], [2, 3]]) == row  # F11
    assert total([[0, 2], [1, 3]]) == column
    assert pc.is_core_group((mesh, 1))
    assert pc.core_group((mesh, 1)).ranks == ((0, 1) if rank < 2 else (2, 3))
    # F16: a tag makes a group of its own, once
    assert total([0, 1, 2, 3], "mine") == everybody
    made = len(dist.distributed_c10d._world.pg_names)
    assert total([0, 1, 2, 3], "mine") == everybody
    assert total(dist.group.WORLD, "mine") == everybody
    assert len(dist.distributed_c10d._world.pg_names) == made
    assert total([[0, 3], [1, 2]], "pairs") == (1001.0 if rank in (0, 3) else 110.0)
    with pytest.raises(AssertionError, match="DeviceMesh of 2 dims; pass \\(mesh, dim\\)"):
        total(mesh)  # F13


def test_every_form_of_a_group_reaches_its_ranks():  # F10 to F16
    run_ranks(every_form, 4, start_torch=True, timeout=90)


def doubled_total(group):
    return torch.compile(lambda x: pc.all_reduce(x, "sum", group) * 2, backend="aot_eager", fullgraph=True)


def groups_of_the_core(rank, size):
    """A group that torch.distributed does not know: made in the core, and by splitting and shrinking."""
    assert not dist.is_initialized()
    world = World(rank, size, FileStore(scratch() / "store"), timeout_ms=60_000)
    everyone = world.create_group("tp", range(size))
    half = everyone.split(rank % 2)
    x = torch.tensor([float(10**rank)], requires_grad=True)
    assert pc.all_reduce(x.detach(), "sum", everyone).item() == 1111
    assert pc.all_reduce(x.detach(), "sum", half).item() == (101, 1010)[rank % 2]
    assert pc.all_gather_tensor(x.detach(), 0, half).tolist() == [[1, 100], [10, 1000]][rank % 2]
    assert pc.core_group(half).ranks == half.ranks and pc.is_core_group(half)
    (pc.broadcast(x, 1, everyone) * (rank + 1)).sum().backward()
    assert x.grad.item() == (10 if rank == 1 else 0)
    assert doubled_total(half)(x.detach()).item() == 2 * (101, 1010)[rank % 2]
    name = pc._registry.state_of_core(half).name
    assert torch.ops.phalanx.wait_tensor(torch.ops.phalanx.all_reduce(x.detach(), "sum", name)).item() != x.item()
    everyone.barrier()
    torch.compiler.reset()
    del half
    gc.collect()
    assert name not in pc._registry.ready
    with pytest.raises(ValueError, match="no process groups"):
        pc.all_reduce(x.detach(), "sum", name)
    world.finalize()
    with pytest.raises(PhalanxError):
        pc.all_reduce(x.detach(), "sum", everyone)


def test_groups_of_the_core_work_without_torch_distributed():
    run_ranks(groups_of_the_core, 4, timeout=120)


def order_of_ranks(rank, size):
    group = dist.new_group([2, 0])
    if rank != 1:
        gathered = pc.all_gather_tensor(torch.tensor([rank]), 0, group)
        assert gathered.tolist() == dist.get_process_group_ranks(group) == [0, 2]
        assert pc.broadcast(torch.tensor([rank]), 1, group).tolist() == [2]  # a rank within the group
    else:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            pc.all_reduce(torch.ones(1), "sum", group)  # F18


def test_ranks_of_a_subgroup_keep_its_order():
    run_ranks(order_of_ranks, 3, start_torch=True)


def wrong_groups(rank, size):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.ones(2)
    if rank == 0:  # the other rank makes no such call: nothing may be sent, nothing may hang
        for group, kind, text in (
            ((mesh, "a"), ValueError, "the dims of the mesh have the names ['tp']"),
            ((mesh, 1.0), ValueError, "a tuple as group must be (DeviceMesh, dim), not (DeviceMesh, float)"),  # F14
            ((mesh,), ValueError, "a tuple as group must be (DeviceMesh, dim), not (DeviceMesh)"),
            ((mesh, 3), ValueError, "the mesh has 1 dims"),
            (3, ValueError, "int is not a valid type for a group; pass a ProcessGroup"),  # F15
            ([], ValueError, "is empty; list at least the calling rank"),
            ([[]], ValueError, "is empty; list at least the calling rank"),
            ([0, "1"], ValueError, "must hold only ints"),
            ([0, True], ValueError, "must hold only ints"),
            ([0, 7], ValueError, "rank 7 does not exist"),
            ([0, 0], ValueError, "rank 0 is listed twice"),  # F17
            ([[0, 1], [1, 0]], ValueError, "rank 0 is listed twice"),
            (
                [[0, 1], [1]],
                ValueError,
                "lists of ranks must have the same length, and [[0, 1], [1]] has lists of 2 and 1 ranks",
            ),  # F11
            ([1], ValueError, "the calling rank 0 is not in [1]"),  # F18
            ([0], ValueError, "no process group has exactly the ranks [0]"),
            ("nowhere", ValueError, "no process group is named 'nowhere'"),
        ):
            for call in (lambda g=group: pc.all_reduce(x, "sum", g), lambda g=group: pc.enable_group(g)):
                with pytest.raises(kind) as caught:
                    call()
                assert text in str(caught.value), str(caught.value)
                assert str(caught.value).startswith(("all_reduce: ", "enable_group: "))
    for group in (dist.group.WORLD, None, (mesh, "tp")):
        assert pc.all_reduce(x, "sum", group).tolist() == [2.0, 2.0]
        assert pc.process_group_of(group).size() == 2


def test_wrong_groups_are_refused_before_anything_is_sent():  # F11, F13 to F18
    run_ranks(wrong_groups, 2, start_torch=True)


def wrong_calls(x, group):
    tall = "which is not divisible by the group size 2"
    unreducible = torch.ones(2, dtype=torch.float8_e4m3fn)
    scalar = torch.tensor(1.0)
    yield lambda: pc.all_reduce(x, "median", group), ValueError, "reduce op"  # F6
    yield lambda: pc.reduce_scatter_tensor(x, "median", 0, group), ValueError, "reduce op"
    yield (
        lambda: pc.all_reduce(x, dist.ReduceOp.MAX, group),
        ValueError,
        "must be a string such as 'max', not RedOpType.MAX",
    )
    yield lambda: pc.all_reduce_(x.detach(), None, group), ValueError, "must be a string such as 'sum', not None"
    yield lambda: pc.all_reduce_(x.detach(), "median", group), ValueError, "reduce op"
    yield lambda: pc.all_reduce(x.detach(), "premul_sum", group), ValueError, "premul_sum"
    # F8, F8d: the dim and its size
    yield (
        lambda: pc.reduce_scatter_tensor(x, "sum", 1, group),
        AssertionError,
        f"reduce_scatter_tensor: dim 1 has size 3, {tall}",
    )
    yield lambda: pc.reduce_scatter_tensor(x[:3], "sum", 0, group), AssertionError, f"dim 0 has size 3, {tall}"
    yield lambda: pc.reduce_scatter_tensor(scalar, "sum", 0, group), ValueError, "no dims"  # F25
    yield lambda: pc.reduce_scatter_tensor(x, "sum", 2, group), IndexError, "scatter_dim is 2"
    yield lambda: pc.all_gather_tensor(x, -3, group), IndexError, "gather_dim is -3"
    yield lambda: pc.all_gather_v(x, [4], 0, group), ValueError, "sizes has 1 entries"
    yield lambda: pc.all_gather_v(x, [3, 3], 0, group), ValueError, "sizes has 3 for this rank"
    yield lambda: pc.all_gather_v(x, [4, 4], 2, group), IndexError, "gather_dim is 2"
    yield lambda: pc.all_gather_v(scalar, [1, 1], 0, group), ValueError, "no dims"
    yield lambda: pc.all_gather_v(x, [4, 4.0], 0, group), AssertionError, "must be int or SymInt"
    yield lambda: pc.reduce_scatter_v(x, "median", [2, 2], 0, group), ValueError, "reduce op"
    yield lambda: pc.reduce_scatter_v(x, "sum", [2], 0, group), ValueError, "sizes has 1 entries"
    yield lambda: pc.reduce_scatter_v(x, "sum", [2, 1], 0, group), ValueError, "sizes add up to 3"
    yield lambda: pc.reduce_scatter_v(x, "sum", [5, -1], 0, group), ValueError, "negative entry"
    yield lambda: pc.shard_dim_alltoall(x, 0, 1, group), AssertionError, f"dim 1 has size 3, {tall}; pad it"
    yield lambda: pc.shard_dim_alltoall(x, 0, -2, group), ValueError, "gather_dim and shard_dim are both 0"
    yield lambda: pc.shard_dim_alltoall(x, 2, 0, group), IndexError, "gather_dim is 2"
    yield lambda: pc.shard_dim_alltoall(x, 0, 1, group, "", [4, 4]), AssertionError, "shard_sizes is None; give both"
    yield lambda: pc.shard_dim_alltoall(x, 0, 1, group, "", [4], [3]), ValueError, "gather_sizes has 1 entries"
    yield lambda: pc.shard_dim_alltoall(x, 0, 1, group, "", [3, 3], [1, 2]), ValueError, "gather_sizes has 3 for this"
    yield lambda: pc.shard_dim_alltoall(x, 0, 1, group, "", [4, 4], [1, 1]), ValueError, "shard_sizes add up to 2"
    yield lambda: pc.shard_dim_alltoall(x, 0, 1, group, "", [4, 4], [4, -1]), ValueError, "negative entry"
    yield lambda: pc.broadcast(x, 2, group), ValueError, "src is 2"
    yield lambda: pc.broadcast(x, -1, group), ValueError, "src is -1"
    yield lambda: pc.broadcast(x, "0", group), ValueError, "src is '0'; it must be a rank within the group"
    yield lambda: pc.broadcast_(x.detach(), 2, group), ValueError, "src is 2"
    yield lambda: pc.all_to_all_single(x[:3], None, None, group), ValueError, "0 has size 3"
    yield (
        lambda: pc.all_to_all_single(x, [4, 0], None, group),
        AssertionError,
        "output_split_sizes is given and input_split_sizes is None",
    )
    yield lambda: pc.all_to_all_single(x, [2, 2.0], [2, 2], group), AssertionError, "must be int or SymInt"
    yield lambda: pc.all_to_all_single(x, [4], [4], group), ValueError, "has 1 entries"
    yield lambda: pc.all_to_all_single(x, [2, 2], [1, 2], group), ValueError, "add up to 3"
    yield lambda: pc.all_to_all_single(x, [2, 2], [5, -1], group), ValueError, "negative entry"
    yield lambda: pc.all_to_all_single(scalar, None, None, group), ValueError, "dim"
    yield lambda: pc.all_reduce(unreducible, "sum", group), NotImplementedError, "can be moved but not reduced"
    yield lambda: pc.all_reduce([1.0], "sum", group), TypeError, "expected a torch.Tensor"


def wrong_arguments(rank, size):
    group = dist.group.WORLD
    if rank == 0:  # also before the ranks have met
        for call, kind, text in wrong_calls(torch.ones(4, 3), group):
            if "premul" not in text and "reduced" not in text:  # the core itself finds these two, when it has met
                with pytest.raises(kind, match=re.escape(text)):
                    call()
    pc.enable_group(group)
    for needs_gradient in (False, True):  # on the fast path, and with a gradient off it
        if rank == 0:
            for call, kind, text in wrong_calls(torch.ones(4, 3, requires_grad=needs_gradient), group):
                with pytest.raises(kind) as caught:
                    call()
                assert text in str(caught.value), str(caught.value)
    assert pc.all_reduce(torch.ones(4, 3), "SuM", group)[0].tolist() == [2.0] * 3  # F6: in any case


def test_wrong_arguments_are_refused_before_anything_is_sent():  # F6, F8, F8d, F25
    run_ranks(wrong_arguments, 2, start_torch=True)


def without_torch_distributed(rank, size):
    with pytest.raises(ValueError, match="init_process_group"):
        pc.all_reduce(torch.ones(1), "sum", [0])


def test_without_process_groups_the_error_says_what_to_call():
    run_ranks(without_torch_distributed, 1)


def meet_with_other_builds(rank, size, backend):
    from phalanx.collectives import _bootstrap

    if rank == 1:
        _bootstrap._build = lambda: "9.9.9 (build 0123456789abcdef)"
    store = f"file://{scratch() / 'store'}"
    seconds = timedelta(seconds=30)
    try:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=seconds)
        pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    except (AbiError, dist.DistBackendError) as error:
        return str(error)
    return "they met"


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ranks_of_different_builds_do_not_meet(backend):  # C2
    told = run_groups(meet_with_other_builds, 3, backend)
    own = json.loads(ffi.string(lib.phx_build_info()).decode())["build"]
    assert all(own in each and "9.9.9 (build 0123456789abcdef)" in each for each in told), told
