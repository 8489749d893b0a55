"""A compiled layer whose collective reads the output of the layer's product in place, and a report that says so."""

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from phalanx import inductor_plugin
from phalanx.collectives import all_reduce

os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"  # a graph from Inductor's cache has no report


def layer(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    return stream + all_reduce(torch.relu(x @ weight), "sum", dist.group.WORLD)


def main() -> None:
    dist.init_process_group("phalanx")
    torch.manual_seed(dist.get_rank())
    compiled = torch.compile(layer, backend="phalanx")
    x, weight, stream = torch.randn(512, 64), torch.randn(64, 512), torch.ones(512, 512)
    assert torch.equal(compiled(x, weight, stream), layer(x, weight, stream))
    if dist.get_rank() == 0:
        print(*inductor_plugin.reports(), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
