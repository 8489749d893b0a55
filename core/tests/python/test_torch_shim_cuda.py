"""The ops torch.ops.phalanx.* on tensors of a GPU: each gives the bits that it gives on the host."""

import pytest

import fake_torch_cuda
from ranks import run_ranks
from torch_shim import INVALID, NOT_FOUND, P, World, checked, data, load, raises, same, torch

CPU, CUDA = 1, 2
COLLECTIVES = [
    "all_reduce", "all_reduce_", "all_gather_into_tensor", "all_gather_into_tensor_out", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "all_to_all_single", "broadcast", "broadcast_", "all_reduce_coalesced",
    "all_reduce_coalesced_", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _device():
    fake_torch_cuda.needs_cuda()


def joined(rank, size):
    """A rank whose group "g" serves GPUs as well."""
    fake_torch_cuda.load()
    torch.cuda.set_device(0)
    world = World(rank, size)
    checked(world.ops.phxt_group_serve(0, b"g", CUDA, 1))
    return world


def on_both(call, *inputs):
    """What a call gives on the host and on the GPU, where nothing is pending when it returns: equal bits."""
    expected = [P.wait_tensor(each) for each in call(*(each.clone() for each in inputs))]
    before = load()[2].phxt_fallback_count()
    given = call(*(each.cuda() for each in inputs))
    assert load()[2].phxt_pending_count() == 0 and load()[2].phxt_fallback_count() == before
    for one, other in zip(given, expected, strict=True):
        assert one.device == torch.device("cuda", 0)
        same(P.wait_tensor(one).cpu(), other)


def in_place(op, *arguments):
    def call(x):
        op(x, *arguments)
        return [x]

    return call


def every_op(rank, size):
    with joined(rank, size):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            for rows in (size, 24 * size, 1200 * size):
                x = data(rank, (rows, 3), dtype)
                for op in ("sum", "avg") if dtype.is_complex else ("sum", "avg", "max", "product"):
                    on_both(lambda t, op=op: [P.all_reduce(t, op, "g")], x)
                    on_both(in_place(P.all_reduce_, op, "g"), x)
                    on_both(lambda t, op=op: [P.reduce_scatter_tensor(t, op, size, "g")], x)
                on_both(lambda t: [P.all_gather_into_tensor(t, size, "g")], x)
                on_both(lambda t: [P.all_to_all_single(t, [], [], "g")], x)
                on_both(lambda t: [P.broadcast(t, size - 1, "g")], x)
                on_both(in_place(P.broadcast_, 0, "g"), x)

                def into(t):
                    gathered, part = t.new_empty(size * t.shape[0], 3), t.new_empty(t.shape[0] // size, 3)
                    P.all_gather_into_tensor_out(t, size, "g", out=gathered)
                    P.reduce_scatter_tensor_out(t, "sum", size, "g", out=part)
                    return [gathered, part]

                on_both(into, x)


@pytest.mark.parametrize("size", [1, 2])
def test_each_op_gives_the_bits_of_the_host(size):
    run_ranks(every_op, size, timeout=240)


def splits(rank, size):
    with joined(rank, size):
        sent = [[2, 0], [5, 3]][rank]
        received = [[2, 5], [0, 3]][rank]
        x = data(rank, (sum(sent), 7), torch.float16)
        on_both(lambda t: [P.all_to_all_single(t, received, sent, "g")], x)
        on_both(lambda t: [P.all_gather_into_tensor(t, size, "g")], torch.ones(()) * rank)
        on_both(lambda t: [P.all_reduce(t, "sum", "g")], torch.empty(0, 3))
        eight = data(rank, (4, 4)).to(torch.float8_e4m3fn)
        gathered = P.wait_tensor(P.all_gather_into_tensor(eight.cuda(), size, "g"))
        expected = torch.cat([data(each, (4, 4)).to(torch.float8_e4m3fn) for each in range(size)])
        assert gathered.is_cuda and torch.equal(gathered.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_ragged_empty_and_foreign_elements_move_as_on_the_host():
    run_ranks(splits, 2)


def strided(rank, size):
    with joined(rank, size):
        x = data(rank, (6, 8))
        on_both(lambda t: [P.all_reduce(t.t(), "sum", "g")], x)

        def written(t):
            P.all_reduce_(t[:, ::2], "sum", "g")
            return [t]

        on_both(written, x)

        def slices(t):  # the input is this rank's place in the output, and the other way round, and beside it
            whole = t.new_zeros(size * 6, 8)
            whole[6 * rank : 6 * rank + 6] = t
            P.all_gather_into_tensor_out(whole[6 * rank : 6 * rank + 6], size, "g", out=whole)
            parts = torch.cat([t] * size)
            P.reduce_scatter_tensor_out(parts, "sum", size, "g", out=parts[6 * rank : 6 * rank + 6])
            moved = torch.cat([t] * size)
            P.reduce_scatter_tensor_out(moved, "sum", size, "g", out=moved[1:7])
            return [whole, parts[6 * rank : 6 * rank + 6], moved[1:7]]

        on_both(slices, x)


def test_operands_may_have_any_strides_and_overlap():
    run_ranks(strided, 2)


def coalesced(rank, size):
    with joined(rank, size):
        xs = [data(rank, (size * rows, 5), dtype) for rows, dtype in ((2, torch.float32), (700, torch.bfloat16))]
        on_both(lambda *ts: P.all_reduce_coalesced(list(ts), "sum", "g"), *xs)
        on_both(lambda *ts: P.all_gather_into_tensor_coalesced(list(ts), size, "g"), *xs)
        on_both(lambda *ts: P.reduce_scatter_tensor_coalesced(list(ts), "sum", size, "g"), *xs)

        def written(*ts):
            P.all_reduce_coalesced_([ts[0], ts[1].t()], "sum", "g")
            return ts

        on_both(written, *xs)


def test_several_tensors_go_in_one_call():
    run_ranks(coalesced, 2)


def forms(rank, size):
    with joined(rank, size):
        x, order = data(rank, (40,)), torch.zeros(1)
        on_both(lambda t: [P.blocking_all_reduce(t, "sum", "g")], x)
        on_both(in_place(P.blocking_all_reduce_, "sum", "g"), x)
        ordered = torch.ops.phalanx_ordered
        on_both(lambda t: [ordered.all_reduce(t, "sum", "g", order.to(t.device))], x)
        on_both(lambda t: [ordered.all_reduce(t, "sum", "g", order.to(t.device), True)], x)
        on_both(lambda t: ordered.all_gather_into_tensor_coalesced([t, t], size, "g", order.to(t.device)), x)


def test_blocking_and_ordered_forms_are_the_same_collectives():
    run_ranks(forms, 2)


def small(rank, shape):
    """Small integers: sums of their products are exact, in whatever order the host and a GPU add them up."""
    return data(rank, shape).mul(4).round()


def products(rank, size):
    with joined(rank, size):
        a, b = small(rank, (4 * size, 6)), small(7, (6, 5))
        bias, batch = small(8, (5,)), small(rank, (3, 4, 6))

        def into(a, b, bias, batch):
            outs = a.new_empty(a.shape[0], 5), a.new_empty(a.shape[0], 5), a.new_empty(3, 4, 5)
            P.mm_into_(outs[0], a, b)
            P.addmm_into_(outs[1], bias, a, b)
            P.bmm_into_(outs[2], batch, b.expand(3, 6, 5))
            return outs

        on_both(into, a, b, bias, batch)

        def fused(a, b):
            scattered = P.mm_reduce_scatter(a, b, "sum", size, "g", 0)
            return [scattered, *P.all_gather_mms(a, [b, b[:, 1:]], size, "g")]

        on_both(fused, a, b)
        weight = b.cuda().requires_grad_()
        out = torch.empty(a.shape[0], 5, device="cuda")
        P.mm_into_(out, a.cuda(), weight)
        assert not out.requires_grad and torch.equal(out.cpu(), a @ b)


def test_products_are_those_of_the_host():
    run_ranks(products, 2)


def arenas(rank, size):
    with joined(rank, size):
        arena = P.symm_arena(4096, "plan", "g", 0)
        assert not arena.is_cuda and P.symm_arena(64, "plan", "g", 0).item() == arena.item()
        host = P.symm_arena(4096, "plan", "g")
        assert host.item() != arena.item()
        mine = P.arena_view(arena, 256, [4, 8], torch.float32, 0)
        assert mine.device == torch.device("cuda", 0) and mine.is_contiguous()
        side = torch.cuda.Stream()
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                P.mm_into_(mine, torch.full((4, 2), rank + 1.0, device="cuda"), torch.ones(2, 8, device="cuda"))
                # Collectives read it in place.
                same(P.wait_tensor(P.all_reduce(mine, "sum", "g")).cpu(), torch.full((4, 8), 6.0))
                P.arena_release_(arena, [mine])
            stream.synchronize()
        for wrong in (-1, 1):
            text = raises(ValueError, lambda wrong=wrong: P.arena_view(arena, 0, [1], torch.float32, wrong))
            assert f"gpu is {wrong}" in text and "is on cuda:0" in text
        assert "gpu is 0" in raises(ValueError, lambda: P.arena_view(host, 0, [1], torch.float32, 0))
        assert "gpu is -2" in raises(ValueError, lambda: P.symm_arena(64, "plan", "g", -2))
        text = raises(ValueError, lambda: P.arena_view(arena.cuda(), 0, [1], torch.float32))
        assert "on the CPU" in text


def test_an_arena_may_lie_on_a_gpu():
    run_ranks(arenas, 2)


def unserved(rank, size):
    with joined(rank, size) as world:
        ops = world.ops
        x = torch.ones(4, device="cuda")
        checked(ops.phxt_group_serve(0, b"g", CUDA, 0))
        text = raises(RuntimeError, lambda: P.all_reduce(x, "sum", "g"))
        assert "all_reduce on group 'g': " in text
        assert ops.phxt_fallback_count() == 1
        checked(ops.phxt_group_serve(0, b"g", CUDA, 1))
        checked(ops.phxt_group_serve(0, b"g", CPU, 0))
        raises(RuntimeError, lambda: P.all_reduce(x.cpu(), "sum", "g"))
        assert ops.phxt_fallback_count() == 2
        same(P.all_reduce(x, "sum", "g").cpu(), torch.full((4,), float(size)))
        checked(ops.phxt_group_serve(0, b"g", CPU, 1))
        assert ops.phxt_group_serve(0, b"nobody", CUDA, 1) == NOT_FOUND
        assert ops.phxt_group_serve(0, b"g", 3, 1) == INVALID


def test_a_group_serves_the_devices_that_it_is_told_to():
    run_ranks(unserved, 2)


def mixed(rank, size):
    with joined(rank, size):
        x = torch.ones(4, 4)
        gpu = x.cuda()
        for call, parts in [
            (
                lambda: P.all_gather_into_tensor_out(gpu, size, "g", out=torch.empty(4 * size, 4)),
                ["all_gather_into_tensor_out on group 'g'", "input is on cuda:0, but out is on the CPU"],
            ),
            (
                lambda: P.all_gather_into_tensor_out(gpu, size, "g", out=gpu.new_empty(4 * size, 4).to("cuda:1")),
                ["input is on cuda:0, but out is on cuda:1"],
            ),
            (
                lambda: P.all_reduce_coalesced([gpu, x], "sum", "g"),
                ["all_reduce_coalesced on group 'g'", "the inputs are on cuda:0 and on the CPU"],
            ),
            (lambda: P.mm_into_(gpu, gpu, x), ["mm_into_", "out is on cuda:0 and b on the CPU"]),
            (lambda: P.mm_reduce_scatter(gpu, x, "sum", size, "g", 0), ["b is on the CPU", "must be on cuda:0"]),
            (lambda: P.all_gather_into_tensor(gpu, 7, "g"), ["group_size is 7"]),
        ]:
            text = raises(ValueError, call)
            assert all(part in text for part in parts), text
        same(P.all_reduce(gpu, "sum", "g").cpu(), size * x)  # nothing was sent


@pytest.mark.skipif(fake_torch_cuda.is_real() and torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_tensors_of_several_devices_are_value_errors_and_nothing_is_sent():
    run_ranks(mixed, 2)


def test_every_collective_has_a_kernel_for_gpus():
    load()
    names = [f"phalanx::{form}{name}" for form in ("", "blocking_") for name in COLLECTIVES]
    names += [f"phalanx_ordered::{name}" for name in COLLECTIVES]
    others = ("wait_tensor", "wait_tensor_", "arena_view", "mm_into_", "all_gather_mms")
    names += [f"phalanx::{name}" for name in others]
    assert [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")] == []
