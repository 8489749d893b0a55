"""Process groups that are made by hand, by frameworks and elastic managers: attached by their own facts."""  # T5

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

import phalanx.collectives as pc
from c10d_groups import apart, join, run_groups
from phalanx.collectives import c10d
from phalanx.core import errors as pc_errors
from ranks import run_ranks, scratch

LIMIT = timedelta(seconds=30)


def make(backend, position, size, name="update", store="update"):
    """As frameworks make a group for weight updates."""
    c10d.register()
    base = PrefixStore(name, dist.FileStore(str(scratch() / store), size))
    made, _ = _new_process_group_helper(size, position, [], dist.Backend(backend), base, group_name=name, timeout=LIMIT)
    _world.pg_group_ranks[made] = {i: i for i in range(size)}
    return made


def use(group, position, size):
    """Every kind of call, whose result tells which rank had which part."""
    total = float(sum(range(size)))
    x = torch.full((3,), float(position))
    dist.all_reduce(x, group=group)
    assert x.tolist() == [total] * 3
    y = torch.full((1,), float(position))
    dist.broadcast(y, group_src=1, group=group)
    assert y.item() == 1
    parts = [torch.empty(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(position)]), group=group)
    assert [part.item() for part in parts] == list(range(size))
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work.get_future().wait()[0].tolist() == [size * total] * 3
    z = torch.full((2,), float(position))
    assert pc.all_reduce(z, "sum", group).tolist() == [total] * 2
    assert pc.all_gather_tensor(z[:1], 0, group).tolist() == list(range(size))
    assert torch.ops.phalanx.blocking_all_reduce(z, "sum", group.group_name).tolist() == [total] * 2  # T6
    assert pc.enable_group(group) and pc.core_group(group).group_rank == position


def joins_two_worlds(rank, size, backend):
    name, own, count = ("trainer", 0, 1) if rank == 0 else ("engines", rank - 1, 2)
    join(own, count, name=name, backend=backend)
    dist.barrier()
    use(make(backend, rank, size), rank, size)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == count
    assert pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == count
    dist.destroy_process_group()


def in_another_order(rank, size, backend):
    join(rank, size, backend=backend)
    position = size - 1 - rank
    use(make(backend, position, size), position, size)
    use(dist.group.WORLD, rank, size)
    again = PrefixStore("same store", dist.distributed_c10d._get_default_store())  # some numbers are the same in both
    made, _ = _new_process_group_helper(size, position, [], dist.Backend(backend), again, "same", timeout=LIMIT)
    _world.pg_group_ranks[made] = {i: i for i in range(size)}
    use(made, position, size)
    dist.destroy_process_group()


def without_a_world(rank, size, backend):
    assert not dist.is_initialized()
    use(make(backend, rank, size), rank, size)


KINDS = [joins_two_worlds, in_another_order, without_a_world]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_made_by_hand_has_its_own_ranks(kind):
    run_groups(kind, 3, "phalanx")


@pytest.mark.parametrize("kind", KINDS)
def test_functional_collectives_serve_groups_of_gloo_that_were_made_by_hand(kind):
    run_ranks(kind, 3, "gloo")


def alone(store, rank, size, name="alone"):
    """As torchft makes its groups: neither init_process_group nor torch's table of groups knows them."""
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.group_id = store, rank, size, name
    options.timeout, options.global_ranks_in_group = LIMIT, list(range(size))
    made = dist.Backend._plugins["PHALANX"].creator_fn(options, None)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, made)
    return group, made


def unknown_to_torch(rank, size):
    c10d.register()
    store = dist.FileStore(str(scratch() / "store"), size)
    for generation in range(3):  # of the same name; the later ones with ranks in another order
        position = rank if generation == 0 else size - 1 - rank
        group, made = alone(PrefixStore(f"generation {generation}", store), position, size)
        x = torch.tensor([float(position)])
        group.allreduce([x]).wait()
        assert x.item() == sum(range(size))
        parts = [torch.empty(1) for _ in range(size)]
        group.allgather([parts], [torch.tensor([float(position)])]).wait()
        assert [part.item() for part in parts] == list(range(size))
        if generation == 1:
            made.abort()
        else:
            made.shutdown()
        with pytest.raises(dist.DistBackendError, match=r"destroyed|aborted"):
            group.allreduce([x]).wait()


def test_groups_of_one_name_follow_each_other_without_torch_knowing_them():
    run_groups(unknown_to_torch, 3)


def training(rank, size):
    """DDP and its hooks on groups that only their users know, each of one store and of ranks in another order."""
    store = dist.FileStore(str(scratch() / "store"), size)
    torch.manual_seed(0)
    start = torch.nn.Linear(4, 2)
    batches = torch.randn(size, 3, 4)
    whole = copy.deepcopy(start)
    whole(batches.flatten(0, 1)).square().mean().backward()
    for generation in range(2):
        position = (rank + generation) % size
        base = PrefixStore("training", PrefixStore(str(generation), store))
        group = c10d.process_group(base, position, size, LIMIT)
        model = copy.deepcopy(start)
        with torch.no_grad():
            model.weight.add_(position)  # DDP takes the weights of the first rank of its group
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(group, default_hooks.allreduce_hook)
        ddp(batches[position]).square().mean().backward()
        for ours, wanted in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, wanted)
            torch.testing.assert_close(ours.grad, wanted.grad)
        group.barrier().wait()
        group.shutdown()
    assert not dist.is_initialized()


def test_ddp_trains_on_groups_that_torch_does_not_know():
    run_groups(training, 3)


def survivors(rank, size):
    """Rank 0 was there before; rank 1 is new in every generation. The group has the same name each time."""
    if rank == 0:
        for generation in range(3):
            join(0, 2, name=f"generation {generation}")
            group = make("phalanx", 0, 2, store=f"update {generation}")
            use(dist.group.WORLD, 0, 2)
            use(group, 0, 2)
            dist.destroy_process_group()
    else:
        for generation in range(3):
            pid = os.fork()
            if pid == 0:
                join(1, 2, name=f"generation {generation}")
                group = make("phalanx", 1, 2, store=f"update {generation}")
                use(dist.group.WORLD, 1, 2)
                use(group, 1, 2)
                dist.destroy_process_group()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0


def test_a_survivor_meets_newcomers_in_groups_of_the_same_name():
    run_groups(survivors, 2)


def of_one_timeout(rank, size, kind):
    """WORLD has a minute, or its store has; the group has a second."""
    if kind == "store":
        store = dist.FileStore(str(scratch() / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=1))
        group = dist.group.WORLD
    else:
        join(rank, size, seconds=60, backend="gloo")
        group = dist.new_group(list(range(size)), timeout=timedelta(seconds=1), backend=kind)
    met = dist.FileStore(str(scratch() / "met"), 1)
    if rank == 0:
        with pytest.raises(pc_errors.WaitTimeoutError, match="1000 ms"):
            pc.all_reduce(torch.ones(2), "sum", group).tolist()
        met.set("first", b"")
    else:
        met.wait(["first"], timedelta(seconds=30))
    assert pc.all_reduce(torch.ones(1), "sum", group).item() == size  # it may be tried again
    if rank == 0:
        with pytest.raises(pc_errors.WaitTimeoutError, match="1000 ms"):
            pc.all_reduce(torch.ones(2), "sum", group).tolist()
        met.set("second", b"")
    else:
        met.wait(["second"], timedelta(seconds=30))


def test_functional_collectives_have_the_timeout_of_their_group():
    for kind in ("store", "gloo"):
        run_ranks(of_one_timeout, 2, kind)
    run_groups(of_one_timeout, 2, "phalanx")


# ---- groups that have been registered by a name ----------------------------------------------------------------------


def reduced(x, name):
    return torch.ops.phalanx.wait_tensor(torch.ops.phalanx.all_reduce(x, "sum", name))


def check_name(name, x, total):
    """Every kind of call by that name, the first one included."""
    many = torch.ops.phalanx.all_reduce_coalesced([x, x * 2], "sum", name)
    assert [torch.ops.phalanx.wait_tensor(each)[0].item() for each in many] == [total, 2 * total]
    assert reduced(x, name)[0].item() == total
    assert torch.ops.phalanx.blocking_all_reduce(x, "sum", name)[0].item() == total
    torch.ops.phalanx.all_reduce_(y := x.clone(), "sum", name)
    assert torch.ops.phalanx.wait_tensor(y)[0].item() == total
    assert pc.all_reduce(x, "sum", name)[0].item() == total
    pc.barrier(name)
    with pc.coalescing_manager(name):
        z = pc.all_reduce(x, "sum", name)
        pc.all_reduce_(y.copy_(x), "max", name)
    assert z[0].item() == total
    w = x.clone().requires_grad_()
    reduced(w, name).sum().backward()
    assert w.grad[0].item() == dist.get_world_size()


def by_names(rank, size, backend):
    join(rank, size, backend=backend)
    x = torch.full((4,), rank + 1.0)
    total = sum(range(1, size + 1))
    group = dist.new_group(list(range(size)))
    _register_process_group("another name", group)
    compiled = torch.compile(lambda y: reduced(y, "another name") * 2, fullgraph=True)
    assert compiled(x)[0].item() == 2 * total  # the ranks meet in the graph
    check_name("another name", x, total)
    assert pc.core_group(group) is not None

    base = PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    made = [dist.ProcessGroup(PrefixStore(str(i), base), rank, size) for i in range(2)]
    for i, each in enumerate(made):  # the backend of one that torch does not know
        own = dist.ProcessGroupGloo(PrefixStore(str(i), base), rank, size)
        each._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        each._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, own)
    _register_process_group("by hand", made[0])
    check_name("by hand", x, total)
    assert torch.compile(lambda y: pc.all_reduce(y, "sum", "by hand") * 2, fullgraph=True)(x)[0].item() == 2 * total
    # The name may mean another group later, of other ranks.
    _unregister_process_group("by hand")
    half = dist.new_group([0, 1])
    if rank < 2:
        _register_process_group("by hand", half)
        assert reduced(x, "by hand")[0].item() == 3
        assert pc.all_reduce(x, "sum", "by hand")[0].item() == 3
    with pytest.raises((ValueError, RuntimeError), match="no process group is named 'nobody'"):
        torch.ops.phalanx.all_reduce(x, "sum", "nobody")
    dist.barrier()


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ops_find_any_group_by_the_names_that_torch_knows(backend):  # F28, T6
    run_groups(by_names, 3, backend, timeout=240)  # each rank compiles what torch has not compiled on this host


def renamed(rank, size):
    """The core serves none of these groups: what goes through torch goes by the name."""
    base = PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    first, second = (dist.ProcessGroup(PrefixStore(str(i), base), rank, size) for i in range(2))
    for i, each in enumerate((first, second)):
        own = dist.ProcessGroupGloo(PrefixStore(str(i), base), rank, size)
        each._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        each._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, own)
    _register_process_group("by hand", first)
    x = torch.ones(1)
    assert pc.all_reduce(x, "sum", "by hand").item() == size and pc.core_group(first) is None
    assert pc.all_reduce(x, "sum", first).item() == size
    _unregister_process_group("by hand")
    _register_process_group("by hand", second)
    assert pc.all_reduce(x, "sum", "by hand").item() == size
    for call in (lambda: pc.all_reduce(x, "sum", first), lambda: pc.isend(x, 0, first)):
        with pytest.raises(ValueError, match="the name 'by hand' means another process group now"):
            call()


def test_a_group_whose_name_means_another_one_is_refused():  # F28
    run_ranks(renamed, 2, start_torch=True, env=apart(2))
