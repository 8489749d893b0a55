"""The ops of torch.ops.phalanx on symmetric memory of GPUs, beside what they give on CPU or one process computes."""

import pytest
import torch
from cuda_ranks import WAYS, on_cuda, run_cuda_ranks

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError, MismatchError, UnsupportedError

ops = torch.ops.phalanx
ways = pytest.mark.parametrize("way", WAYS)


def symmetric(values):
    return symm_mem.empty(*values.shape, dtype=values.dtype, device="cuda").copy_(values)


def parts_of(size, shape, dtype):
    drawn = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [torch.randint(-4, 5, shape, generator=each).to(dtype) for each in drawn]


def through():
    torch.cuda.current_stream().synchronize()


@on_cuda
def all_reduces(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):  # M39
        for shape in ((1,), (7, 3), (40_000,), (0, 2)):
            parts = parts_of(size, shape, dtype)
            total, largest = torch.stack(parts).sum(0).to(dtype), torch.stack(parts).amax(0)
            x = symmetric(parts[rank])
            for op in (ops.one_shot_all_reduce, ops.multimem_one_shot_all_reduce):
                assert torch.equal(op(x, "sum", name).cpu(), total)
            assert torch.equal(x.cpu(), parts[rank])  # left as it was
            out = torch.empty_like(total, device="cuda")
            assert ops.one_shot_all_reduce_out(x, "SUM", name, out) is out
            assert torch.equal(out.cpu(), total)
            assert torch.equal(ops.one_shot_all_reduce(x, "max", name).cpu(), largest)
            assert torch.equal(ops.two_shot_all_reduce_out(x, "sum", name, out.zero_()).cpu(), total)
            got = ops.multimem_one_shot_reduce_out(x, "sum", 1, name, out.zero_())
            assert torch.equal(got.cpu(), total * (rank == 1))
            buffer = symm_mem.empty(max(total.numel(), 1) + 5, dtype=dtype, device="cuda")
            mine = parts[rank].to("cuda")
            assert torch.equal(ops.one_shot_all_reduce_copy(buffer, mine, "sum", name).cpu(), total)
            assert torch.equal(ops.one_shot_all_reduce_copy_out(buffer, mine, "sum", name, out.zero_()).cpu(), total)
            strided = torch.empty(*shape, 2, dtype=dtype, device="cuda")[..., 0]
            assert torch.equal(ops.one_shot_all_reduce_out(x, "sum", name, strided).cpu(), total)
            for op in (ops.two_shot_all_reduce_, ops.multimem_all_reduce_):
                x.copy_(parts[rank])
                assert op(x, "sum", name) is x
                assert torch.equal(x.cpu(), total)
    whole = symmetric(torch.arange(20.0) + rank)
    expected = torch.stack([torch.arange(4.0, 12.0) + each for each in range(size)]).sum(0)
    assert torch.equal(ops.one_shot_all_reduce(whole[4:12], "sum", name).cpu(), expected)  # M18
    through()


@ways
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduces_give_what_one_process_would_compute(way, ranks):  # M35
    run_cuda_ranks(all_reduces, ranks, way)


@on_cuda
def scatters(rank, size, name):
    for dtype in (torch.float32, torch.bfloat16):
        parts = parts_of(size, (size * 2, size * 3), dtype)
        total = torch.stack(parts).sum(0)
        x = symmetric(parts[rank])
        out = torch.empty(2, size * 3, dtype=dtype, device="cuda")
        assert ops.reduce_scatter_out(x, name, False, out) is out
        assert torch.equal(out.cpu(), total[2 * rank : 2 * rank + 2])
        out = torch.empty(size * 2, 3, dtype=dtype, device="cuda")
        ops.reduce_scatter_out(x, name, True, out)
        assert torch.equal(out.cpu(), total[:, 3 * rank : 3 * rank + 3])
        for source in (x, parts[rank].to("cuda")):  # symmetric or not
            assert torch.equal(ops._low_contention_all_gather(source, name).cpu(), torch.cat(parts))
            got = ops._low_contention_reduce_scatter(source, "sum", name)
            assert torch.equal(got.cpu(), total[2 * rank : 2 * rank + 2])
        got = ops._low_contention_reduce_scatter(x, "avg", name)
        torch.testing.assert_close(got.cpu(), (total / size)[2 * rank : 2 * rank + 2])
        gathered = torch.empty(size * size * 2, size * 3, dtype=dtype, device="cuda")
        assert torch.equal(ops.multimem_all_gather_out(x, name, gathered).cpu(), torch.cat(parts))
        outs = [torch.empty(size * 2, 2, dtype=dtype, device="cuda")] * (rank == 1)
        ops.reduce_scatter_offset(x, outs, name, 1, [2], [1])
        assert all(torch.equal(each.cpu(), total[:, :2]) for each in outs)
        columns = torch.empty(size * size * 2, 3, dtype=dtype, device="cuda")
        symm_mem.all_to_all_nd(x, columns, 1, 0, group=name)
        assert torch.equal(columns.cpu(), torch.cat([part[:, 3 * rank : 3 * rank + 3] for part in parts]))
        row = torch.empty(size * 3, dtype=dtype, device="cuda")
        symm_mem.get(row, symm_mem.rendezvous(x, name), (rank + 1) % size, offset=size * 3)
        assert torch.equal(row.cpu(), parts[(rank + 1) % size][1])
    through()


@ways
def test_gathers_and_scatters_give_what_one_process_would_compute(way):  # M35
    run_cuda_ranks(scatters, 3, way)


@on_cuda
def tiles(rank, size, name):
    parts = parts_of(size, (8, 8), torch.float32)
    x, total = symmetric(parts[rank]), torch.stack(parts).sum(0)
    out = torch.zeros(4, 4, device="cuda")
    ops.tile_reduce(x[2:6, 4:8], out, 1, name)
    assert torch.equal(out.cpu(), total[2:6, 4:8] * (rank == 1))
    roots = [(each + 1) % size for each in range(size)]
    ops.multi_root_tile_reduce([x[:4, each : each + 4] for each in range(size)], out, roots, name)
    mine = roots.index(rank)
    assert torch.equal(out.cpu(), total[:4, mine : mine + 4])
    remotes = ops.get_remote_tensors(x[::2, 1:3], name)
    handle = symm_mem.rendezvous(x, name)
    handle.barrier()
    assert all(torch.equal(remote.cpu(), part[::2, 1:3]) for remote, part in zip(remotes, parts, strict=True))
    handle.barrier()
    remotes[(rank + 1) % size].fill_(rank)  # they are the memory, not copies
    handle.barrier()
    assert x[::2, 1:3].cpu().eq((rank - 1) % size).all()
    words = symm_mem.empty(8, dtype=torch.int32, device="cuda")
    assert ops.stream_write_value32_(words, 3, 0xFFFFFFFF) is words
    ops.memset32_(words, 5, 7, 2)
    assert words.tolist() == [0, 0, 0, -1, 0, 7, 7, 0]
    with pytest.raises(InvalidArgumentError, match="offset is 7 and count 2, and the tensor has 8 words"):
        symm_mem.SymmetricMemory.memset32(words, 7, 1, 2)
    with pytest.raises(InvalidArgumentError, match="ordinary memory"):
        ops.one_shot_all_reduce(torch.ones(3, device="cuda"), "sum", name)
    with pytest.raises(InvalidArgumentError, match=r"on cpu; it must have .* on cuda:0"):
        ops.one_shot_all_reduce_out(x, "sum", name, torch.empty(8, 8))
    handle.barrier()
    through()


@ways
def test_tiles_words_and_tensors_of_peers(way):  # M22
    run_cuda_ranks(tiles, 3, way)


@on_cuda
def by_switch(rank, size, name):
    if torch.cuda.device_count() < size or not symm_mem.SymmetricMemory.has_multicast_support("cuda", rank):
        return "two GPUs that are connected by NVLink switches"
    torch.cuda.set_device(rank)
    assert not symm_mem.SymmetricMemory.has_multicast_support("cpu", 0)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):  # int8: what switches cannot do
        parts = parts_of(size, (3000,), dtype)
        total = torch.stack(parts).sum(0).to(dtype)
        x = symmetric(parts[rank])
        handle = symm_mem.rendezvous(x, name)
        assert x.device.index == rank and handle.multicast_ptr != 0
        assert torch.equal(ops.multimem_one_shot_all_reduce(x, "sum", name).cpu(), total)
        out = torch.zeros(3000, dtype=dtype, device="cuda")
        got = ops.multimem_one_shot_reduce_out(x, "sum", 1, name, out)
        assert torch.equal(got.cpu(), total * (rank == 1))
        assert torch.equal(ops.multimem_all_reduce_(x, "sum", name).cpu(), total)
        gathered = symm_mem.empty(size * 3000, dtype=dtype, device="cuda")
        assert torch.equal(ops.multimem_all_gather_out(x, name, gathered).cpu(), total.repeat(size))
    handle.symm.barrier()
    return None


def test_switches_do_the_multimem_ops_where_there_are_any():
    (missing, _) = run_cuda_ranks(by_switch, 2, "processes")
    if missing:
        pytest.skip(missing)


@on_cuda
def replays(rank, size, name):
    x, out = symm_mem.empty(5000, device="cuda"), torch.empty(5000, device="cuda")
    step = torch.ones(5000, device="cuda")
    symm_mem.rendezvous(x, name)
    columns, half = symm_mem.empty(2, 2 * size, device="cuda"), torch.empty(2, 2, device="cuda")
    symm_mem.rendezvous(columns, name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(step)
        ops.one_shot_all_reduce_out(x, "sum", name, out)
        columns.add_(1)
        ops.reduce_scatter_out(columns, name, True, half)  # of torch's sums and two barriers
        with pytest.raises(UnsupportedError, match="the host must read the splits"):
            ops.all_to_all_vdev(
                columns, columns, torch.zeros(size, dtype=torch.int64), torch.zeros(2, size, dtype=torch.int64), name
            )
    for turn in range(1, 6):
        graph.replay()
        torch.cuda.synchronize()
        assert out.unique().tolist() == [turn * size] and half.unique().tolist() == [turn * size]
    symm_mem.get_symmetric_memory(x, name).symm.barrier()


def test_ops_are_captured_and_replayed():
    run_cuda_ranks(replays, 2, "processes")


@on_cuda
def disagrees(rank, size, name):
    x = symm_mem.empty(64, device="cuda")
    symm_mem.rendezvous(x, name)
    try:
        for _ in range(2):
            ops.one_shot_all_reduce(x[: 8 + 8 * rank], "sum", name)
            through()
    except MismatchError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@ways
def test_ranks_whose_calls_differ_are_told(way):
    told = run_cuda_ranks(disagrees, 2, way)
    assert "nothing" not in told and any("(float32, 8, sum" in text and "(float32, 16, sum" in text for text in told)


@on_cuda
def moves_rows(rank, size, name):
    experts, drawn = 2, torch.Generator().manual_seed(3)
    counts = torch.randint(0, 5, (size, size, experts), generator=drawn)
    rows = [torch.arange(int(each.sum()) * 2.0).view(-1, 2) + 1000 * source for source, each in enumerate(counts)]
    x = symm_mem.empty(40, 2, device="cuda")
    x[: len(rows[rank])] = rows[rank].to("cuda")
    host = symm_mem.empty(40, 2)
    host[: len(rows[rank])] = rows[rank]
    for splits, op in (
        (counts[rank].sum(-1), ops.all_to_all_vdev),
        (counts[rank].reshape(-1), ops.all_to_all_vdev_2d),
    ):
        told = {
            place: torch.full((2, splits.numel()), -1, dtype=torch.int64, device=place) for place in ("cpu", "cuda")
        }
        outs = {place: torch.full((60, 2), -1.0, device=place) for place in told}
        op(host, outs["cpu"], splits, told["cpu"], name)
        op(x, outs["cuda"], splits.to("cuda"), told["cuda"], name)
        assert torch.equal(told["cuda"].cpu(), told["cpu"]) and torch.equal(outs["cuda"].cpu(), outs["cpu"])
    back, told_back = torch.full((60, 2), -1.0, device="cuda"), torch.full_like(told["cuda"], -1)
    moved = symmetric(outs["cuda"].cpu())
    ops.all_to_all_vdev_2d_offset(moved, back, told["cuda"], told_back, name)
    assert torch.equal(back[: len(rows[rank])].cpu(), rows[rank])
    with pytest.raises(InvalidArgumentError, match="do not lie within"):
        ops.all_to_all_vdev(x, back, torch.full((size,), 90, device="cuda"), told_back[:, :size].contiguous(), name)
    symm_mem.rendezvous(x, name).symm.barrier()
    through()


@ways
def test_rows_go_where_their_splits_say(way):
    run_cuda_ranks(moves_rows, 2, way)
