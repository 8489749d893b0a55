"""Two ranks run one compiled layer. Its collective reads what the layer's product wrote, where it lies.

Nothing changes in the function: `backend="phalanx"` is found by its name, once phalanx-inductor-plugin is installed.
"""

import os
import tempfile

import torch
import torch.distributed as dist

from phalanx import inductor_plugin
from phalanx.collectives import all_reduce


# [layer]
def layer(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    return stream + all_reduce(torch.relu(x @ weight), "sum", dist.group.WORLD)


compiled = torch.compile(layer, backend="phalanx")
# [layer end]


def run(rank: int, world_size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    weight = torch.randn(64, 512)
    for _ in range(3):  # compiled at the first; all of them use the same shared memory
        x, stream = torch.randn(512, 64), torch.ones(512, 512)
        assert torch.equal(compiled(x, weight, stream), layer(x, weight, stream))
    if rank == 0:
        # [report]
        for report in inductor_plugin.reports():
            print(report)
        # [report end]
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"  # a graph from a cache has no report
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, args=(2, os.path.join(directory, "store")), nprocs=2)


if __name__ == "__main__":
    main()
