import torch
import torch.distributed as dist

import phalanx.collectives as pc

dist.init_process_group("phalanx")
x = torch.full((4,), dist.get_rank() + 1.0, requires_grad=True)
y = pc.all_reduce(x, "sum", dist.group.WORLD)
(y * y).sum().backward()
print(f"rank {dist.get_rank()}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")
dist.destroy_process_group()
