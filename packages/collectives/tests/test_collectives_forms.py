"""What docs/explanation/groups.md says of the forms of a group in graphs, and the names of arguments."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as theirs
from torch.distributed.device_mesh import init_device_mesh

import phalanx.collectives as pc
from phalanx.collectives import _kernels
from phalanx.collectives._registry import state_named
from ranks import run_ranks

MOVED = f"torch {torch.__version__} has changed "


class Graphs:
    """A backend that keeps the arguments of our ops after the first, and runs the graphs as they are."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, _):
        nodes = [node for node in module.graph.nodes if "phalanx" in str(node.target)]
        self.calls += [tuple(node.args[1:]) for node in nodes if "wait" not in str(node.target)]
        return module.forward


def gathered(x, group):
    return pc.all_gather_tensor(x, 0, group)


def every_form(rank, size):
    world = dist.group.WORLD
    flat, mesh = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    everybody = list(range(size))
    x = torch.tensor([10.0 * rank])
    for group in (
        *(world, world.group_name, everybody, pc.core_group(world)),  # what this rank does
        *([everybody], flat, (flat, 0), (mesh, 1), mesh["b"]),  # and all do
    ):
        torch.compiler.reset()
        graphs = Graphs()
        found = torch.compile(gathered, backend=graphs, fullgraph=True)(x, group)
        ((group_size, name),) = graphs.calls  # one node
        assert type(group_size) is int and group_size == size and type(name) is str  # constants
        assert state_named(name).ranks == tuple(everybody)
        assert found.tolist() == gathered(x, group).tolist() == [10.0 * each for each in everybody]  # as in eager mode
    torch.compiler.reset()
    graphs = Graphs()
    listed = [[each] for each in everybody]  # each rank takes part in the list that holds it; they are groups of `mesh`
    assert torch.compile(lambda t: gathered(t, listed), backend=graphs, fullgraph=True)(x).tolist() == [10.0 * rank]
    assert gathered(x, listed).tolist() == [10.0 * rank], gathered(x, listed)
    ((group_size, name),) = graphs.calls
    assert group_size == 1 and state_named(name).ranks == (rank,)


def guards(rank, size):
    """Dynamo guards on the group that it was given."""
    world, alone = dist.group.WORLD, [dist.new_group([each]) for each in range(size)][rank]
    torch.compiler.reset()
    graphs = Graphs()
    graph = torch.compile(gathered, backend=graphs, fullgraph=True)
    x = torch.tensor([10.0 * rank])
    for group, count in ((world, 1), (alone, 2), (world, 2), (alone, 2)):
        assert graph(x, group).tolist() == gathered(x, group).tolist()
        assert len(graphs.calls) == count


def tracing_alone(rank, size):
    """Nothing is sent while a graph is traced: a rank traces, and no other has come to the group yet."""
    group = dist.new_group(list(range(size)))
    store = dist.distributed_c10d._get_default_store()
    x = torch.tensor([rank + 1.0])

    def traced(module, _):
        assert not state_named(group.group_name).decided
        store.set("traced", b"")
        return module.forward

    torch.compiler.reset()
    if rank == 0:
        assert torch.compile(gathered, backend=traced, fullgraph=True)(x, group).tolist() == [1.0, 2.0]
    else:
        store.wait(["traced"])
        assert gathered(x, group).tolist() == [1.0, 2.0]
    assert state_named(group.group_name).decided  # the ranks met when it ran


def own_graphs(rank, size):
    """Arguments of the graphs that depend on the rank, and of one that does not."""
    group = dist.group.WORLD
    torch.compiler.reset()
    graphs = Graphs()
    x = torch.full((3,), float(rank))
    calls = (lambda t: pc.permute_tensor(t, [1, 0], group)[:1] * 1, lambda t: gathered(t, group))
    results = [torch.compile(call, backend=graphs, fullgraph=True)(x) for call in calls]
    assert results[0].tolist() == [1.0 - rank]
    return graphs.calls


def tags(rank, size):
    """A tag that does not exist makes a new group, once; a graph finds it."""
    x = torch.tensor([rank + 1.0])
    assert pc.all_reduce(x, "sum", [0, 1], "mine").item() == 3
    torch.compiler.reset()
    graphs = Graphs()
    call = torch.compile(lambda t: pc.all_reduce(t, "sum", [0, 1], "mine"), backend=graphs, fullgraph=True)
    assert call(x).item() == 3
    ((_, name),) = graphs.calls
    assert name != dist.group.WORLD.group_name and state_named(name).ranks == (0, 1)


def documented(rank, size):
    every_form(rank, size)
    guards(rank, size)
    tracing_alone(rank, size)
    tags(rank, size)
    return own_graphs(rank, size)


@pytest.mark.timeout(200)
def test_each_form_of_a_group_is_a_constant_name_in_a_graph():  # F22
    one, other = run_ranks(documented, 2, start_torch=True, timeout=150)
    assert one[0] != other[0]  # permute_tensor knows the position of this rank
    assert one[1] == other[1]


# ---- names of arguments: P27 -----------------------------------------------------------------------------------------

FUNCTIONS = sorted(name for name in set(pc.__all__) & set(vars(theirs)) if inspect.isfunction(getattr(theirs, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_parameters_of_torchs(name):  # P27
    ours, wanted = (inspect.signature(getattr(module, name)).parameters for module in (pc, theirs))
    assert list(ours) == list(wanted), MOVED + name
    for parameter in wanted.values():
        assert ours[parameter.name].kind is parameter.kind, MOVED + f"{name}: {parameter}"
        if parameter.default is not inspect.Parameter.empty:  # whoever leaves it out may leave it out here
            assert ours[parameter.name].default == parameter.default, MOVED + f"{name}: {parameter}"


def schemas(namespace):
    """The arguments of each op of a namespace: (name, whether by keyword only)."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(f"{namespace}::") and not schema.overload_name:
            arguments = [(argument.name, argument.kwarg_only) for argument in schema.arguments]
            found[schema.name.removeprefix(f"{namespace}::")] = arguments
    return found


def test_an_op_has_the_arguments_of_torchs_op_of_its_name():  # P27
    import torch.distributed._symmetric_memory  # noqa: F401 - defines some of its ops

    ours, wanted = schemas("phalanx"), schemas("_c10d_functional")
    assert len(FUNCTIONS) > 20 and len(set(ours) & set(wanted)) > 15
    for name in set(ours) & set(wanted):
        assert ours[name] == wanted[name], MOVED + name
    assert set(wanted) - set(ours) == {"_wrap_tensor_autograd"}, MOVED + "its ops"
    others = {name.removeprefix("nccl_") for name in schemas("symm_mem")}  # of phalanx.symm_mem, where that is imported
    others |= set(_kernels._GRAPH_FAKES)  # only compiled graphs call these
    for name, arguments in ours.items():  # those that torch has not got look alike
        if name.startswith("blocking_"):
            assert arguments == ours[name.removeprefix("blocking_")]
        elif name not in wanted and name not in others and not name.startswith("wait_tensor"):
            assert arguments[-1] == ("group_name", False)
