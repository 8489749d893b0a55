"""Lists of tensors on the backend `phalanx`: the core reads and writes them where they lie."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from c10d_groups import join, run_groups

FORMS = ("all_gather", "all_to_all", "gather", "scatter", "reduce_scatter")
DTYPES = (
    *(torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
    torch.float8_e4m3fnuz,  # which the core has not got
)


def separate(count, dtype, size):
    """Tensors that each have their own memory."""
    return [torch.zeros(3, count, dtype=dtype) for _ in range(size)]


def adjacent(count, dtype, size):
    """Views of one tensor, one after another."""
    return list(torch.zeros(3 * size, count, dtype=dtype).chunk(size))


def columns(count, dtype, size):
    """Slices of columns of one matrix, whose rows are long enough for the core or not."""
    return list(torch.zeros(3, size * count, dtype=dtype).chunk(size, 1)) if count else separate(count, dtype, size)


def steps(count, dtype, size):
    """Every `size`-th row of one matrix, and between them those of the others."""
    rows = torch.zeros(3 * size, count, dtype=dtype)
    return [rows[r::size] for r in range(size)]


def transposed(count, dtype, size):
    return [torch.zeros(count, 3, dtype=dtype).t() for _ in range(size)]


def mixed(count, dtype, size):
    """One in rows, one dense, one transposed, one with another distance of its rows, and so on."""
    kinds = [columns, separate, transposed, steps]
    return [kinds[r % len(kinds)](count, dtype, size)[r % 2] for r in range(size)]


LAYOUTS = (separate, adjacent, columns, steps, transposed, mixed)


def filled(tensor, value):
    """The tensor, with values that depend on the place in it and on `value`."""
    ramp = (torch.arange(tensor.numel()) % 3 + value).to(torch.float32).view(tensor.shape)
    with torch.no_grad():
        tensor.copy_(ramp.to(tensor.dtype))
    return tensor


def wanted(like, value):
    return filled(torch.empty(like.shape, dtype=like.dtype), value)


def bytes_in(tensor):
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def same(got, right):
    assert got.dtype == right.dtype and got.shape == right.shape
    assert torch.equal(bytes_in(got), bytes_in(right)), (got, right)


def code(sender, receiver=0):
    return sender * 4 + receiver


def start(form, rank, size, make, group=None):
    """Begin one collective on lists that `make` makes. Returns the work, what must live, and a check."""
    root = size - 1
    lists = make()
    options = {"group": group, "async_op": True}
    if form == "all_gather":
        mine = filled(make()[rank], code(rank))
        work = dist.all_gather(lists, mine, **options)
        return work, mine, lambda: [same(x, wanted(x, code(r))) for r, x in enumerate(lists)]
    if form == "all_to_all":
        inputs = [filled(x, code(rank, r)) for r, x in enumerate(make())]
        work = dist.all_to_all(lists, inputs, **options)
        return work, inputs, lambda: [same(x, wanted(x, code(r, rank))) for r, x in enumerate(lists)]
    if form == "gather":
        mine = filled(make()[rank], code(rank))
        work = dist.gather(mine, lists if rank == root else None, root, **options)
        return work, mine, lambda: rank != root or [same(x, wanted(x, code(r))) for r, x in enumerate(lists)]
    if form == "scatter":
        inputs = [filled(x, code(root, r)) for r, x in enumerate(lists)]
        out = make()[rank]
        work = dist.scatter(out, inputs if rank == root else None, root, **options)
        return work, inputs, lambda: same(out, wanted(out, code(root, rank)))
    inputs = [filled(x, code(rank, r)) for r, x in enumerate(lists)]
    out = make()[rank]
    work = dist.reduce_scatter(out, inputs, dist.ReduceOp.MAX, **options)
    return work, inputs, lambda: same(out, wanted(out, code(size - 1, rank)))


def one_layout(rank, size, layout, counts, dtypes):
    join(rank, size)
    for form in FORMS:
        for dtype in dtypes:
            if form == "reduce_scatter" and dtype in (torch.complex64, torch.float8_e4m3fnuz):
                continue
            for count in counts:
                work, _, check = start(form, rank, size, lambda c=count, d=dtype: layout(c, d, size))
                work.wait()
                check()
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_list_may_lie_in_any_way(layout, size):
    run_groups(one_layout, size, layout, (0, 1, 5, 64, 3000), DTYPES if size == 2 else DTYPES[:1], timeout=120)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_long_lists_may_lie_in_any_way(layout):
    run_groups(one_layout, 2, layout, (700_001,), (torch.float32,), timeout=120)


def many_in_flight(rank, size):
    join(rank, size)
    for layout in LAYOUTS:
        for count in (7, 40_000):
            begun = [
                start(form, rank, size, lambda c=count, m=layout: m(c, torch.float32, size))
                for _ in range(6)
                for form in FORMS
            ]
            for work, inputs, check in begun:
                work.wait()
                for x in inputs if isinstance(inputs, list) else [inputs]:
                    x.fill_(-1)  # no rank reads it any more, or has a copy
                assert work.is_completed() and work.is_success()
                check()
    for _ in range(20):  # dropped works keep what they read and write
        dist.all_gather([torch.empty(50_000) for _ in range(size)], torch.ones(50_000), async_op=True)
        dist.all_to_all(transposed(500, torch.float32, size), transposed(500, torch.float32, size), async_op=True)
    dist.barrier()
    dist.destroy_process_group()


def test_many_lists_in_flight_do_not_share_scratch():
    run_groups(many_in_flight, 3, timeout=120)


def pairs_of(rank, size):
    """The pairs (sender, receiver) of what a rank sends, and of what it gets."""
    return [(rank, r) for r in range(size)], [(r, rank) for r in range(size)]


def uneven(rank, size):
    join(rank, size)
    for layout in LAYOUTS:
        for scale in (1, 40, 30_000):
            sizes = [scale * r for r in range(size)]  # rank 0 has nothing
            outs = [layout(sizes[r], torch.float32, size)[r] for r in range(size)]
            mine = filled(layout(sizes[rank], torch.float32, size)[rank], code(rank))
            dist.all_gather(outs, mine)
            for r, out in enumerate(outs):
                same(out, wanted(out, code(r)))
            inputs = [filled(layout(sizes[r], torch.float32, size)[r], code(rank, r)) for r in range(size)]
            out = layout(sizes[rank], torch.float32, size)[rank]
            dist.reduce_scatter(out, inputs, dist.ReduceOp.MAX)
            same(out, wanted(out, code(size - 1, rank)))
            sent, got = ([scale * ((2 * a + b) % 3) for a, b in pairs] for pairs in pairs_of(rank, size))
            inputs = [filled(layout(n, torch.float32, size)[0], code(rank, r)) for r, n in enumerate(sent)]
            outs = [layout(n, torch.float32, size)[0] for n in got]
            dist.all_to_all(outs, inputs)
            for r, out in enumerate(outs):
                same(out, wanted(out, code(r, rank)))
    dist.destroy_process_group()


def test_lists_may_be_uneven():
    run_groups(uneven, 3)


def shared(rank, size):
    join(rank, size)
    for count in (1, 100, 50_000):
        x = torch.full((count,), float(rank))
        outs = [torch.zeros(count) for _ in range(size)]
        dist.all_to_all(outs, [x] * size)  # one tensor for everybody
        assert [out[-1].item() for out in outs] == list(range(size))
        out = torch.zeros(count)
        dist.reduce_scatter(out, [x] * size)
        assert (out == sum(range(size))).all()
        dist.scatter(out, [x] * size if rank == 1 else None, 1)
        assert (out == 1).all()
        # Each rank's own block is the other side's tensor too.
        outs = [torch.full((count,), float(rank)) for _ in range(size)]
        dist.all_gather(outs, outs[rank])
        assert [o[-1].item() for o in outs] == list(range(size))
        outs = [torch.full((count,), float(rank)) for _ in range(size)]
        dist.gather(outs[rank], outs if rank == 0 else None, 0)
        assert rank != 0 or [o[-1].item() for o in outs] == list(range(size))
        ins = [torch.full((count,), float(10 * rank + r)) for r in range(size)]
        dist.scatter(ins[rank], ins if rank == 0 else None, 0)
        assert (ins[rank] == rank).all()
        ins = [torch.full((count,), float(10 * rank + r)) for r in range(size)]
        dist.reduce_scatter(ins[rank], ins)
        assert (ins[rank] == sum(10 * r + rank for r in range(size))).all()
        # What is read is elsewhere written.
        outs = [torch.full((count,), float(rank)) for _ in range(size)]
        dist.all_gather(outs, outs[(rank + 1) % size])
        assert [o[-1].item() for o in outs] == list(range(size))
        ins = [torch.full((count,), float(10 * rank + r)) for r in range(size)]
        dist.reduce_scatter(ins[(rank + 1) % size], ins)
        assert (ins[(rank + 1) % size] == sum(10 * r + rank for r in range(size))).all()
        blocks = [torch.full((count,), float(10 * rank + r)) for r in range(size)]
        dist.all_to_all(blocks, blocks[::-1])
        assert [b[0].item() for b in blocks] == [10 * r + size - 1 - rank for r in range(size)]
        matrix = torch.full((64, size * 16), float(rank))
        dist.all_gather(list(matrix.chunk(size, 1)), matrix.chunk(size, 1)[(rank + 1) % size])
        assert matrix[-1, ::16].tolist() == list(range(size))
    dist.destroy_process_group()


def test_a_list_may_share_memory_with_what_is_read():
    run_groups(shared, 3)


def other_forms(rank, size):
    join(rank, size)
    for count in (3, 5000):
        mine, whole = torch.full((count,), float(rank)), torch.zeros(size * count)
        outs = [torch.zeros(count) for _ in range(size)] if rank == 0 else list(whole.chunk(size))
        if rank == 0:
            dist.all_gather(outs, mine)
        else:
            dist.all_gather_into_tensor(whole, mine)
        assert [out[-1].item() for out in outs] == list(range(size))
        sent = torch.arange(float(size)).repeat_interleave(count) + 10 * rank
        out = torch.zeros(count)
        if rank == 0:
            dist.reduce_scatter(out, [x.clone() for x in sent.chunk(size)])
        else:
            dist.reduce_scatter_tensor(out, sent)
        assert (out == sum(10 * r + rank for r in range(size))).all()
        if rank == 0:
            outs = [torch.zeros(count) for _ in range(size)]
            dist.all_to_all(outs, [x.clone() for x in sent.chunk(size)])
        else:
            dist.all_to_all_single(whole, sent)
        assert [x[0].item() for x in (outs if rank == 0 else whole.chunk(size))] == [10 * r + rank for r in range(size)]
    for op, right in ((dist.ReduceOp.AVG, 2.0), (dist._make_nccl_premul_sum(0.5), 3.0)):
        out = torch.zeros(4)
        dist.reduce_scatter(out, [torch.full((4,), 2.0 * rank) for _ in range(size)], op)
        assert out.tolist() == [right] * 4
    dist.destroy_process_group()


def test_ranks_may_call_other_forms_of_a_collective():
    run_groups(other_forms, 3)


def refused(rank, size):
    join(rank, size)
    x = torch.zeros(4)
    group = dist.group.WORLD
    options = dist.distributed_c10d
    wrong = {  # below the checks of torch.distributed, which are made on each rank for itself
        "give 3, one for each": lambda: group.allgather([[x.clone()] * (size + 1)], [x], options.AllgatherOptions()),
        "dtypes": lambda: group.allgather(
            [[torch.zeros(4, dtype=torch.int32) for _ in range(size)]], [x], options.AllgatherOptions()
        ),
        "elements": lambda: group.allgather([[torch.zeros(5) for _ in range(size)]], [x], options.AllgatherOptions()),
        "give 3, one for each ": lambda: group.alltoall([x] * (size - 1), [x] * size, options.AllToAllOptions()),
        "elements ": lambda: group.reduce_scatter([x], [[torch.zeros(3)] * size], options.ReduceScatterOptions()),
    }
    for text, call in wrong.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert text.strip() in str(caught.value), caught.value
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
    call = wrong["elements"] if rank == 1 else lambda: dist.all_gather([x.clone() for _ in range(size)], x)
    with pytest.raises(RuntimeError, match="elements" if rank == 1 else "rank 1 .*refused its own call"):
        call()
    store = options._get_default_store()  # a rank that leaves now could be what the others report
    store.set(f"caught {rank}", "")
    store.wait([f"caught {other}" for other in range(size)])
    dist.destroy_process_group()


def mismatch(rank, size):
    join(rank, size)
    sent = [torch.ones(2 if rank == 0 and r == 1 else 1) for r in range(size)]
    with pytest.raises(RuntimeError, match="group rank 0 sends 2 elements to group rank 1, which expects 1"):
        dist.all_to_all([torch.zeros(1) for _ in range(size)], sent)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.destroy_process_group()


def test_wrong_lists_are_refused():
    run_groups(refused, 3)


def test_lists_whose_counts_do_not_agree_are_refused_on_all_ranks_and_the_group_works_on():
    run_groups(mismatch, 3)


def ops_of(call):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    return {event.name for event in profiled.events() if event.name.startswith("aten::")}


def nothing_made(rank, size):
    join(rank, size)
    for layout in (separate, adjacent, columns, steps):
        for form in FORMS:
            make = lambda m=layout: m(256, torch.float32, size)  # noqa: E731
            start(form, rank, size, make)[0].wait()
            # The single side of a collective is not a list: it is dense here.
            outs, ins, one = make(), make(), torch.zeros(make()[rank].shape)
            calls = {
                "all_gather": lambda outs=outs, one=one: dist.all_gather(outs, one),
                "all_to_all": lambda outs=outs, ins=ins: dist.all_to_all(outs, ins),
                "gather": lambda outs=outs, one=one: dist.gather(one, outs if rank == 0 else None, 0),
                "scatter": lambda ins=ins, one=one: dist.scatter(one, ins if rank == 0 else None, 0),
                "reduce_scatter": lambda ins=ins, one=one: dist.reduce_scatter(one, ins),
            }
            made = ops_of(calls[form]) & {"aten::empty", "aten::cat", "aten::copy_", "aten::clone", "aten::narrow"}
            assert not made, (layout.__name__, form, made)
    outs, ins = transposed(64, torch.float32, size), transposed(64, torch.float32, size)
    dist.all_to_all(outs, ins)
    made = ops_of(lambda: dist.all_to_all(outs, ins))  # through scratch that is there already
    assert "aten::copy_" in made and not made & {"aten::cat", "aten::empty", "aten::clone"}, made
    dist.destroy_process_group()


def test_no_flat_copy_is_made():
    run_groups(nothing_made, 2)
