"""Lower a graph to Phalanx from a compiler of your own: a pass over FX, of which two ranks run the result.

The pass finds `mm -> all_reduce -> wait_tensor` and makes the product write into symmetric memory, from where the ranks
reduce it: nothing is copied, and nothing is left pending.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import phalanx.collectives as pc

PHALANX, ORDERED = torch.ops.phalanx, torch.ops.phalanx_ordered


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    assert dist.group.WORLD is not None
    return bias + pc.all_reduce(x @ weight, "sum", dist.group.WORLD)


# [pass]
def lower(module: GraphModule) -> None:
    """Make every sum of a product read an arena: symmetric memory at the same address in every call."""
    graph = module.graph
    sums = [node for node in graph.nodes if node.target == PHALANX.all_reduce.default and is_product(node.args[0])]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for group in dict.fromkeys(node.args[2] for node in sums):
        plan, offsets, nbytes = "", {}, 0
        for node in [node for node in sums if node.args[2] == group]:
            value = node.args[0].meta["val"]
            plan += f"|{node.args[1]} {list(value.shape)} {value.dtype} at {nbytes}"
            offsets[node] = nbytes
            nbytes += -(-value.nbytes // 64) * 64
        # The name of a plan has a hash of it: equal graphs share an arena. Ranks compare plans when the arena is made.
        plan = f"lower_fx {hashlib.sha256(plan.encode()).hexdigest()[:16]}{plan}"
        with graph.inserting_before(first):
            arena = graph.call_function(PHALANX.symm_arena.default, (nbytes, plan, group))
        for node, offset in offsets.items():
            product = node.args[0]
            value = product.meta["val"]
            with graph.inserting_before(product):
                view = graph.call_function(PHALANX.arena_view.default, (arena, offset, list(value.shape), value.dtype))
                graph.call_function(PHALANX.mm_into_.default, (view, *product.args))
            with graph.inserting_before(node):  # complete on return, and after every earlier call that has this arena
                total = graph.call_function(ORDERED.all_reduce.default, (view, *node.args[1:], arena))
            for user in list(node.users):
                if user.target == PHALANX.wait_tensor.default:
                    user.replace_all_uses_with(total)
                    graph.erase_node(user)
            node.replace_all_uses_with(total)
            graph.erase_node(node)
            graph.erase_node(product)
    graph.lint()
    module.recompile()


def is_product(node: Node) -> bool:
    """Whether a node is a product that only one node reads."""
    return node.target == torch.ops.aten.mm.default and len(node.users) == 1


# [pass end]


def main() -> None:
    dist.init_process_group("phalanx")
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(64, 128), torch.randn(128, 256), torch.zeros(64, 256)
    module = make_fx(layer, tracing_mode="fake")(*inputs)
    before = str(module.graph)
    lower(module)
    for _ in range(3):  # the arena is made in the first call, which is collective, and found in the others
        x, *others = torch.randn(64, 128), *inputs[1:]
        torch.testing.assert_close(module(x, *others), layer(x, *others))
    if dist.get_rank() == 0:
        print(before, module.graph, sep="\n\n")
        core_group = pc.core_group(dist.group.WORLD)
        assert core_group is not None
        print(f"calls that copied nothing: {core_group.zero_copies}")
        assert core_group.zero_copies == 3
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
