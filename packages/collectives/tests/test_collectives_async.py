"""AsyncCollectiveTensor and the work behind it."""

import copy
import gc
import io
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.core import load_torch_ops
from ranks import run_ranks

MANY = 1_000_000 if os.environ.get("PHALANX_TEST_HUGE") == "1" else 20_000


def pending_count():
    return load_torch_ops().lib.phxt_pending_count()


def started(rank, count=8, dtype=torch.float32):
    result = pc.all_reduce(torch.arange(count, dtype=dtype) + rank, "sum", dist.group.WORLD)
    assert type(result) is pc.AsyncCollectiveTensor
    return result


def expected(size, count=8, dtype=torch.float32):
    return torch.arange(count, dtype=dtype) * size + sum(range(size))


def metadata(rank, size):
    dist.barrier()
    pc.enable_group(dist.group.WORLD)
    x = torch.zeros(3, 4, dtype=torch.float64)
    before = pending_count()
    result = pc.all_gather_tensor(x, 0, dist.group.WORLD)  # A1
    assert isinstance(result, pc.AsyncCollectiveTensor) and isinstance(result, torch.Tensor)
    assert result.shape == (3 * size, 4) and result.stride() == (4, 1) and result.storage_offset() == 0
    assert result.dtype == torch.float64 and result.layout == torch.strided and result.device == torch.device("cpu")
    assert result.numel() == 12 * size and result.is_contiguous() and not result.requires_grad
    assert not result.completed and pending_count() == before + 1  # nothing of this has waited
    view = result.view(-1)[4:]  # A10
    part = result[1:2].transpose(0, 1)
    pieces = result.chunk(3)
    for each in (view, part, *pieces, result.detach(), result.reshape(2, -1), result.unsqueeze(0)):
        assert type(each) is pc.AsyncCollectiveTensor and not each.completed
    assert view.shape == (12 * size - 4,) and part.shape == (4, 1) and part.stride() == (1, 4)
    assert part.storage_offset() == 4
    assert pending_count() == before + 1
    assert view.sum().item() == 0  # waits
    assert pending_count() == before
    assert type(result + 1) is torch.Tensor
    assert type(result[0]) is torch.Tensor  # complete: views are ordinary tensors
    assert result.completed


def test_a_pending_tensor_and_its_views_tell_their_metadata_without_waiting():  # A1, A10
    run_ranks(metadata, 2, start_torch=True)


def uses(rank, size):
    wanted = expected(size)
    y = started(rank)
    assert torch.equal(y + 1, wanted + 1) and type(y + 1) is torch.Tensor  # A2
    assert torch.equal(torch.stack([started(rank), started(rank)]), torch.stack([wanted, wanted]))  # in a list
    assert torch.equal(torch.add(torch.ones(8), other=started(rank)), wanted + 1)  # in kwargs
    assert torch.equal(
        torch.where(started(rank) > 8, started(rank), 0 * started(rank)), torch.where(wanted > 8, wanted, 0 * wanted)
    )
    assert torch.equal(torch.cat((started(rank), torch.ones(1))), torch.cat((wanted, torch.ones(1))))
    index = started(rank, 4, torch.int64)
    table = torch.arange(100.0)
    assert torch.equal(table[index], table[expected(size, 4, torch.int64)])  # in a list of indices
    out = torch.zeros(8)
    assert torch.equal(torch.add(started(rank), 1, out=out), wanted + 1)
    z = started(rank)
    z += 1
    assert torch.equal(z, wanted + 1)
    assert torch.equal(torch.empty(8).copy_(started(rank)), wanted)
    cast = started(rank).to(torch.float64)  # A10: a cast waits
    assert type(cast) is torch.Tensor and torch.equal(cast, wanted.double())
    assert torch.equal(started(rank).half(), wanted.half())
    assert torch.nn.functional.linear(started(rank), torch.ones(1, 8)).item() == wanted.sum()
    # A3, A11
    assert repr(started(rank)).startswith("AsyncCollectiveTensor(tensor([")
    assert f"{started(rank, 1).wait()}" in f"{started(rank, 1)}"
    assert started(rank).tolist() == wanted.tolist()
    assert (started(rank).numpy() == wanted.numpy()).all()
    assert (torch.from_dlpack(started(rank)) == wanted).all()
    y = started(rank)
    address = y.data_ptr()
    assert y.completed and address == y.wait().data_ptr() != 0
    assert started(rank, 1).item() == sum(range(size)) and float(started(rank, 1)) == sum(range(size))
    for copied in (pickle.loads(pickle.dumps(started(rank))), copy.deepcopy(started(rank)), copy.copy(started(rank))):
        assert type(copied) is torch.Tensor and torch.equal(copied, wanted)
    file = io.BytesIO()
    torch.save(started(rank), file)
    file.seek(0)
    assert torch.equal(torch.load(file), wanted)
    assert [x.item() for x in started(rank)] == wanted.tolist()
    assert len(started(rank)) == 8
    y = started(rank)
    assert y.wait() is y.wait() is y.trigger_wait() is pc.wait_tensor(y)  # F4
    assert type(pc.wait_tensor(y)) is torch.Tensor
    plain = torch.ones(2)
    assert pc.wait_tensor(plain) is plain
    assert pending_count() == 0  # A9


def test_every_use_waits_and_gives_ordinary_tensors():  # A2, A3, A9, A10, A11, F4, F5
    run_ranks(uses, 2, start_torch=True)


def memory():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def dropped(rank, size):
    y = started(rank)
    assert pending_count() == 1
    del y
    gc.collect()
    assert pending_count() == 0  # A6
    y = started(rank)
    view = y[2:]
    del y
    assert pending_count() == 1  # the view still needs it
    assert torch.equal(view + 0, expected(size)[2:])
    started(rank)
    before = memory()
    for _ in range(MANY):  # A9
        started(rank)
    assert pending_count() == 0
    assert memory() - before < 8 << 20


def test_a_dropped_result_is_waited_for():  # A6, A9
    run_ranks(dropped, 2, start_torch=True)


def nothing_to_receive(rank, size):
    """Rank 0 gives all it has, gets nothing, and waits for what has no memory."""
    dist.barrier()
    pc.enable_group(dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    for count in (4, 100_000):
        given = torch.full((count,), float(rank)) if rank == 0 else torch.empty(0)
        sent = [0, count] if rank == 0 else [0, 0]
        received = [0, 0] if rank == 0 else [count, 0]
        result = pc.wait_tensor(pc.all_to_all_single(given, received, sent, dist.group.WORLD))
        if rank == 0:
            assert result.numel() == 0
            store.wait([f"got {count}"])  # without a call of ours
        else:
            assert torch.equal(result, torch.zeros(count))
            store.set(f"got {count}", "")
    assert pending_count() == 0


def test_who_receives_nothing_does_not_hold_the_others_up():  # A5
    run_ranks(nothing_to_receive, 2, start_torch=True)


def reused_addresses(rank, size):
    for i in range(300):  # A5: buffers come back at the same address all the time
        kept = started(rank, 16 + i % 3)
        view = kept.view(-1)
        waited = kept.wait()
        again = started(rank, 16 + i % 3)
        del kept, view
        assert torch.equal(waited, expected(size, 16 + i % 3))
        assert torch.equal(again + 0, expected(size, 16 + i % 3))


def test_an_old_result_does_not_disturb_a_newer_one_at_its_address():  # A4, A5
    run_ranks(reused_addresses, 2, start_torch=True)


def made_by_hand(rank, size):
    with pytest.warns(UserWarning, match="no collective is pending"):  # A7
        y = pc.AsyncCollectiveTensor(torch.ones(3))
    assert torch.equal(y + 0, torch.ones(3))
    elem = started(rank).elem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native = torch.ops.phalanx.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
        y = pc.AsyncCollectiveTensor(native)
    assert (y + 0).tolist() == [float(size)] * 3
    assert elem.shape == (8,)
    # A8: work of torch.distributed, as generated code registers it
    x = torch.full((4,), float(rank))
    pc._register_tensor_work(x, dist.all_reduce(x, async_op=True))
    assert pc.wait_tensor(x) is x
    assert x.tolist() == [float(sum(range(size)))] * 4


def test_wrappers_and_works_can_be_made_by_hand():  # A7, A8
    run_ranks(made_by_hand, 2, start_torch=True)


def no_grad_and_modes(rank, size):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    pc.enable_group(dist.group.WORLD)
    with Names() as mode:
        assert torch.equal(started(rank) + 0, expected(size))
    assert "phalanx::all_reduce" in mode.names  # F19: modes see one op
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started(rank).wait()
    assert any(event.name == "phalanx::all_reduce" for event in profile.events())


def test_modes_and_profilers_see_the_ops():  # F19
    run_ranks(no_grad_and_modes, 2, start_torch=True)
