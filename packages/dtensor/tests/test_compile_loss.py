"""The loss of scores whose classes are sharded, in compiled functions: one graph, and the scores are not gathered."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from phalanx.dtensor import Replicate, Shard, distribute_tensor
from phalanx.dtensor.parallel import loss_parallel
from ranks import run_ranks

# (reduction, with weights, label smoothing)
CASES = ("mean", False, 0.0), ("none", False, 0.0), ("sum", True, 0.0), ("mean", True, 0.1)


class Collectives:
    """A backend that keeps, of each collective in its graphs, the number of elements that it takes."""

    def __init__(self, backend):
        self.backend = torch._dynamo.lookup_backend(backend)
        self.sizes = []

    def __call__(self, module, inputs):
        def look(graph_module, example_inputs):
            for node in graph_module.graph.nodes:
                if "all_gather" in str(node.target) or "all_reduce" in str(node.target):
                    self.sizes.append(node.args[0].meta["val"].numel())
            return graph_module.forward

        torch._dynamo.backends.common.aot_autograd(fw_compiler=look, bw_compiler=look)(module, inputs)
        return self.backend(module, inputs)


def data(rows, classes):
    scores = torch.linspace(-3, 4, rows * classes, dtype=torch.float64).reshape(rows, classes).sin() * 4
    target = torch.arange(rows) * 3 % classes
    target[1] = -100
    return scores, target, torch.linspace(0.5, 2, classes, dtype=torch.float64)


def compared(mesh, placements, target_placements, backend, rows=6, classes=7, **options):
    scores, target, weight = data(rows, classes)
    for reduction, weighted, smoothing in CASES:
        given = {"reduction": reduction, "label_smoothing": smoothing}
        torch._dynamo.reset()

        def loss_of(x, target, weight, given=given):
            return functional.cross_entropy(x * 2, target, weight, **given)

        compiled = torch.compile(loss_of, backend=backend, fullgraph=True, **options)
        x, own = scores.clone().requires_grad_(), distribute_tensor(scores, mesh, placements).requires_grad_()
        wanted = loss_of(x, target, weight if weighted else None)
        with loss_parallel():  # around the call: the weight is a plain tensor
            loss = compiled(own, distribute_tensor(target, mesh, target_placements), weight if weighted else None)
        torch.testing.assert_close(loss.full_tensor(), wanted)
        wanted.sin().sum().backward()
        loss.full_tensor().sin().sum().backward()
        assert own.grad.placements == tuple(placements)
        torch.testing.assert_close(own.grad.full_tensor(), x.grad)


def losses(rank, size, backend):
    mesh = init_device_mesh("cpu", (size,))
    compared(mesh, [Shard(1)], [Replicate()], backend)
    if backend == "aot_eager":
        compared(mesh, [Shard(0)], [Shard(0)], backend)


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.thorough),
    ],
)
def test_compiled_losses_are_those_of_one_process(backend, tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(losses, 2, backend, start_torch=True, timeout=500, env=env)


def sizes(rank, size):
    mesh = init_device_mesh("cpu", (size,))

    def loss_of(x, target):
        return functional.cross_entropy(x, target)

    backend = Collectives("aot_eager")
    compiled = torch.compile(loss_of, backend=backend, fullgraph=True)
    for rows in (6, 9, 20):  # the first size alone, then one graph for all
        scores, target, _ = data(rows, 64)
        own = distribute_tensor(scores, mesh, [Shard(1)])
        own.requires_grad_()
        given = distribute_tensor(target, mesh, [Replicate()])
        x = scores.clone().requires_grad_()
        loss = compiled(own, given)
        torch.testing.assert_close(loss.full_tensor(), loss_of(x, target))
        loss.full_tensor().backward()
        loss_of(x, target).backward()
        torch.testing.assert_close(own.grad.full_tensor(), x.grad)
    return [int(torch.fx.experimental.symbolic_shapes.optimization_hint(one, 0)) for one in backend.sizes]


@pytest.mark.slow
def test_scores_are_not_gathered_whatever_the_batch():
    for found in run_ranks(sizes, 2, start_torch=True, timeout=200):
        assert found and max(found) <= 2 * 20, found  # a maximum and a sum for each row; 64 * 20 scores


def out_of_bounds(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    scores, target, _ = data(4, 6)
    compiled = torch.compile(functional.cross_entropy, backend="aot_eager", fullgraph=True)
    own = distribute_tensor(scores, mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="a target is out of bounds: there are 6 classes"):
        compiled(own, distribute_tensor(target + 3, mesh, [Replicate()]))


def test_a_target_that_is_no_class_is_an_error_in_a_compiled_function():
    run_ranks(out_of_bounds, 2, start_torch=True, timeout=120)
