"""A model of DTensors is saved, and loaded into another sharding of it, with torch.distributed.checkpoint."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

from phalanx.dtensor import DTensor
from phalanx.dtensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def trained(style: ParallelStyle, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with the weights and the optimizer state after one step."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(torch.nn.Linear(16, 8), mesh, style)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16 if isinstance(style, ColwiseParallel) else 16 // mesh.size())).sum().backward()
    optimizer.step()
    return model, optimizer


def main() -> None:
    dist.init_process_group("phalanx")
    with tempfile.TemporaryDirectory() as scratch:
        folder = [scratch]
        dist.broadcast_object_list(folder)  # all ranks write to one folder
        model, optimizer = trained(ColwiseParallel(), seed=0)
        # [save]
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
        # [save end]
        other, other_optimizer = trained(RowwiseParallel(), seed=1)
        # [load]
        weights, states = get_state_dict(other, other_optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
        set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states)
        # [load end]
        dist.barrier()  # the folder goes when all have read
    for saved, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(saved, DTensor) and isinstance(loaded, DTensor)
        assert torch.equal(saved.full_tensor(), loaded.full_tensor())
        print(f"rank {dist.get_rank()}: saved as {saved.placements}, loaded as {loaded.placements}, equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
