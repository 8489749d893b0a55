"""Context parallelism: causal attention over a sequence of which each rank has a part, as on one process."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.nn.functional import scaled_dot_product_attention

from phalanx.dtensor.experimental import context_parallel, context_parallel_unshard

HEADS, WIDTH, LENGTH = 4, 32, 48


# [model]
def attend(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One causal self-attention. Nothing in it knows of ranks."""
    batch, length, _ = x.shape
    q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in (x @ weight).chunk(3, -1))
    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, length, WIDTH)


# [model end]


def main() -> None:
    dist.init_process_group("phalanx")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)  # the same numbers on every rank
    x, weight = torch.randn(2, LENGTH, WIDTH), torch.randn(WIDTH, 3 * WIDTH).div_(WIDTH**0.5).requires_grad_()
    expected = attend(x, weight)  # on one process
    (whole_gradient,) = torch.autograd.grad(expected.square().sum(), weight)
    # [context]
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        y = attend(x, weight)  # x is this rank's part here
        y.square().sum().backward()  # this rank's share of the loss
    assert weight.grad is not None
    dist.all_reduce(weight.grad)  # a parameter has a gradient from every part
    (whole,) = context_parallel_unshard(mesh, [y.detach()], [1])  # in the order of the sequence
    # [context end]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad, whole_gradient, rtol=1e-4, atol=1e-3)
    print(f"rank {dist.get_rank()}: {y.shape[1]} of {LENGTH} elements; output and gradient as on one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
