"""Tensor parallelism: the weights of an MLP are sharded over the ranks."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

from phalanx.dtensor.debug import CommDebugMode
from phalanx.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    dist.init_process_group("phalanx")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same numbers on every rank
    up, down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    model = torch.nn.Sequential(up, torch.nn.ReLU(), down)
    x = torch.randn(32, 64, requires_grad=True)
    expected = model(x)  # on one process
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with CommDebugMode() as sent:
        y = model(x)  # one all_reduce here, and one in the backward pass
        y.square().mean().backward()
    torch.testing.assert_close(y, expected)
    if dist.get_rank() == 0:
        print({str(op): count for op, count in sent.get_comm_counts().items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
