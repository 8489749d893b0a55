"""What test_hosts_network.py runs under torchrun, in each of its network namespaces."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fake_torch_cuda
import phalanx.collectives as pc
from phalanx.collectives import _registry, _torch_compat
from phalanx.collectives._hosts import span_on_gpus
from phalanx.core import PhalanxError, RevokedError
from staged import between_hosts


def over_gloo(group):
    """all_reduce and all_gather of the group as they are for GPUs, with gloo in the place of NCCL."""
    entry = _registry.entry_of(group)
    store = _torch_compat.PrefixStore("carried", _torch_compat.default_store())
    places, inside, limit_ms = entry.hosts.places, entry.hosts.inside, entry._timeout_ms
    made = span_on_gpus(entry.name, entry.ranks, places, inside, "gloo", store, limit_ms)
    return (
        lambda x, reduction, _: made.run("all_reduce", x, reduction),
        lambda x, _, __: made.run("all_gather_into_tensor", x, entry.size),
        made.close,
    )


def on_gpus(folder: Path) -> None:
    """Groups of the backend `phalanx` on the device of the tests, with gloo in the place of NCCL."""
    fake_torch_cuda.load()
    between_hosts()
    dist.init_process_group("cpu:phalanx,cuda:phalanx", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 100_000):
        values = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        done = values.cuda()
        dist.all_reduce(done)
        dist.all_reduce(values)
        assert torch.equal(done.cpu(), values)
        (folder / f"sum.{count}.{rank}").write_bytes(values.numpy().tobytes())
    got = torch.empty(size, device="cuda")
    dist.all_to_all_single(got, torch.arange(float(size), device="cuda") + 10 * rank)
    assert got.tolist() == [10.0 * each + rank for each in range(size)]
    given, taken = torch.full((1000,), float(rank), device="cuda"), torch.empty(1000, device="cuda")
    across = (rank + size // 2) % size
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, given, across), dist.P2POp(dist.irecv, taken, across)])
    for work in works:
        work.wait()
    assert taken.tolist() == [float(across)] * 1000
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, what: str) -> None:
    if what == "gpus":
        on_gpus(folder)
        return
    cut = what.endswith("cut")
    dist.init_process_group("gloo", timeout=timedelta(seconds=4 if cut else 60))
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert pc.enable_group(group) is True
    all_reduce, all_gather, close = pc.all_reduce, pc.all_gather_tensor, lambda: None
    if what.startswith("gloo"):
        all_reduce, all_gather, close = over_gloo(group)
    for count in (1, 1000, 100_000):
        values = [torch.randn(count, generator=torch.Generator().manual_seed(each)) for each in range(size)]
        done = all_reduce(values[rank], "sum", group) + 0
        torch.testing.assert_close(done, torch.stack(values).sum(0))
        (folder / f"sum.{count}.{rank}").write_bytes(done.numpy().tobytes())
        assert torch.equal(all_gather(values[rank], 0, group) + 0, torch.cat(values))
    text = ""
    if cut:
        try:
            (folder / f"ready.{rank}").touch()
            while True:
                all_reduce(torch.ones(4096), "sum", group).sum()
        except PhalanxError as error:
            text = f"{type(error).__name__}: {error}"
        began = time.monotonic()
        try:
            all_reduce(torch.ones(2), "sum", group).sum()
        except RevokedError:
            text += "\nrevoked"
        assert time.monotonic() - began < 1
        (folder / f"writing.{rank}").write_text(text)
        (folder / f"writing.{rank}").rename(folder / f"error.{rank}")  # there at once with all that is in it
        os._exit(0)  # torch.distributed cannot be destroyed in good order without the network
    dist.barrier()
    close()
    dist.destroy_process_group()
    (folder / f"done.{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
