"""torch still has what _torch_compat.py relies on, and it means what that says."""

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.collectives import _torch_compat, c10d
from ranks import run_ranks, scratch

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


def joined(rank, size):
    dist.init_process_group("gloo", store=dist.FileStore(str(scratch() / "store"), size), rank=rank, world_size=size)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = dist.FileStore(str(scratch() / "own"), size), rank, size
    options.group_id, options.timeout, options.global_ranks_in_group = "own", timedelta(seconds=30), list(range(size))
    cpu = torch.device("cpu")
    for given in (None, dist.group.WORLD._get_backend(cpu)):
        group = _torch_compat.join_backends(options, given, None)
        assert type(group) is dist.ProcessGroup and group._device_types == [cpu], MOVED + "_register_backend"
        assert group._get_backend(cpu).name() == "gloo", MOVED + "_get_backend"
        x = torch.full((3,), float(rank))
        group.allreduce([x]).wait()
        assert x.tolist() == [1.0] * 3
    dist.destroy_process_group()


def test_a_process_group_can_be_made_of_backends():
    run_ranks(joined, 2)
