"""Streams and the ops torch.ops.phalanx.*: what comes after what, on which stream, and in graphs."""

import ctypes
import os
import shutil
import subprocess
import time
import traceback

import pytest
from cuda_ranks import TOGETHER

import fake_torch_cuda
from ranks import run_ranks, scratch
from torch_shim import PEER_DEAD, P, World, checked, data, raises, run_threads, same, torch

CUDA = 2
COUNT = 3000


@pytest.fixture(autouse=True)
def _device():
    fake_torch_cuda.needs_cuda()


def joined(rank, size, **options):
    """A rank whose group "g" serves GPUs as well."""
    fake_torch_cuda.load()
    torch.cuda.set_device(0)
    world = World(rank, size, **options)
    checked(world.ops.phxt_group_serve(0, b"g", CUDA, 1))
    return world


def storage(world, tensor):
    return world.ffi.cast("void *", tensor.untyped_storage().data_ptr())


def inputs(size, seed=0):
    return [data(each, (COUNT,), seed=seed) for each in range(size)]


def arrive(name):
    (scratch() / name).touch()


def await_arrival(name):
    deadline = time.monotonic() + 60
    while not (scratch() / name).exists() and time.monotonic() < deadline:
        time.sleep(0.001)


# ---- streams ----------------------------------------------------------------------------------------------------


def first(world):
    """The first collective makes a workspace, for which hosts wait for each other; later ones only use it."""
    P.all_reduce(torch.ones(4 * COUNT, device="cuda"), "sum", "g")
    torch.cuda.synchronize()


def unfinished(rank, size):
    with joined(rank, size) as world:
        first(world)
        x = data(rank, (COUNT,)).cuda()
        if rank == 1:
            await_arrival("waited")
        y = P.all_reduce(x, "sum", "g")
        if rank == 0:
            # The peer comes only when all this has returned.
            assert P.wait_tensor(y).data_ptr() == y.data_ptr()
            assert not torch.cuda.current_stream().query()
            assert world.ops.phxt_pending_has(storage(world, y)) == 1
            assert world.ops.phxt_pending_count() == 0
            arrive("waited")
        torch.cuda.synchronize()
        assert world.ops.phxt_pending_has(storage(world, y)) == 0
        same(y.cpu(), sum(inputs(size)))


def test_ops_and_waits_return_before_the_peers_have_come():
    run_ranks(unfinished, 2)


def waited_on_another_stream(rank, size):
    with joined(rank, size) as world:
        first(world)
        side, third = torch.cuda.Stream(), torch.cuda.Stream()
        xs = [data(rank, (COUNT,), seed=seed).cuda() for seed in range(3)]
        torch.cuda.synchronize()
        if rank == 1:
            await_arrival("waited")
        with torch.cuda.stream(side):
            y = P.all_reduce(xs[0], "sum", "g")
            (z,) = P.all_reduce_coalesced([xs[1]], "sum", "g")
            P.all_reduce_(xs[2][: COUNT // 2], "sum", "g")
        if rank == 0:
            assert torch.cuda.current_stream().query()  # nobody waits yet
            P.wait_tensor(y)
            assert not torch.cuda.current_stream().query()  # it waits for the side stream, which waits for the peer
            with torch.cuda.stream(third):
                assert third.query()
                P.wait_tensor(z)
                P.wait_tensor_(xs[2])
                assert not third.query()
            arrive("waited")
        else:
            P.wait_tensor(y)
            with torch.cuda.stream(third):
                P.wait_tensor(z)
                P.wait_tensor_(xs[2])
        same((y + 1).cpu(), sum(inputs(size)) + 1)  # torch's op is on this stream, behind the wait
        with torch.cuda.stream(third):
            same((z + 1).cpu(), sum(inputs(size, 1)) + 1)
            same(xs[2].cpu()[: COUNT // 2], sum(inputs(size, 2))[: COUNT // 2])
        torch.cuda.synchronize()
        assert world.ops.phxt_sweep() == 0


def test_wait_tensor_makes_the_current_stream_wait_for_the_one_that_writes():
    run_ranks(waited_on_another_stream, 2)


def read_without_a_wait(rank, size):
    with joined(rank, size) as world:
        first(world)
        own = f"own{rank}".encode()  # a group whose collectives the core does not order behind those of "g"
        alone = world.made(
            "phx_group **",
            lambda out: world.core.phx_group_create(world.world, own, world.ffi.new("int32_t[]", [rank]), 1, 0, out),
        )
        checked(world.ops.phxt_group_add(0, own, alone))
        checked(world.ops.phxt_group_serve(0, own, CUDA, 1))
        side = torch.cuda.Stream()
        x = data(rank, (COUNT,)).cuda()
        torch.cuda.synchronize()
        if rank == 1:
            await_arrival("put")
        with torch.cuda.stream(side):
            y = P.all_reduce(x, "sum", "g")
        z = P.all_reduce(y, "sum", own.decode())
        if rank == 0:
            assert not torch.cuda.current_stream().query()
            arrive("put")
        same(P.wait_tensor(z).cpu(), sum(inputs(size)))
        checked(world.ops.phxt_group_remove(0, own))
        world.core.phx_group_release(alone)


def test_ops_of_ours_wait_for_what_they_read_also_on_another_stream():
    run_ranks(read_without_a_wait, 2)


def rank_thread(rank, size, store, failures):
    try:
        torch.cuda.set_device(0)
        with World(rank, size, context=rank + 1, store=store) as world, torch.cuda.stream(torch.cuda.Stream()):
            checked(world.ops.phxt_group_serve(rank + 1, b"g", CUDA, 1))
            for seed in range(3):
                x = data(rank, (COUNT,), seed=seed).cuda()
                same(P.wait_tensor(P.all_reduce(x, "sum", "g")).cpu(), sum(inputs(size, seed)))
            torch.cuda.current_stream().synchronize()
    except BaseException:
        failures.append(traceback.format_exc())


def as_threads(rank, world_size):
    fake_torch_cuda.load()
    run_threads(rank_thread, 2)


def test_ranks_may_be_threads_on_streams_of_their_own():
    run_ranks(as_threads, 1, env=TOGETHER)


BUILT_FOR_CUDA = """
#include <stdint.h>
int calls = 0;
void *stream = 0;
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void **out) {
  ++calls;
  *out = device == 0 ? stream : 0;
  return 0;
}
"""


def built_for_cuda(rank, size, library):
    calls = ctypes.CDLL(library)  # before ours, as it is where torch was built with it
    with joined(rank, size) as world:
        side = torch.cuda.Stream()
        ctypes.c_void_p.in_dll(calls, "stream").value = side.cuda_stream
        first(world)
        x = data(rank, (COUNT,)).cuda()
        torch.cuda.synchronize()
        if rank == 1:
            await_arrival("put")
        y = P.all_reduce(x, "sum", "g")
        if rank == 0:
            assert torch.cuda.current_stream().query() and not side.query()
            arrive("put")
        side.synchronize()
        same(y.cpu(), sum(inputs(size)))
        assert (
            ctypes.c_int.in_dll(calls, "calls").value == 3
        )  # the collectives', and the one of the check of what is read


def test_the_current_stream_is_asked_for_as_cuda_builds_of_torch_tell_it(tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("the torch here is such a build")
    compiler = shutil.which("cc") or pytest.skip("no C compiler (cc)")
    source, library = tmp_path / "torch_cuda.c", tmp_path / "libtorch_cuda.so"
    source.write_text(BUILT_FOR_CUDA, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", library, source], check=True)
    run_ranks(built_for_cuda, 2, str(library))


def of_a_group(rank, size):
    with joined(rank, size) as world:
        first(world)
        side = torch.cuda.Stream()
        x = data(rank, (COUNT,)).cuda()
        torch.cuda.synchronize()
        if rank == 1:
            await_arrival("put")
        with torch.cuda.stream(side):
            y = P.all_reduce(x, "sum", "g")
        checked(world.ops.phxt_wait_group(0, b"g", 0))
        if rank == 0:
            assert not torch.cuda.current_stream().query()
            arrive("put")
        same((y * 2).cpu(), 2 * sum(inputs(size)))


def test_waiting_for_a_group_is_waiting_for_all_that_it_writes():
    run_ranks(of_a_group, 2)


def dropped(rank, size):
    with joined(rank, size) as world:
        x = torch.ones(16, device="cuda")
        for _ in range(300):
            P.all_reduce(x, "sum", "g")
        torch.cuda.synchronize()
        assert world.ops.phxt_pending_count() == world.ops.phxt_sweep() == 0
        y = P.all_reduce(x, "sum", "g")
        same(P.wait_tensor(y).cpu(), torch.full((16,), float(size)))


def test_results_that_nobody_waits_for_do_not_pile_up():
    run_ranks(dropped, 2)


# ---- graphs -----------------------------------------------------------------------------------------------------


def captured(rank, size):
    with joined(rank, size) as world:
        first(world)
        x = torch.zeros(COUNT, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            y = P.wait_tensor(P.all_reduce(x + 1, "sum", "g"))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                z = P.all_gather_into_tensor(y[:8], size, "g")
            z = P.wait_tensor(z) * 2  # joins the side stream
        for seed in range(3):
            x.copy_(data(rank, (COUNT,), seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            wanted = sum(each + 1 for each in inputs(size, seed))
            same(y.cpu(), wanted)
            same(z.cpu(), 2 * torch.cat([wanted[:8]] * size))
        # What was captured is nothing that a stream still has to do.
        assert world.ops.phxt_pending_has(storage(world, y)) == 0
        same(P.wait_tensor(y).cpu(), wanted)
        with torch.cuda.stream(side):
            P.wait_tensor(y)
            assert side.query()
        assert world.ops.phxt_sweep() == 0


def test_ops_can_be_captured_and_replayed():
    run_ranks(captured, 2)


def captured_without_workspace(rank, size):
    with joined(rank, size):
        x = torch.ones(64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            text = raises(RuntimeError, lambda: P.all_reduce(x, "sum", "g"))
        assert "before the capture" in text and "group 'g'" in text
        same(P.all_reduce(x, "sum", "g").cpu(), size * torch.ones(64))  # all ranks alike: the group lives


def test_a_first_call_while_a_stream_is_captured_is_an_error_that_says_what_to_do():
    run_ranks(captured_without_workspace, 2)


def waited_for_in_a_capture(rank, size):
    with joined(rank, size) as world:
        first(world)
        x = data(rank, (COUNT,)).cuda()
        torch.cuda.synchronize()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        if rank == 1:
            await_arrival("captured")
        y = P.all_reduce(x, "sum", "g")
        if rank == 0:
            with torch.cuda.stream(side):
                graph.capture_begin()
                text = raises(RuntimeError, lambda: P.wait_tensor(y))
                assert "wait for the tensor before the capture" in text
                graph.capture_end()
            arrive("captured")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = P.wait_tensor(y) + 1  # it is there: nothing to wait for
        graph.replay()
        torch.cuda.synchronize()
        same(z.cpu(), sum(inputs(size)) + 1)


def test_a_capture_cannot_wait_for_what_began_before_it():
    run_ranks(waited_for_in_a_capture, 2)


# ---- failures ---------------------------------------------------------------------------------------------------


def left_alone(rank, size):
    with joined(rank, size, timeout_ms=20_000) as world:
        first(world)
        if rank == 1:
            await_arrival("waits")
            os._exit(7)
        y = P.wait_tensor(P.all_reduce(torch.ones(COUNT, device="cuda"), "sum", "g"))
        arrive("waits")
        torch.cuda.synchronize()  # the kernel ends
        text = raises(RuntimeError, lambda: P.all_reduce(y, "sum", "g"))
        assert "rank 1" in text and world.last_error()[0] == PEER_DEAD
        same((torch.zeros(8, device="cuda") + 1).cpu(), torch.ones(8))  # the GPU can be used
        world.barrier = lambda: None  # there is nobody to meet


def test_a_peer_that_dies_ends_the_kernel_and_the_next_call_names_it():
    run_ranks(left_alone, 2, expect_exit={1: 7})
