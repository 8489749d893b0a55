"""The private parts of torch that this package relies on are where they were."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from phalanx.dtensor import _torch_compat
from phalanx.dtensor.placement_types import Shard, SizedShard

MEND = "mend phalanx/dtensor/_torch_compat.py"


def test_placements_of_torch_are_what_they_were():
    theirs = placement_types._StridedShard(1, split_factor=2)
    assert (theirs.dim, int(theirs.split_factor)) == (1, 2), f"_StridedShard of torch has changed: {MEND}"
    assert not theirs.is_shard(), (
        f"a _StridedShard of torch is a shard now: {MEND}, and what placement_types.py says of it"
    )
    assert placement_types.Placement() is not None, (
        "Placement of torch cannot be derived from any more: SizedShard does"
    )


def test_dynamo_knows_our_placements():
    opaque = __import__("torch._library.opaque_object", fromlist=["x"])
    if not opaque.is_opaque_type(placement_types.Placement):  # 2.11
        variables = __import__("torch._dynamo.variables.distributed", fromlist=["x"])
        for placement in (Shard(0), SizedShard(0, (1, 2))):
            assert variables.PlacementVariable.is_placement(placement), f"torch knows no placements of ours: {MEND}"
        return
    for cls in (Shard, SizedShard):
        assert opaque.is_opaque_value_type(cls), f"torch has moved what makes constants of placements: {MEND}"
    assert opaque.get_member_type(SizedShard, "sizes") is not None


def test_meshes_have_keys_by_which_they_are_equal():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        key = _torch_compat.mesh_key
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        same = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", (2, 2))
        assert key(mesh) == key(same) and hash(key(mesh)) == hash(key(same)), f"_hash_key of a mesh has changed: {MEND}"
        assert len({key(mesh), key(other), key(mesh["tp"]), key(mesh["dp"])}) == 4
    finally:
        dist.destroy_process_group()


def test_sizes_are_known_to_divide_or_not():
    assert _torch_compat.surely_divides(8, 4) and not _torch_compat.surely_divides(9, 4)
    assert (_torch_compat.sym_min(3, 5), _torch_compat.sym_max(3, 5)) == (3, 5)


def test_fully_shard_and_state_dicts_ask_the_names_that_are_replaced():
    """Each name and each call of FSDP2 and of the state dicts of checkpoints that `_fsdp` and `_checkpoint` rely on."""
    from torch.distributed import _state_dict_utils, fsdp

    found = []
    _torch_compat.when_fsdp_is_imported(lambda *modules: found.append(modules))
    assert found and fsdp, f"FSDP2 of torch has moved, and fully_shard does not take DTensors of ours: {MEND}"
    param, group, collectives = found[0]
    for module, names in (
        (param, ("DTensor", "_from_local_no_grad")),
        (group, ("FSDPParam", "FSDPParamGroup")),
        (collectives, ("DTensor",)),
        (_state_dict_utils, ("DTensor", "distribute_tensor", "_distribute_tensors")),
    ):
        for name in names:
            assert "phalanx" in getattr(module, name).__module__, f"{module.__name__}.{name} is not replaced: {MEND}"
    # What the derived classes override, with the arguments that they take.
    methods = {
        "_init_sharding_spec": ["self", "param", "fsdp_placement", "shard_dim"],
        "_get_unsharded_dtensor_spec": ["self", "unsharded_param"],
        "_get_grad_inner_tensor": ["self", "grad"],
    }
    theirs = group.FSDPParam.__mro__[1]
    for name, expected in methods.items():
        assert list(inspect.signature(getattr(theirs, name)).parameters) == expected, f"{name} has changed: {MEND}"
    theirs = group.FSDPParamGroup.__mro__[1]
    assert list(inspect.signature(theirs).parameters)[:2] == ["params", "modules"], f"FSDPParamGroup: {MEND}"
    source = inspect.getsource(_state_dict_utils._broadcast_tensors)
    assert "_distribute_tensors(" in source and "(local_state, full_tensor)" in source, f"_broadcast_tensors: {MEND}"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_tell_what_computes_them_again(use_reentrant):
    from phalanx.dtensor._torch_compat import enclosing_checkpoints

    found = []

    def function(x):
        found.append(enclosing_checkpoints())
        return x * 2

    x = torch.ones(2, requires_grad=True)
    function(x)
    checkpoint(function, x, use_reentrant=use_reentrant)
    message = f"torch.utils.checkpoint has changed: mend phalanx/dtensor/_torch_compat.py {found}"
    assert found[0] == [] and len(found[1]) == 1, message
    holder, name = found[1][0]
    assert name == ("run_function" if use_reentrant else "recompute_fn") and callable(getattr(holder, name)), message
