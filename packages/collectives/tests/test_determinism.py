"""What the bits of a reduction depend on, and what they do not: the claims of docs/explanation/determinism.md."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import join, needs_ucx, run_groups

SIZE = 3
COUNT = 70_000  # float32: several chunks of the pipeline, and an odd rest
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@functools.cache
def parts(dtype, size=SIZE, count=COUNT):
    """The input of each rank: numbers of very different magnitudes, so that every other order rounds otherwise."""
    made = []
    for rank in range(size):
        numbers = np.random.default_rng(rank)
        values = numbers.standard_normal(count) * 10.0 ** numbers.uniform(-3, 3, count)
        made.append(torch.from_numpy(values.astype(np.float32)).to(dtype))
    return made


def in_order(tensors):
    """The sum in the order of the list: small floats in float32, and rounded once."""
    total = tensors[0].float()
    for each in tensors[1:]:
        total = total + each.float()
    return total.to(tensors[0].dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(tensor, expected):
    return torch.equal(bits(tensor.flatten()), bits(expected.flatten()))


def each_dtype(rank, size, claim):
    join(rank, size)
    check = next(each for each in CLAIMS if each.__name__ == claim)
    for dtype in DTYPES:
        check(parts(dtype)[rank], in_order(parts(dtype)), rank)
    dist.destroy_process_group()


def summed(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def of_each_length(x, expected, rank):
    for count in (1, 2, 7, 64, 255, 1000, 4096, 16385, COUNT):
        assert same(summed(x[:count]), expected[:count]), count


def in_pieces(x, expected, rank):
    for pieces in (2, 3, 17):
        split = torch.cat([summed(piece) for piece in x.chunk(pieces)])
        assert same(split, expected), pieces
    row = summed(x[:4096].reshape(8, 512))  # a batch, and each of its rows alone
    assert all(same(summed(x[512 * i : 512 * (i + 1)]), row[i]) for i in range(8))


def at_each_offset(x, expected, rank):
    for offset in range(1, 9):
        assert same(summed(x[offset : 5000 + offset]), expected[offset : 5000 + offset]), offset


def by_each_algorithm(x, expected, rank):
    group = pc.core_group(dist.group.WORLD)
    for algo in ("auto", "one_shot", "two_shot"):
        y = x.clone()
        group.all_reduce(y.data_ptr(), y.data_ptr(), y.numel(), str(y.dtype).removeprefix("torch."), algo=algo)
        assert same(y, expected), algo


def in_each_form(x, expected, rank):
    group = dist.group.WORLD
    assert same(summed(x), expected)
    works = [dist.all_reduce(y := x.clone(), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    assert same(y, expected)
    assert same(pc.all_reduce(x, "sum", group), expected)
    assert same(torch.ops.phalanx.blocking_all_reduce(x, "sum", group.group_name), expected)
    pc.all_reduce_(z := x.clone(), "sum", group)
    assert same(z, expected)
    for one, other in zip(
        pc.all_reduce_coalesced([x[:100], x[100:]], "sum", group), expected.split([100, COUNT - 100]), strict=True
    ):
        assert same(one, other)
    if rank == 0:
        dist.reduce(w := x.clone(), 0)
        assert same(w, expected)
    else:
        dist.reduce(x.clone(), 0)
    even = x[: COUNT // SIZE * SIZE]
    scattered = pc.reduce_scatter_tensor(even, "sum", 0, group)
    gathered = pc.all_gather_tensor(scattered, 0, group)
    assert same(gathered, expected[: even.numel()])


def with_each_number_of_threads(x, expected, rank):
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert same(summed(x), expected), threads


def again_and_again(x, expected, rank):
    for _ in range(20):
        assert same(summed(x), expected)


CLAIMS = [
    of_each_length,
    in_pieces,
    at_each_offset,
    by_each_algorithm,
    in_each_form,
    with_each_number_of_threads,
    again_and_again,
]


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_a_sum_has_the_same_bits(claim):
    run_groups(each_dtype, SIZE, claim)


def sum_of(rank, size, count):
    join(rank, size)
    mine = in_order([each[:count] for each in parts(torch.float32, 4)[rank::size]])
    total = summed(mine)
    dist.destroy_process_group()
    return total


def test_another_number_of_ranks_sums_in_another_order():
    four = run_groups(sum_of, 4, 5000)
    two = run_groups(sum_of, 2, 5000)
    assert all(same(each, four[0]) for each in four)
    assert all(same(each, two[0]) for each in two)
    assert not same(four[0], two[0])


def on_hosts(rank, size, hosts):
    join(rank, size)
    own = parts(torch.float32, 4)
    total = summed(own[rank])
    groups = [in_order([own[each] for each in range(size) if hosts[each] == host]) for host in dict.fromkeys(hosts)]
    assert same(total, in_order(groups))
    dist.destroy_process_group()
    return total


def test_sums_of_several_hosts_are_grouped_by_host():
    needs_ucx()
    results = []
    for hosts in ([7, 7, 8, 8], [7, 7, 7, 8]):
        environments = [{"PHALANX_HOST_ID": str(host)} for host in hosts]
        results.append(run_groups(on_hosts, 4, hosts, env=environments)[0])
    assert not same(*results)
