"""Collectives of a group on ordinary memory of a GPU, and random elements there: what the host gives."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
fake_torch_cuda = pytest.importorskip("fake_torch_cuda")

from phalanx.core import (  # noqa: E402
    ANY_RANK,
    Call,
    FileStore,
    InvalidArgumentError,
    Message,
    NotFoundError,
    UnsupportedError,
    World,
    random,
)
from phalanx.core.dtypes import DType  # noqa: E402
from ranks import run_ranks, scratch  # noqa: E402

GPU = ("cuda", 0)


def join(rank, world_size):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000)


def mine(rank, count):
    return torch.arange(count, dtype=torch.float32) * (rank + 1)


def given(world_size, count):
    return [mine(r, count) for r in range(world_size)]


def every_collective(rank, world_size, count):
    fake_torch_cuda.load()
    n, root = world_size, world_size - 1
    with join(rank, n) as world:
        group = world.create_group("all", range(n))
        stream = torch.cuda.Stream()
        where = {"device": "cuda:0", "stream": stream.cuda_stream}
        whole = given(n, (n + 1) * count)
        x = mine(rank, (n + 1) * count).cuda()
        total = sum(whole)
        torch.cuda.synchronize()
        at, part = x.data_ptr(), slice(rank * count, (rank + 1) * count)

        def result(call, size):
            out = torch.full((size,), -1.0, device="cuda")
            torch.cuda.synchronize()
            assert call(out.data_ptr()) is None
            stream.synchronize()
            return out.cpu()

        seen = result(lambda out: group.all_reduce(at, out, count, "float32", **where), count)
        assert torch.equal(seen, total[:count])
        seen = result(lambda out: group.all_gather(at, out, count, "float32", **where), n * count)
        assert torch.equal(seen, torch.cat([each[:count] for each in whole]))
        seen = result(lambda out: group.reduce_scatter(at, out, count, "float32", "max", **where), count)
        assert torch.equal(seen, whole[-1][part])
        seen = result(lambda out: group.all_to_all(at, out, count, "float32", **where), n * count)
        assert torch.equal(seen, torch.cat([each[part] for each in whole]))
        counts = [count - r for r in range(n)]
        seen = result(lambda out: group.all_gather_v(at, out, counts, "float32", **where), sum(counts))
        assert torch.equal(seen, torch.cat([each[: counts[r]] for r, each in enumerate(whole)]))
        begin = sum(counts[:rank])
        call = lambda out: group.reduce_scatter_v(at, out, counts, "float32", **where)  # noqa: E731
        assert torch.equal(result(call, counts[rank]), total[begin : begin + counts[rank]])
        sent, received = counts, [counts[rank]] * n
        call = lambda out: group.all_to_all_v(at, sent, out, received, "float32", **where)  # noqa: E731
        assert torch.equal(result(call, sum(received)), torch.cat([each[begin:][: counts[rank]] for each in whole]))
        here = rank == root
        seen = result(lambda out: group.reduce(at, out, count, "float32", "sum", root, **where), count)
        assert torch.equal(seen, total[:count] if here else torch.full((count,), -1.0))
        seen = result(lambda out: group.gather(at, out, count, "float32", root, **where), n * count)
        assert torch.equal(seen, torch.cat([each[:count] for each in whole]) if here else torch.full_like(seen, -1.0))
        seen = result(lambda out: group.scatter(at, out, count, "float32", root, **where), count)
        assert torch.equal(seen, whole[root][part])
        group.broadcast(at, count, "float32", root, **where)
        stream.synchronize()
        assert torch.equal(x.cpu(), torch.cat([whole[root][:count], whole[rank][count:]]))
        calls = [Call.all_reduce(at, None, count, "float32"), Call.broadcast(at + 4 * count, count, "float32", 0)]
        group.coalesced(calls, **where)
        group.prepare(calls[:1]).run(**where)
        group.barrier(device=GPU, stream=stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(x.cpu()[:count], n * n * whole[root][:count])
        assert torch.equal(x.cpu()[count : 2 * count], whole[0][count : 2 * count])
        group.barrier()


@pytest.mark.parametrize(("world_size", "count"), [(1, 7), (2, 1000), (3, 5)])
def test_every_collective_gives_what_the_host_gives(world_size, count):
    fake_torch_cuda.needs_cuda()
    run_ranks(every_collective, world_size, count)


# M8
def symmetric_inputs(rank, world_size):
    fake_torch_cuda.load()
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        block = world.alloc(1 << 16, device=GPU)
        group.rendezvous(block)
        ordinary = torch.full((256,), float(rank), device="cuda")
        out = torch.zeros(256 * world_size, device="cuda")
        key, box = 5, random.Box(0, (256,), (1,), (1,))
        random.fill(block.address, DType.FLOAT32, random.Kind.UNIFORM, rank, rank, key, box, device=GPU)
        source = block.address if rank == 1 else ordinary.data_ptr()
        torch.cuda.synchronize()
        group.all_gather(source, out.data_ptr(), 256, "float32", device=GPU)
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), torch.arange(float(world_size)).repeat_interleave(256))
        assert group.zero_copies == (1 if rank == 1 else 0)
        group.barrier()


def test_an_input_in_symmetric_memory_is_read_where_it_is_whatever_the_others_have():
    fake_torch_cuda.needs_cuda()
    run_ranks(symmetric_inputs, 3)


def random_elements(rank, world_size):
    fake_torch_cuda.load()
    box = random.Box(7, (20, 10), (10, 1), (1, 20))
    for kind in random.Kind:
        for dtype, of_torch in ((DType.FLOAT32, torch.float32), (DType.BFLOAT16, torch.bfloat16)):
            if kind is random.Kind.BITS:
                continue
            host, there = torch.zeros(200, dtype=of_torch), torch.zeros(200, dtype=of_torch, device="cuda")
            torch.cuda.synchronize()
            random.fill(host.data_ptr(), dtype, kind, 0.5, 0.75, 11, box)
            random.fill(there.data_ptr(), dtype, kind, 0.5, 0.75, 11, box, device="cuda")
            torch.cuda.synchronize()
            assert torch.equal(there.cpu(), host) and host.count_nonzero() > 50
    host, there = torch.zeros(200, dtype=torch.int64), torch.zeros(200, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    random.fill_integers(host.data_ptr(), DType.INT64, -5, 1 << 40, 11, box)
    random.fill_integers(there.data_ptr(), DType.INT64, -5, 1 << 40, 11, box, device=GPU)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), host)


def test_random_elements_have_the_bits_of_the_host():
    fake_torch_cuda.needs_cuda()
    run_ranks(random_elements, 1)


def wrong_requests(rank, world_size):
    fake_torch_cuda.load()
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        x, host = torch.zeros(8, device="cuda"), bytearray(32)
        torch.cuda.synchronize()
        with pytest.raises(InvalidArgumentError, match="in is not memory that the GPU"):
            group.all_reduce(host, x.data_ptr(), 8, "float32", device=GPU)
        with pytest.raises(UnsupportedError, match="wait for the stream"):
            group.all_reduce(x.data_ptr(), None, 8, "float32", device=GPU, blocking=False)
        with pytest.raises(InvalidArgumentError, match="set phx_gpu_options.device"):
            group.all_reduce(host, None, 8, "float32", stream=64)
        with pytest.raises(InvalidArgumentError, match="unknown device 'tpu'"):
            group.all_reduce(x.data_ptr(), None, 8, "float32", device="tpu")
        with pytest.raises(InvalidArgumentError, match="there is no CUDA device 99"):
            group.barrier(device="cuda:99")
        group.barrier(device="cpu")
        group.all_reduce(host, None, 8, "float32", device="cpu")


def test_wrong_requests_say_so():
    fake_torch_cuda.needs_cuda()
    run_ranks(wrong_requests, 1)


def messages(rank, world_size):
    fake_torch_cuda.load()
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        stream, peer, count = torch.cuda.Stream(), 1 - rank, 1000
        where = {"device": "cuda:0", "stream": stream.cuda_stream}
        x, out = mine(rank, count).cuda(), torch.zeros(2 * count, device="cuda")
        torch.cuda.synchronize()
        at, there = x.data_ptr(), out.data_ptr()
        assert group.send(at, peer, count, "float32", tag=3, **where) is None
        assert group.recv(there, peer, count, "float32", tag=3, **where) == peer
        both = [Message.recv(there + 4 * count, peer, count, "float32"), Message.send(at, peer, count, "float32")]
        group.messages(both, **where)
        stream.synchronize()
        assert torch.equal(out.cpu(), mine(peer, count).repeat(2))
        with pytest.raises(UnsupportedError, match="PHX_ANY_RANK is not allowed"):
            group.recv(there, ANY_RANK, count, "float32", **where)
        with pytest.raises(UnsupportedError, match="work must be NULL"):
            group.send(at, peer, count, "float32", blocking=False, **where)
        group.barrier()


def test_messages_between_gpus_arrive():
    fake_torch_cuda.needs_cuda()
    run_ranks(messages, 2)


def fabric(rank, world_size):
    fake_torch_cuda.load()
    with World(0, 1) as world:
        block = world.alloc(1000, device="cuda")
        try:
            handle = world.export_fabric(block.address + 999)
        except UnsupportedError as error:
            assert fake_torch_cuda.is_real() and "fabric" in str(error)
            return False
        assert len(handle) == 96 and world.export_fabric(block)[:32] == handle[:32]
        theirs = world.import_fabric(handle, "cuda")
        assert theirs.size == 1000 and theirs.device == GPU and theirs.address != block.address
        assert world.find(theirs.address + 5).address == theirs.address and world.mem_count().blocks == 2
        with pytest.raises(InvalidArgumentError, match="belongs to another rank"):
            world.export_fabric(theirs)
        del theirs
        assert world.mem_count().blocks == 1
        with pytest.raises(NotFoundError, match="was not allocated by phx_mem_alloc"):
            world.export_fabric(12345)
        with pytest.raises(InvalidArgumentError, match="handle is a str"):
            world.import_fabric("x" * 96)
        with pytest.raises(UnsupportedError, match="not 'memfd'"):
            world.import_fabric(handle, "cpu")
        return True


def test_a_block_is_mapped_by_a_fabric_handle():  # C2
    fake_torch_cuda.needs_cuda()
    if run_ranks(fabric, 1) == [False]:
        pytest.skip("a GPU with fabric handles")
