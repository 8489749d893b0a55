"""An inference engine on CPUs: two pipeline stages of two tensor-parallel ranks each, with a communicator for both.

Communicator has the calls of an engine by the names that vLLM gives them. The tokens are compared with those of one
process.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import phalanx.collectives as pc
from phalanx.collectives import inference

STAGES, SHARDS = 2, 2
HIDDEN, INNER, WORDS, REQUESTS, STEPS = 64, 256, 500, 3, 6


# [communicator]
class Communicator:
    """The communicator of a group. Ranks are those within the group."""

    def __init__(self, group: pc.GroupLike) -> None:
        self.group = group

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return pc.all_reduce_(input_, "sum", self.group)  # in place

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return inference.all_gather(input_, self.group, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return pc.wait_tensor(pc.reduce_scatter_tensor(input_, "sum", dim, self.group))

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return inference.gather(input_, group=self.group, dim=dim, group_dst=dst)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return pc.broadcast_(tensor, src, self.group)

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        inference.send_tensor_dict(tensor_dict, group=self.group, group_dst=dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        return inference.recv_tensor_dict(group=self.group, group_src=src)


# [communicator end]


def weights() -> dict[str, torch.Tensor]:
    """The weights of the whole model: small integers, so that sums are exact and both programs give the same tokens."""
    draw = torch.Generator().manual_seed(1)

    def make(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=draw).float()

    layers: dict[str, torch.Tensor] = {}
    for stage in range(STAGES):
        layers |= {f"up {stage}": make(HIDDEN, INNER), f"down {stage}": make(INNER, HIDDEN)}
    return {"embedding": make(WORDS, HIDDEN), **layers, "head": make(HIDDEN, WORDS)}


def block(hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A part of an MLP: whole with whole weights."""
    return (hidden @ up).relu() @ down


def one_process() -> torch.Tensor:
    model, tokens = weights(), torch.arange(REQUESTS)
    for _ in range(STEPS):
        hidden = model["embedding"][tokens]
        for stage in range(STAGES):
            hidden = (hidden + block(hidden, model[f"up {stage}"], model[f"down {stage}"])).remainder(3)
        tokens = (hidden @ model["head"]).argmax(-1)
    return tokens


def engine() -> torch.Tensor:
    rank = dist.get_rank()
    stage, shard = divmod(rank, SHARDS)
    tensor_groups: list[Any] = [dist.new_group([s * SHARDS, s * SHARDS + 1]) for s in range(STAGES)]
    stage_groups: list[Any] = [dist.new_group([r, r + SHARDS]) for r in range(SHARDS)]
    tp, pp = Communicator(tensor_groups[stage]), Communicator(stage_groups[shard])
    model = weights()
    up = model[f"up {stage}"].chunk(SHARDS, 1)[shard]
    down = model[f"down {stage}"].chunk(SHARDS, 0)[shard]
    head = model["head"].chunk(SHARDS, 1)[shard]
    tokens = torch.arange(REQUESTS)
    for step in range(STEPS):
        if stage == 0:
            hidden = model["embedding"][tokens]
        else:
            received = pp.recv_tensor_dict(0)
            assert received["step"] == step
            hidden = received["hidden"]
        hidden = (hidden + tp.all_reduce(block(hidden, up, down))).remainder(3)
        if stage == 0:
            pp.send_tensor_dict({"hidden": hidden, "step": step}, 1)
        else:
            logits = tp.gather(hidden @ head)  # whole on the first rank of the stage
            if logits is not None:
                tokens = logits.argmax(-1)
            tp.broadcast(tokens)
        pp.broadcast(tokens, 1)
    return tokens


def main() -> None:
    dist.init_process_group("phalanx")
    torch.set_num_threads(1)
    tokens, wanted = engine(), one_process()
    assert torch.equal(tokens, wanted), (tokens, wanted)
    if dist.get_rank() == 0:
        print(f"{REQUESTS} requests, {STEPS} tokens each, as in one process; the last ones: {tokens.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", f"--nproc-per-node={STAGES * SHARDS}", __file__])
