"""Large results on the host lie in memory of earlier ones (ADR 59)."""

from pathlib import Path

import torch
import torch.distributed as dist

import phalanx.collectives as pc
from ranks import run_ranks

MEBIBYTE = 1 << 20


def reduced(numel):
    result = pc.all_reduce(torch.ones(numel), "sum", dist.group.WORLD).wait()
    assert result.eq(dist.get_world_size()).all()
    return result


def lazily_free():
    """Bytes that the system may take back at any time."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("LazyFree:"))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory_is_used_again(rank, size):
    first = reduced(2 * MEBIBYTE)
    place = first.data_ptr()
    second = reduced(2 * MEBIBYTE)
    assert second.data_ptr() != place  # the first one is alive
    view = first[5:]
    del first
    assert reduced(2 * MEBIBYTE).data_ptr() != place  # a view is
    del view
    again = reduced(2 * MEBIBYTE - 100)
    assert again.data_ptr() == place
    assert again.eq(size).all()
    gathered = pc.all_gather_tensor(torch.full((MEBIBYTE, 2), float(rank)), 0, dist.group.WORLD).wait()
    assert all(part.eq(at).all() for at, part in enumerate(gathered.chunk(size)))
    assert gathered.untyped_storage().nbytes() == gathered.nbytes


def what_is_free_goes_when_memory_is_short_and_has_a_bound(rank, size):
    reduced(16 * MEBIBYTE)  # the group touches its own memory
    before = resident()
    results = [reduced(16 * MEBIBYTE) for _ in range(6)]  # 64 MiB each
    assert lazily_free() < 64 * MEBIBYTE
    results.clear()
    assert lazily_free() >= 200 * MEBIBYTE
    assert resident() - before < 300 * MEBIBYTE  # 384 were alive, and 256 are kept
    huge = reduced(68 * MEBIBYTE)  # more than what is kept at most is torch's own
    del huge
    assert resident() - before < 300 * MEBIBYTE


def a_result_is_a_tensor_as_any_other(rank, size):
    result = reduced(2 * MEBIBYTE)
    assert not result.requires_grad and result.is_contiguous() and result.device.type == "cpu"
    moved = result.share_memory_()
    assert moved.is_shared() and moved.eq(size).all()
    with torch.inference_mode():
        assert reduced(2 * MEBIBYTE).is_inference()
    weight = torch.ones(2 * MEBIBYTE, requires_grad=True)
    pc.all_reduce(weight, "sum", dist.group.WORLD).sum().backward()
    assert weight.grad.eq(size).all()


def test_memory_is_used_again():
    run_ranks(memory_is_used_again, 2, start_torch=True)


def test_what_is_free_goes_when_memory_is_short_and_has_a_bound():
    run_ranks(what_is_free_goes_when_memory_is_short_and_has_a_bound, 2, start_torch=True)


def test_a_result_is_a_tensor_as_any_other():
    run_ranks(a_result_is_a_tensor_as_any_other, 2, start_torch=True)
