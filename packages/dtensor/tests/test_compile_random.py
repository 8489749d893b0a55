"""Random ops on DTensors in compiled functions: the numbers of eager, of every mesh, and of one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from phalanx.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.dtensor._random import traced
from ranks import run_ranks

SEED = 1234
LAYOUTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def same(one, other):
    """Equal in placements, and close in values: a compiler may round sums otherwise, but never draw otherwise."""
    if isinstance(one, DTensor):
        assert (one.placements, one.shape) == (other.placements, other.shape)
        one, other = one.to_local(), other.to_local()
    torch.testing.assert_close(one, other)


def leaf(mesh, placement, *shape):
    values = torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    return distribute_tensor(values, mesh, [placement]).requires_grad_()


def steps(function, inputs, count=2):
    """Results, gradients and the state of the generator after some calls."""
    torch.manual_seed(SEED)
    found = []
    for _ in range(count):
        given = [one.detach().clone().requires_grad_() for one in inputs]
        results = function(*given)
        sum((one.full_tensor().sin() * 3).sum() for one in results).backward()
        found += [*results, *(one.grad for one in given)]
    return found, torch.get_rng_state()


def check(function, inputs, backend, **options):
    """What a compiled function gives, backward included, is what eager gives; and so is the state it leaves."""
    torch._dynamo.reset()
    wanted, state = steps(function, inputs)
    found, own_state = steps(torch.compile(function, backend=backend, fullgraph=True, **options), inputs)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    assert torch.equal(own_state, state), "not as many keys as in eager"
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach() for one in found]


def block(x, w):
    y = functional.dropout(x, 0.3)
    z = functional.dropout((y @ w).tanh(), 0.5)
    return z, torch.nn.functional.alpha_dropout(y, 0.2, training=True)


def made(x):
    drawn = torch.rand_like(x), torch.randn_like(x), torch.rand_like(x), torch.bernoulli(torch.sigmoid(x.detach()))
    filled = torch.empty_like(x).normal_(1, 2), torch.zeros_like(x).uniform_(-3, 3)
    integers = torch.randint_like(x, 3, 90), torch.randint_like(x, 7)
    others = torch.bernoulli(x.detach(), 0.25), torch.empty_like(x).exponential_(2), torch.normal(x.detach(), 0.5)
    return tuple(x * one for one in (*drawn, *filled, *integers, *others))


def numbers(rank, size, backend):
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for name, placement in LAYOUTS.items():
        x, w = leaf(mesh, placement, 7, 6), leaf(mesh, Replicate(), 6, 5)  # 7: the shards are uneven
        found[name] = check(block, (x, w), backend), check(made, (x,), backend)
    return found


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param("aot_eager", marks=pytest.mark.thorough),
        pytest.param("inductor", marks=pytest.mark.thorough),
    ],
)
def test_compiled_functions_draw_what_eager_draws_on_every_mesh(backend, tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    [expected] = run_ranks(numbers, 1, "aot_eager", start_torch=True, timeout=200)
    for found in run_ranks(numbers, 2, backend, start_torch=True, timeout=500, env=env):
        for layout in LAYOUTS:
            for ours, wanted in zip(found[layout], expected["whole"], strict=True):
                for one, other in zip(ours, wanted, strict=True):
                    torch.testing.assert_close(one, other)
    first, second = expected["whole"][1][0], expected["whole"][1][2]
    assert not torch.equal(first, second)  # two draws are never one


# ---- what compilers do to them --------------------------------------------------------------------------------------


def twice_in_blocks(x, w):
    def inner(x):
        return functional.dropout((functional.dropout(x, 0.4) @ w).sin(), 0.5)

    return (checkpoint(inner, checkpoint(inner, x, use_reentrant=False), use_reentrant=False),)


def unused(x):
    torch.rand_like(x)
    y = x * torch.rand_like(x)
    return (y.clone().normal_() + torch.rand_like(y) * y,)


def chosen(x):
    weights = x.detach().softmax(1)
    return x.sum() * 1.0, torch.multinomial(weights, 3), torch.multinomial(weights, 4, replacement=True)


def attention(q, k):
    return (functional.scaled_dot_product_attention(q, k, k, dropout_p=0.3),)


def compilers(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    rows, columns = Shard(0), Shard(1)
    x, w = leaf(mesh, rows, 6, 4), leaf(mesh, Replicate(), 4, 4)
    for backend in ("aot_eager", "inductor"):
        check(twice_in_blocks, (x, w), backend)
        check(unused, (x,), backend)
    for budget in (0.1, 0.5):  # backward computes again what it can
        with torch._functorch.config.patch(activation_memory_budget=budget):
            check(block, (x, w), "aot_eager")
    check(attention, (leaf(mesh, columns, 2, 4, 6, 2), leaf(mesh, columns, 2, 4, 6, 2)), "aot_eager")
    result = torch.compile(lambda x: chosen(x)[1:], backend="aot_eager", fullgraph=True)
    for placement in (rows, columns):
        own = leaf(mesh, placement, 5, 6)
        torch.manual_seed(SEED)
        wanted = chosen(own)[1:]
        torch.manual_seed(SEED)
        for one, other in zip(result(own), wanted, strict=True):
            same(one, other)
    # Sums of terms that are random: the value on the first rank, nothing on the others.
    term = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
    torch.manual_seed(SEED)
    wanted = term.clone().normal_()
    torch.manual_seed(SEED)
    same(torch.compile(lambda x: x.clone().normal_(), backend="aot_eager", fullgraph=True)(term), wanted)


@pytest.mark.thorough
def test_keys_are_neither_merged_nor_drawn_again(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(compilers, 2, start_torch=True, timeout=400, env=env)


def sizes(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    w = leaf(mesh, Replicate(), 6, 5)
    for length in (4, 6, 10):
        inputs = leaf(mesh, Shard(0), length, 6), w
        wanted, state = steps(block, inputs)
        found, own_state = steps(compiled, inputs)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
        assert torch.equal(own_state, state)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_one_graph_draws_for_several_sizes():
    run_ranks(sizes, 2, start_torch=True, timeout=200)


# ---- ranks, and what cannot be --------------------------------------------------------------------------------------


def seeded_apart(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    compiled = torch.compile(torch.rand_like, backend="aot_eager", fullgraph=True)
    torch.manual_seed(rank + 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compiled(x).full_tensor()
    return result, sum("random state" in str(one.message) for one in caught)


def test_ranks_that_were_seeded_apart_agree_when_the_graph_first_draws():
    (first, quiet), (second, warned) = run_ranks(seeded_apart, 2, start_torch=True, timeout=120)
    assert torch.equal(first, second)
    assert (quiet, warned) == (0, 1)


def refusals(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    with pytest.raises(Exception, match="cannot draw these numbers"):
        torch.compile(torch.poisson, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(Exception, match="std >= 0"):
        torch.compile(lambda x: x.clone().normal_(0, -1), backend="aot_eager", fullgraph=True)(x)
    dist.barrier()


def test_what_a_compiled_function_cannot_draw_it_refuses():
    run_ranks(refusals, 1, start_torch=True, timeout=120)


def test_the_ops_do_what_their_fakes_say():
    ops = torch.ops.phalanx_dtensor
    assert traced.key is not None
    torch.manual_seed(SEED)
    key = ops.random_key(None, [], "cpu")
    assert key.dtype == torch.int64 and not torch.equal(ops.random_key(key, [], "cpu"), key)
    # Rows 2 to 4, and 6, of an [8, 3] tensor.
    arguments = (key, [8, 3], [2, 6, 0], [3, 1, 3], [2, 1], [3, 1], 2, 0.0, 1.0, torch.float32, torch.device("cpu"))
    whole = ops.random_values(key, [8, 3], [0, 0], [8, 3], [1, 1], [3, 1], *arguments[6:])
    assert torch.equal(ops.random_values(*arguments), whole[[2, 3, 4, 6]])
    checks = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(ops.random_values.default, arguments, test_utils=checks)
    torch.library.opcheck(ops.random_key.default, (key, [], "cpu"), test_utils=checks[:2])
