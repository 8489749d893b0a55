"""What others may bring: a backend of their own, a build of the core, a process group in Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import run_groups
from phalanx.core._lib import library_path
from ranks import scratch


def make_wire(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def other_transport(rank, size):
    """A backend that this package has never heard of."""
    dist.Backend.register_backend("wire", make_wire, devices=["cpu"])
    dist.init_process_group("wire", init_method=f"file://{scratch() / 'store'}", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert pc.enable_group(group) is False
    x = torch.arange(2.0 * size) + rank
    total = torch.arange(2.0 * size) * size + sum(range(size))
    assert torch.equal(pc.all_reduce(x, "sum", group) + 0, total)
    assert torch.equal(pc.reduce_scatter_tensor(x, "sum", 0, group) + 0, total.chunk(size)[rank])
    assert pc.all_gather_tensor(x[:1], 0, group).tolist() == list(range(size))
    assert torch.equal(pc.broadcast(x, 1, group) + 0, torch.arange(2.0 * size) + 1)
    with pc.coalescing_manager(group):
        y, z = pc.all_reduce(x, "max", group), pc.all_reduce(x, "sum", group)
    assert torch.equal(y + 0, torch.arange(2.0 * size) + size - 1) and torch.equal(z + 0, total)
    work = pc.isend(x, (rank + 1) % size)
    pc.recv(got := torch.empty(2 * size), (rank - 1) % size)
    assert work.wait() and got[0] == (rank - 1) % size
    graph = torch.compile(lambda t: pc.all_reduce(t, "sum", group) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(x), 2 * total)
    pc.barrier()
    # The backend `phalanx` beside it: its ranks meet through what the other one has.
    ours = dist.new_group(backend="phalanx")
    dist.all_reduce(x, group=ours)
    assert torch.equal(x, total) and pc.is_core_group(ours) is False
    pc.enable_group(ours)
    assert pc.is_core_group(ours)
    dist.destroy_process_group()


def test_collectives_go_through_a_backend_of_somebody_else():  # P26
    run_groups(other_transport, 2)


def test_a_build_of_the_core_is_taken_by_its_path(tmp_path):  # P26
    ops = library_path.with_name("libphalanx_torch.so")
    if not ops.is_file():
        pytest.skip("needs libphalanx_torch.so beside libphalanx.so.0")
    for each in (Path(library_path), ops):
        shutil.copy(each, tmp_path / each.name)
    mine = tmp_path / Path(library_path).name
    code = (
        "import phalanx.collectives as pc, torch\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'libphalanx' in line}\n"
        f"assert maps == {{{str(mine)!r}, {str(tmp_path / ops.name)!r}}}, maps\n"
        "assert torch.ops.phalanx.all_reduce.default._schema.name == 'phalanx::all_reduce'\n"
    )
    env = {**os.environ, "PHALANX_LIBRARY": str(mine), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
