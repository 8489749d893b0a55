"""Rules of the user's own: as a text, and as a function that lists shardings."""

import warnings

import pytest
import torch
import torch.distributed as dist

from phalanx.dtensor import DTensor, Partial, Replicate, Shard, SizedShard, StrictError, distribute_tensor, strict
from phalanx.dtensor._rules.parser import RuleError
from phalanx.dtensor.experimental import register_sharding
from ranks import run_ranks


def custom_op(name, function):
    op = torch.library.custom_op(f"phalanx_test::{name}", function, mutates_args=())
    op.register_fake(function)
    return getattr(torch.ops.phalanx_test, name).default


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def soft(x: torch.Tensor, dim: int, scale: float = 1.0) -> torch.Tensor:
    return (x * scale).softmax(dim)


def pair(x: torch.Tensor, others: list[torch.Tensor], *, factor: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    return x * factor, others[0] + others[1]


def close(ours, theirs):
    torch.testing.assert_close(ours.full_tensor(), theirs)


def rules(rank, world_size):
    warnings.simplefilter("error")
    mesh = dist.init_device_mesh("cpu", (world_size,))
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    multiply, softmax, pairs = custom_op("product", product), custom_op("soft", soft), custom_op("pair", pair)
    cut = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    # Without a rule the fallback says so; from the call on, the rule counts.
    with pytest.warns(UserWarning, match="register_sharding"):
        assert multiply(*cut).placements == (Replicate(),)
    register_sharding(multiply, "m k, k n -> m n ; k:sum")
    with strict():
        found = multiply(*cut)
    assert found.placements == (Partial(),)
    close(found, a @ b)
    rows = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    with strict():
        assert multiply(*rows).placements == (Shard(0),)  # 5 rows on 2 ranks: uneven
    close(multiply(*rows), a @ b)

    seen = []

    @register_sharding(softmax)
    def shardings(x, dim, scale=1.0):
        seen.append((x.shape, x.ndim, x.dtype, dim, scale))
        whole = ([Replicate()], [Replicate(), None, None])
        return [whole, *(([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != dim % x.ndim)]

    x = torch.randn(4, 6)
    with strict():
        found = softmax(distribute_tensor(x, mesh, [Shard(0)]), -1)
        assert found.placements == (Shard(0),)
        close(found, x.softmax(-1))
        assert softmax(distribute_tensor(x, mesh, [Shard(1)]), 0, 3.0).placements == (Shard(1),)
    assert seen == [((4, 6), 2, torch.float32, -1, 1.0), ((4, 6), 2, torch.float32, 0, 3.0)]
    with pytest.raises(StrictError), strict():
        softmax(distribute_tensor(x, mesh, [Shard(1)]), -1)
    close(softmax(distribute_tensor(x, mesh, [Shard(1)]), -1), x.softmax(-1))
    # What is not cut into equal parts is not cut; nor is an op of which nothing is listed.
    for odd, placements in ((torch.randn(5, 6), [Shard(0)]), (torch.randn(4, 6), [SizedShard(0, (1, 3))])):
        close(softmax(distribute_tensor(odd, mesh, placements), -1), odd.softmax(-1))

    @register_sharding([pairs])
    def of_pairs(x, others, *, factor=2.0):
        if factor == 5.0:
            return "a, b, b -> a, b ; a:same ; b:same"
        return [([Shard(0), Replicate()], [Shard(0), Replicate(), Replicate(), None])]

    y, z = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), distribute_tensor(torch.ones(3), mesh, [Replicate()])
    with strict():
        first, second = pairs(y, [z, z])
        assert first.placements == (Shard(0),) and second.placements == (Replicate(),)
        close(first, torch.full((4,), 2.0))
        first, second = pairs(y, [z, z], factor=5.0)
        close(first, torch.full((4,), 5.0))

    @register_sharding(softmax)
    def nothing(*args):
        return []

    close(softmax(distribute_tensor(x, mesh, [Shard(0)]), -1), x.softmax(-1))
    # In the place of a rule that is there.
    register_sharding(torch.ops.aten.hardswish.default, "... -> ... ; lin 0")  # wrong, to see that it counts
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with strict():
        assert torch.nn.functional.hardswish(part).placements == (Partial(),)
    errors(mesh, multiply, softmax)


def errors(mesh, multiply, softmax):
    with pytest.raises(TypeError, match="op must be an OpOverload, not OpOverloadPacket: write torch.ops"):
        register_sharding(torch.ops.aten.relu, "... -> ...")
    with pytest.raises(RuleError, match=r"(?s)lacks '->'.*at column \d+:.*\^"):
        register_sharding(multiply, "m k, k n")
    with pytest.raises(RuleError, match="by unknown reduce op 'plus'; expected one of sum"):
        register_sharding(multiply, "m k, k n -> m n ; k:plus")
    with pytest.raises(ValueError, match="has 2 tensors after '->', and phalanx_test.product.default returns 1"):
        register_sharding(multiply, "m k, k n -> m, n ; k:sum")
    with pytest.raises(ValueError, match="has 1 tensors before '->', and phalanx_test.product.default takes 2"):
        register_sharding(multiply, "m k -> m k")
    with pytest.raises(ValueError, match="'size 7' in the rule.*has arguments 0 to 1"):
        register_sharding(multiply, "m k, k n -> m n ; k:sum ; size 7")
    with pytest.raises(ValueError, match="has a handler of its own in this package"):
        register_sharding(torch.ops.aten.equal.default, "..., ... -> ")
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    whole = [Replicate(), None, None]
    for entry, text in (
        ([Replicate()], "entry 0 of the list for phalanx_test.soft.default must be a pair"),
        (([Replicate()] * 2, whole), "placements for 2 outputs, and the op returns 1"),
        (([Replicate()], [None, None]), "argument 0 is a tensor, and has no placement"),
        (([Replicate()], [Replicate(), Replicate()]), r"argument 1 is not a tensor, and has Replicate\(\)"),
        (([Replicate()], [*whole, None]), "placements for 4 arguments, and the call has 3"),
        (([Replicate()], ["x", None]), "has 'x', which is not a placement"),
        (([Replicate()], [SizedShard(0, (1, 3)), None]), "which a rule cannot have"),
        (
            ([Shard(5)], [Shard(5), None]),
            r"argument 0 has 2 dims, and Shard\(dim=5\) splits a dim that it does not have",
        ),
    ):
        register_sharding(softmax)(lambda *args, entry=entry: [entry])
        with pytest.raises(ValueError, match=text):
            softmax(x, -1)


def test_rules_of_the_user_count_from_the_next_call_on():
    run_ranks(rules, 2, start_torch=True)
