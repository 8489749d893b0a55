"""Every name of torch.distributed._functional_collectives that others use is one of phalanx.collectives."""

import inspect

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as theirs

import phalanx.collectives as pc
from ranks import run_ranks

# The names of torch that have no counterpart, and why.
LEFT_OUT = {
    "REDUCE_OP_TO_STR": "a table for what Dynamo puts in the place of calls; ours has its own",
}
# Private there, and used by other parts of torch or by programs: these have one. Other private names are kernels,
# gradients and remappings of torch's own ops.
PRIVATE = ["_coalescing_manager", "_expand_group", "_register_tensor_work", "_resolve_group_name"]


def public():
    """The names that are defined there, and not imported."""
    for name, value in vars(theirs).items():
        module = getattr(value, "__module__", None)
        defined = module == theirs.__name__ or (name.isupper() and name != "TYPE_CHECKING")
        internal = name.endswith(("_backward", "_setup_context"))  # of torch's own ops
        if defined and not internal and not name.startswith("_"):
            yield name, value


def test_every_public_name_has_a_counterpart():
    names = dict(public())
    assert len(names) > 30
    missing = [name for name in names if not hasattr(pc, name)]
    assert sorted(missing) == sorted(LEFT_OUT)
    assert [name for name in PRIVATE if not hasattr(pc, name)] == []


def test_their_arguments_have_the_same_names_and_defaults():
    for name, value in public():
        if inspect.isfunction(value) and name not in LEFT_OUT:
            own = inspect.signature(getattr(pc, name)).parameters
            for parameter in inspect.signature(value).parameters.values():
                assert parameter.name in own, f"{name}: no parameter {parameter.name}"
                default = own[parameter.name].default
                # None, the default group, may be a default of ours where torch has none.
                assert default == parameter.default or parameter.default is inspect.Parameter.empty, name


def expanded(rank, size):
    group = dist.group.WORLD
    assert pc._expand_group(group) == theirs._expand_group(group)
    for ranks in ([0, 1], [[0], [1]]):
        assert pc._expand_group(ranks, "x") == (theirs._expand_group(ranks, "x"))
    assert pc._expand_group(None) == pc._expand_group(group) == pc._expand_group(group.group_name)
    assert pc._resolve_group_name(group) == theirs._resolve_group_name(group)
    allowed = torch._C._distributed_c10d._allow_inflight_collective_as_graph_input
    with pc.allow_inflight_collective_as_graph_input_ctx():
        assert allowed()
    assert not allowed()


def test_groups_are_expanded_as_by_torch():
    run_ranks(expanded, 2, start_torch=True)
