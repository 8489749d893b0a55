"""The device of the tests does what torch's own does, as far as other tests rest on it."""

import pytest
import torch

import fake_torch_cuda
from ranks import run_ranks, scratch

pytestmark = pytest.mark.usefixtures("_device")


@pytest.fixture
def _device():
    fake_torch_cuda.needs_cuda()


def ops(rank, world_size):
    fake_torch_cuda.load()
    x = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    assert x.device == torch.device("cuda", 0)
    y = (x + 1) @ x.t()
    host = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert y.is_cuda and torch.equal(y.cpu(), (host + 1) @ host.t())
    x[1:, ::2] = 7
    host[1:, ::2] = 7
    assert torch.equal(x.cpu(), host) and x.sum().item() == host.sum().item()
    assert torch.equal(torch.cat([x, x.to(torch.bfloat16)]).cpu(), torch.cat([host, host.to(torch.bfloat16)]))
    view = x.view(-1)[2:6]
    view.mul_(3)
    host.view(-1)[2:6].mul_(3)
    assert torch.equal(x.cpu(), host) and view.untyped_storage().data_ptr() == x.data_ptr()
    grown = torch.empty(0, device="cuda")
    torch.add(x, x, out=grown)
    assert torch.equal(grown.cpu(), 2 * host)
    other = x.to("cuda:1")
    assert other.device.index == 1 and torch.equal(other.cpu(), host)
    w = torch.randn(4, 4, device="cuda", requires_grad=True)
    (x @ w).relu().sum().backward()
    v = w.detach().cpu().requires_grad_()
    (host @ v).relu().sum().backward()
    assert w.grad.is_cuda and torch.equal(w.grad.cpu(), v.grad)


def test_ops_give_what_those_of_the_cpu_give():
    run_ranks(ops, 1)


def streams(rank, world_size):
    fake_torch_cuda.load()
    side = torch.cuda.Stream()
    assert torch.cuda.current_stream().cuda_stream == 0 and side.cuda_stream != 0
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        x = torch.ones(4, device="cuda")
        event = torch.cuda.Event()
        event.record()
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.current_stream().wait_stream(side)
    assert (x + 1).tolist() == [2.0] * 4
    torch.cuda.synchronize()
    assert event.query() and side.query()


def test_streams_and_events_are_those_of_the_driver():
    run_ranks(streams, 1)


def graphs(rank, world_size):
    fake_torch_cuda.load()
    x = torch.zeros(4, device="cuda")
    y = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        x += y
        z = x @ x
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    assert x.tolist() == [0.0] * 4
    for step in (1, 2, 3):
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == [float(step)] * 4 and z.item() == 4.0 * step * step
    y.fill_(10)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [13.0] * 4


def test_what_a_graph_captured_runs_at_each_replay_and_not_before():
    run_ranks(graphs, 1)


def memory(rank, world_size):
    fake_torch_cuda.load()
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    address = x.data_ptr()
    del x
    assert torch.ones(4, device="cuda").data_ptr() == address
    with torch.cuda.stream(side):
        assert torch.ones(4, device="cuda").data_ptr() != address
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_memory_is_given_again_to_the_stream_that_had_it():
    run_ranks(memory, 1)


def kernels(rank, world_size):
    fake_torch_cuda.load()
    core = pytest.importorskip("phalanx.core")
    torch.cuda.set_device(0)
    with core.World(rank, world_size, core.FileStore(scratch() / "store")) as world:
        group = world.create_group("all", range(world_size))
        block = world.alloc(4096, device="cuda")
        symm = group.rendezvous(block)
        storage = torch._C._construct_storage_from_data_pointer(block.address, torch.device("cuda", 0), 4096)
        x = torch.empty(0, device="cuda").set_(storage, 0, (1024,))
        side = torch.cuda.Stream()
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                x.copy_(torch.arange(1024) * (rank + 1))
                symm.all_reduce(0, None, 1024, "float32", stream=stream.cuda_stream)
                y = x + 1  # waits for the kernel, as it is on its stream
            factor = world_size * (world_size + 1) // 2
            assert torch.equal(y.cpu(), torch.arange(1024, dtype=torch.float32) * factor + 1)
        torch.cuda.synchronize()
        group.barrier()
        del x, storage, symm, block


def test_ops_and_kernels_of_the_core_are_in_the_order_of_their_stream():
    run_ranks(kernels, 2)
