"""A compiled layer whose collective reads the layer's product in place."""

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from phalanx import inductor_plugin
from phalanx.collectives import all_reduce

os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"  # a cached graph has no report


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return bias + all_reduce(torch.relu(x @ weight), "sum", dist.group.WORLD)


def main() -> None:
    dist.init_process_group("phalanx")
    torch.manual_seed(dist.get_rank())
    compiled = torch.compile(layer, backend="phalanx")
    x, weight, bias = torch.randn(512, 64), torch.randn(64, 512), torch.ones(512)
    assert torch.equal(compiled(x, weight, bias), layer(x, weight, bias))
    if dist.get_rank() == 0:
        print(*inductor_plugin.reports(), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
