"""Random numbers that do not depend on the mesh: fills by coordinate in one process, and ops among real ranks. D10"""

import itertools
import math
import warnings

import pytest
import torch

from phalanx.core.random import Kind
from phalanx.dtensor import (
    AbstractMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SizedShard,
    StridedShard,
    _factories,
    distribute_tensor,
)
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._random.fill import Distribution, fill_local
from phalanx.dtensor._random.state import draw_key, is_rng_supported_mesh, manual_seed
from ranks import run_ranks

SHAPE = (7, 5, 4)
KEY = 0xFEDCBA9876543210
NORMAL = Distribution(Kind.NORMAL, 0.0, 1.0)
UNIFORM = Distribution(Kind.UNIFORM, 0.0, 1.0)


def whole(distribution: Distribution, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    spec = DTensorSpec(AbstractMesh((1,)), (Replicate(),), shape, None, dtype)
    made = torch.empty(shape, dtype=dtype)
    fill_local(made, spec, distribution, KEY)
    return made


def assembled(mesh_shape, placements, distribution, dtype, stride=None) -> torch.Tensor:
    """The whole tensor, from what the rank at each coordinate makes; what several make must be the same."""
    found = torch.full(SHAPE, 77, dtype=torch.float64)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        spec = DTensorSpec(AbstractMesh(mesh_shape, coordinate), placements, SHAPE, stride, dtype)
        local = torch.empty_strided(spec.local_shape, spec.local_stride, dtype=dtype)
        fill_local(local, spec, distribution, KEY)
        index = [[at for start, length in runs for at in range(start, start + length)] for runs in spec.local_runs]
        place = torch.meshgrid(*map(torch.tensor, index), indexing="ij") if local.numel() else None
        if place is not None:
            before = found[place]
            assert bool(((before == 77) | (before == local.double())).all())
            found[place] = local.double()
    assert not bool((found == 77).any())
    return found


KINDS = [Shard(0), Shard(1), Shard(2), StridedShard(0, 2), StridedShard(1, 3), Replicate(), Partial()]


@pytest.mark.parametrize(
    ("distribution", "dtype"),
    [
        (NORMAL, torch.float32),
        (UNIFORM, torch.float64),
        (NORMAL, torch.bfloat16),
        (Distribution(None, -5, 11), torch.int64),
    ],
)
def test_every_mesh_and_placement_gives_the_same_tensor(distribution, dtype):
    expected = whole(distribution, dtype).double()
    assert expected.unique().numel() > (8 if dtype == torch.int64 else 100)
    for size in (1, 2, 3, 4):
        for placement in KINDS:
            assert torch.equal(assembled((size,), (placement,), distribution, dtype), expected)
    for placements in itertools.product(KINDS, repeat=2):
        assert torch.equal(assembled((2, 2), placements, distribution, dtype), expected)
    assert torch.equal(assembled((3,), (SizedShard(0, (5, 0, 2)),), distribution, dtype), expected)
    # The order in memory does not matter either.
    assert torch.equal(assembled((3,), (Shard(1),), distribution, dtype, stride=(1, 7, 35)), expected)


def test_complex_numbers_do_not_depend_on_placements_and_have_variance_one():
    spec = DTensorSpec(AbstractMesh((1,)), (Replicate(),), (20000,), None, torch.complex64)
    all_of_it = torch.empty(20000, dtype=torch.complex64)
    fill_local(all_of_it, spec, NORMAL, KEY)
    half = DTensorSpec(AbstractMesh((2,), (1,)), (Shard(0),), (20000,), None, torch.complex64)
    part = torch.empty(10000, dtype=torch.complex64)
    fill_local(part, half, NORMAL, KEY)
    assert torch.equal(part, all_of_it[10000:])
    assert abs(float((all_of_it.abs() ** 2).mean()) - 1) < 0.05


def ks_distance(values: torch.Tensor, cdf) -> float:
    ordered = values.double().sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return float((steps - cdf(ordered)).abs().max())


def test_a_million_elements_are_distributed_as_they_should_be():
    count = 1_000_000
    limit = 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov: exceeded by one sample in a thousand
    uniform = whole(UNIFORM, torch.float32, (1000, 1000)).flatten()
    normal = whole(NORMAL, torch.float32, (1000, 1000)).flatten()
    assert ks_distance(uniform, lambda x: x) < limit
    assert ks_distance(normal, lambda x: torch.special.ndtr(x)) < limit
    assert abs(float(uniform.double().mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)
    assert abs(float(normal.double().mean())) < 5 / math.sqrt(count)
    assert abs(float(normal.double().var()) - 1) < 5 * math.sqrt(2 / count)
    for distribution, cdf in (
        (Distribution(Kind.EXPONENTIAL, 2.0, 0.0), lambda x: 1 - torch.exp(-2 * x)),
        (Distribution(Kind.CAUCHY, 1.0, 3.0), lambda x: 0.5 + torch.atan((x - 1) / 3) / math.pi),
        (Distribution(Kind.LOG_NORMAL, 0.5, 2.0), lambda x: torch.special.ndtr((x.log() - 0.5) / 2)),
    ):
        assert ks_distance(whole(distribution, torch.float32, (count,)), cdf) < limit
    # Neighbours, in pairs of which Box and Muller make two at once, do not depend on each other.
    for lag in (1, 2, 3, 4):
        assert abs(float((normal[:-lag].double() * normal[lag:].double()).mean())) < 5 / math.sqrt(count)


def test_keys_follow_the_default_generator():
    mesh = AbstractMesh((4,))
    torch.manual_seed(5)
    first = [draw_key(mesh) for _ in range(3)]
    assert len(set(first)) == 3 and max(first) < 1 << 64
    torch.manual_seed(5)
    assert draw_key(mesh) == first[0]
    with torch.random.fork_rng():
        draw_key(mesh)
    state = torch.get_rng_state()
    assert draw_key(mesh) == first[1]
    torch.set_rng_state(state)
    assert draw_key(mesh) == first[1]
    own = torch.Generator().manual_seed(9)
    assert draw_key(mesh, own) == draw_key(mesh, torch.Generator().manual_seed(9))


def test_a_seed_decides_what_is_drawn_on_a_mesh():
    mesh = AbstractMesh((2,), (1,))
    manual_seed(11, mesh)
    first = draw_key(mesh)
    manual_seed(11, mesh)
    assert draw_key(mesh) == first
    assert is_rng_supported_mesh(mesh)
    with pytest.raises(RuntimeError, match="not part of the mesh"):
        manual_seed(1, AbstractMesh((2,), None))


# ---- ops among ranks ------------------------------------------------------------------------------------------------


def _draws(mesh, placements, others):
    """One of everything, as whole tensors."""

    def new(dtype=torch.float32):
        return distribute_tensor(torch.zeros(6, 5, dtype=dtype), mesh, placements)

    def p(values):
        return distribute_tensor(values, mesh, others)

    torch.manual_seed(21)
    chances = torch.linspace(0, 1, 30).reshape(6, 5)
    made = [
        new().normal_(1, 2), new().uniform_(-1, 1), new(torch.int64).random_(), new(torch.int32).random_(-3, 9),
        new().random_(10), new(torch.bool).random_(), new().bernoulli_(0.4), new().bernoulli_(p(chances)),
        new().exponential_(2), new().cauchy_(), new().log_normal_(), new(torch.int64).geometric_(0.2),
        torch.bernoulli(p(chances)), torch.rand_like(new()), torch.randn_like(new(), dtype=torch.float64),
        torch.randint_like(new(), 3, 9), torch.randint_like(new(torch.int64), 7),
        torch.normal(p(chances), 0.5), torch.normal(0.0, p(chances)), torch.normal(p(chances), p(chances)),
        torch.poisson(p(chances * 9)), torch.binomial(p(chances.round() * 9), p(chances)),
        torch.multinomial(p(chances), 3), torch.multinomial(p(chances + 0.1), 8, replacement=True),
        *torch.native_dropout(p(chances + 1), 0.5, True),
        torch.nn.functional.dropout(p(chances + 1), 0.5),
        torch.nn.functional.rrelu(p(chances - 0.5), training=True),
        torch.nn.init.kaiming_uniform_(new()), torch.nn.init.trunc_normal_(new()),
        _factories.rand(6, 5, device_mesh=mesh, placements=placements),
        _factories.randn((6, 5), device_mesh=mesh, placements=placements),
    ]  # fmt: skip
    return [one.full_tensor() for one in made] + [torch.rand(())]


def _everything(rank, world_size):
    warnings.simplefilter("ignore")
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    results = [
        _draws(mesh, [placement], [other])
        for placement, other in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate()))
    ]
    if world_size == 4:
        square = torch.distributed.init_device_mesh("cpu", (2, 2))
        results.append(_draws(square, [Shard(0), Shard(1)], [Shard(1), Replicate()]))
        results.append(_draws(square, [Shard(0), Shard(0)], [Replicate(), Shard(0)]))
    return results


def test_every_op_gives_the_same_tensor_on_1_to_4_ranks_and_2x2():  # D10
    expected = run_ranks(_everything, 1, start_torch=True)[0][0]
    for size in (1, 2, 3, 4):
        for of_rank in run_ranks(_everything, size, start_torch=True, timeout=120):
            for results in of_rank:
                assert len(results) == len(expected)
                for index, (one, other) in enumerate(zip(results, expected, strict=True)):
                    assert torch.equal(one, other), (size, index)


def _dropout(rank, world_size):
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(1)
    x = distribute_tensor(torch.ones(64, 32), mesh, [Shard(0)]).requires_grad_()
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    partial = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()], run_check=False)
    dropped = torch.nn.functional.dropout(partial, 0.5).full_tensor()
    filled = DTensor.from_local(torch.zeros(8, 8), mesh, [Partial()], run_check=False).normal_()
    again = torch.randn_like(filled)
    return (
        y.to_local().detach(),
        y.full_tensor().detach(),
        x.grad.full_tensor(),
        dropped,
        filled.full_tensor(),
        again.to_local(),
    )


def test_dropout_masks_differ_between_shards_and_are_those_of_one_process():
    [(_, expected, _, _, filled, _)] = run_ranks(_dropout, 1, start_torch=True)
    first, second = run_ranks(_dropout, 2, start_torch=True)
    assert not torch.equal(first[0], second[0])
    for _, full, grad, dropped, normal, again in (first, second):
        assert torch.equal(full, expected)
        assert torch.equal(grad, expected)  # the mask, scaled, as x is all ones
        assert set(dropped.flatten().tolist()) == {0.0, 4.0}
        assert torch.equal(normal, filled)
        assert torch.equal(again, first[5])
    assert 0.7 < float((expected != 0).float().mean()) < 0.8
    assert set(expected.unique().tolist()) == {0.0, 1 / 0.75} or float(expected.max()) == pytest.approx(4 / 3)


def _seeded_apart(rank, world_size):
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(rank + 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = _factories.rand(8, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    seen = [str(one.message) for one in caught if "random state" in str(one.message)]
    manual_seed(7, mesh)
    second = _factories.rand(8, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    with pytest.raises(RuntimeError, match="std >= 0"):
        torch.zeros(2) + distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).normal_(0, -1)
    with pytest.raises(RuntimeError, match="less than"):
        distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).random_(3, 3)
    with pytest.raises(RuntimeError, match="redistribute it to Replicate"):
        DTensor.from_local(torch.zeros(4), mesh, [Partial("avg")], run_check=False).uniform_()
    with pytest.raises(RuntimeError, match="probabilities"):
        torch.multinomial(distribute_tensor(torch.tensor([1.0, -1.0, 1.0]), mesh, [Shard(0)]), 1)
    return first, len(seen), second


def test_ranks_that_were_seeded_apart_agree_on_the_first_ranks_state_and_say_so():
    (first, quiet, second), (other, warned, other_second) = run_ranks(_seeded_apart, 2, start_torch=True)
    assert torch.equal(first, other) and torch.equal(second, other_second)
    assert (quiet, warned) == (0, 1)
