"""What the bits of a reduction depend on, and what they do not: the claims of docs/explanation/determinism.md."""

import ctypes
import functools
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import join, needs_ucx, run_groups
from phalanx.collectives import c10d
from phalanx.core import InvalidArgumentError

SIZE = 3
COUNT = 70_000  # float32: several chunks of the pipeline, and an odd rest
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@functools.cache
def parts(dtype, size=SIZE, count=COUNT):
    """The input of each rank: numbers of very different magnitudes, so that every other order rounds otherwise.

    Half of them are taken away again by the second next rank, so that what was rounded shows in floats of 16 bits too.
    """
    made = []
    for rank in range(size):
        numbers = np.random.default_rng(rank)
        values = numbers.standard_normal(count) * 10.0 ** numbers.uniform(-5, 4, count)
        made.append(torch.from_numpy(values.astype(np.float32)).to(dtype))
        if rank >= 2:
            made[rank][::2] = -made[rank - 2][::2]
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
        expected = in_order(parts(dtype))
        assert not same(in_order(parts(dtype)[::-1]), expected)  # so another order would show
        check(parts(dtype)[rank], expected, rank)
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
    group, room = pc.core_group(dist.group.WORLD), x.new_empty(2, 5008)
    dtype = str(x.dtype).removeprefix("torch.")
    for offset in range(9):
        y = room[0, offset : 5000 + offset]
        y.copy_(x[:5000])
        dist.all_reduce(y)
        assert same(y, expected[:5000]), offset
        y.copy_(x[:5000])
        z = room[1, 8 - offset : 5008 - offset]  # the input and the result have other alignments
        group.all_reduce(y.data_ptr(), z.data_ptr(), 5000, dtype)
        assert same(z, expected[:5000]), offset


def by_each_algorithm(x, expected, rank):
    group = pc.core_group(dist.group.WORLD)
    for algo in ("auto", "one_shot", "two_shot"):
        for count in (10, 2000, COUNT):
            y = x[:count].clone()
            group.all_reduce(y.data_ptr(), y.data_ptr(), count, str(y.dtype).removeprefix("torch."), algo=algo)
            assert same(y, expected[:count]), (algo, count)
    block = group.world.alloc(x.numel() * x.element_size())
    symm, address = group.rendezvous(block), block.address
    for algo in ("auto", "one_shot", "two_shot"):  # on symmetric memory, where others read the input
        for in_place in (False, True):
            ctypes.memmove(address, x.data_ptr(), x.numel() * x.element_size())
            y = torch.empty_like(x)
            dtype, out = str(x.dtype).removeprefix("torch."), None if in_place else y.data_ptr()
            symm.all_reduce(0, out, count=x.numel(), dtype=dtype, algo=algo)
            if in_place:
                ctypes.memmove(y.data_ptr(), address, x.numel() * x.element_size())
            assert same(y, expected), (algo, in_place)


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
    group, dtype = pc.core_group(dist.group.WORLD), str(x.dtype).removeprefix("torch.")

    def in_channel(channel):
        y = torch.empty_like(x)
        group.all_reduce(x.data_ptr(), y.data_ptr(), x.numel(), dtype, channel=channel)
        return y

    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert same(summed(x), expected), threads
        with ThreadPoolExecutor(threads) as pool:  # all in a collective at the same time
            assert all(same(y, expected) for y in pool.map(in_channel, range(threads))), threads


def again_and_again(x, expected, rank):
    for turn in range(20):
        if (turn + rank) % SIZE == 0:
            time.sleep(0.002)  # another rank comes last each time
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


# ---- in the order of the ranks on several hosts too

ONE_HOST = (7, 7, 7, 7)
LAYOUTS = {"2 and 2": (7, 7, 8, 8), "1 and 3": (7, 8, 8, 8), "3 and 1": (7, 7, 7, 8), "interleaved": (7, 8, 7, 8)}
COUNTS = [1, 7, 1001, 300_000]  # of float32 up to more than 1 MiB
DTYPES_OF_SUMS = [*DTYPES, torch.float64, torch.complex64, torch.int32]


def ops_of(dtype):
    if dtype == torch.float32:
        return [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX]
    return [dist.ReduceOp.SUM, dist.ReduceOp.AVG] if dtype != torch.int32 else [dist.ReduceOp.SUM]


def reductions(x, group, op, rank):
    """What each collective that reduces leaves on this rank, by its name."""
    n, count = SIZE + 1, x.numel()
    dist.all_reduce(summed := x.clone(), op, group)
    yield "all_reduce", summed
    dist.reduce(reduced := x.clone(), 2, op, group)
    if rank == 2:
        yield "reduce", reduced
    work = dist.all_reduce(started := x.clone(), op, group, async_op=True)
    work.wait()
    yield "all_reduce that was started", started
    with dist._coalescing_manager(group=group):
        dist.all_reduce(first := x[: count // 2].clone(), op, group)
        dist.all_reduce(second := x[count // 2 :].clone(), op, group)
    yield "coalesced", torch.cat([first, second])
    each = count // n
    if each:
        dist.reduce_scatter_tensor(part := x.new_empty(each), x[: n * each].contiguous(), op, group)
        yield "reduce_scatter_tensor", part
    uneven = list(x.split([count // 5, 2 * (count // 5), 0, count - 3 * (count // 5)]))
    dist.reduce_scatter(own := torch.empty_like(uneven[rank]), uneven, op, group)
    yield "reduce_scatter", own


def core_reductions(x, group, rank):
    """The same of the core, for what torch.distributed lacks."""
    core, dtype = pc.core_group(group), str(x.dtype).removeprefix("torch.")
    scaled = x.clone()
    core.all_reduce(x.data_ptr(), scaled.data_ptr(), x.numel(), dtype, op="premul_sum", scale=0.3)
    yield "premul_sum", scaled
    counts = [x.numel() - 3 * (x.numel() // 7), *[x.numel() // 7] * 3]
    part = x.new_empty(counts[rank])
    core.reduce_scatter_v(x.data_ptr(), part.data_ptr(), counts, dtype)
    yield "reduce_scatter_v", part


def bits_of_all(rank, size, order):
    """A hash of the bits of every result; and, as "hosts", those of a group that adds up host by host."""
    join(rank, size, 120, options=None if order is None else c10d.Options(order))
    by_hosts = dist.new_group(pg_options=c10d.Options("hosts"))
    assert pc.core_group(by_hosts).reduction_order == "hosts"
    assert pc.core_group(dist.group.WORLD).reduction_order == "ranks"
    found = {"ranks": {}, "hosts": {}}
    for name, group in ("ranks", dist.group.WORLD), ("hosts", by_hosts):
        for dtype in DTYPES_OF_SUMS:
            own = wide(dtype, rank)
            for count in COUNTS if name == "ranks" else COUNTS[2:3]:
                for op in ops_of(dtype)[: 1 if count == COUNTS[-1] else None]:
                    for what, result in reductions(own[:count], group, op, rank):
                        found[name][what, str(op), dtype, count] = digest(result)
                if dtype.is_floating_point:
                    for what, result in core_reductions(own[:count], group, rank):
                        found[name][what, dtype, count] = digest(result)
    dist.destroy_process_group()
    return found


@functools.cache
def wide(dtype, rank):
    made = parts(torch.float32, SIZE + 1, COUNTS[-1])[rank]
    if dtype.is_complex:
        return torch.complex(made, made.flip(0))
    return made.to(dtype)


def digest(tensor):
    return hashlib.sha256(bits(torch.view_as_real(tensor) if tensor.is_complex() else tensor).numpy()).hexdigest()


@functools.cache
def bits_on(layout, order):
    of_each = [{"PHALANX_HOST_ID": str(host)} for host in layout]
    if order is None:
        of_each = [{**each, "PHALANX_REDUCTION_ORDER": "ranks"} for each in of_each]
    return run_groups(bits_of_all, SIZE + 1, order, env=of_each, timeout=280)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_the_order_of_the_ranks_every_layout_of_hosts_has_the_bits_of_one_host(layout):
    needs_ucx()  # P40
    by = "ranks" if layout in ("2 and 2", "1 and 3") else None  # None: by the environment variable
    expected, found = bits_on(ONE_HOST, "ranks"), bits_on(LAYOUTS[layout], by)
    for rank in range(SIZE + 1):
        assert found[rank]["ranks"] == expected[rank]["ranks"]
    assert len(expected[0]["ranks"]) > 200
    # Without the option the bits are others, for every dtype of floats.
    others = [set(expected[rank]["hosts"].items()) - set(found[rank]["hosts"].items()) for rank in range(SIZE + 1)]
    differ = {part for each in others for key, _ in each for part in key if isinstance(part, torch.dtype)}
    alone = {torch.float32, torch.float64, torch.complex64} if layout == "3 and 1" else set()  # (0 + 1 + 2) + 3
    assert differ >= set(DTYPES_OF_SUMS) - alone - {torch.int32}
    assert torch.int32 not in differ


def join_in_another_order(rank, size):
    with pytest.raises(InvalidArgumentError, match="reduction_order is 'host'; expected 'hosts', 'ranks' or None"):
        c10d.Options("host")
    with pytest.raises(dist.DistBackendError, match="rank 2 .*'ranks'|rank . asks for .*'ranks'|for 'ranks'"):
        join(rank, size, options=c10d.Options("ranks" if rank == 2 else "hosts"))


def test_an_order_that_ranks_do_not_share_is_refused_on_every_rank():
    needs_ucx()  # P40
    run_groups(join_in_another_order, 3, env=[{"PHALANX_HOST_ID": str(host)} for host in (7, 8, 8)])
