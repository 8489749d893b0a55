"""torch still has what c10d/_torch_compat.py relies on, and it means what that says."""

import pytest
import torch
import torch.distributed as dist

from phalanx.collectives import c10d
from phalanx.collectives.c10d import _torch_compat

MOVED = f"torch {torch.__version__} has changed "


def test_a_backend_can_be_registered_and_is_so_once():
    known = dist.Backend._plugins["PHALANX"]  # by the import of phalanx.collectives
    assert dist.Backend.PHALANX == "phalanx"
    c10d.register()
    assert dist.Backend._plugins["PHALANX"] is known, MOVED + "Backend._plugins"
    assert known.extended_api, MOVED + "register_backend"
    assert dist.Backend.backend_capability["phalanx"] == ["cpu", "cuda"], MOVED + "register_backend"
    unasked = dist.Backend.default_device_backend_map
    assert unasked["cpu"] == "gloo" and unasked["cuda"] == "nccl"  # nobody gets it unasked


def test_options_have_the_fields_that_are_read():
    names = ["Allreduce", "AllreduceCoalesced", "Broadcast", "Reduce", "Allgather", "Gather", "Scatter"]
    for name in [*names, "ReduceScatter", "AllToAll", "Barrier"]:
        made = getattr(_torch_compat.options, f"{name}Options")()
        assert made.asyncOp is True and made.timeout.total_seconds() < 0, MOVED + f"{name}Options"


def test_the_factor_of_a_premultiplied_sum_can_be_read():
    for factor in (2.5, torch.tensor([2.5])):
        made = dist._make_nccl_premul_sum(factor)
        assert _torch_compat.premultiplied_by(made) == 2.5, MOVED + "ReduceOp.__getstate__"


def test_python_classes_can_be_groups_and_works():
    class Group(_torch_compat.GroupBase):
        def __init__(self):
            super().__init__(0, 1)

        def getGroupName(self):  # noqa: N802
            return "of Python"

    group = Group()
    assert group.group_name == "of Python", MOVED + "PyProcessGroup: it does not ask Python for the name"
    _torch_compat.claim_devices(group, ["cpu"])
    assert group._device_types == [torch.device("cpu")], MOVED + "_register_backend without a Backend"
    assert _torch_compat.backend_of(group, "gloo") is group

    class Work(_torch_compat.WorkBase):
        pass

    assert Work() is not None
    future = _torch_compat.new_future()
    future.set_result([torch.ones(1)])
    assert future.wait()[0].item() == 1


def test_a_python_class_still_cannot_be_a_backend():
    """When this fails, the group in Python can become a Backend, and have CUDA tensors beside it."""
    with pytest.raises(TypeError, match="No constructor defined"):
        type("Own", (torch._C._distributed_c10d.Backend,), {})(0, 1)
