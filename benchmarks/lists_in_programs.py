"""What programs do with lists of tensors and uneven parts, on the backend phalanx and on gloo, in turns in one process.

    .venv/bin/python benchmarks/lists_in_programs.py [--ranks 2,4] [--rounds 30] [--json FILE]

Two ranks have a core each; more ranks run on any. A cell is the median of a call in microseconds. accelerate and
lightning-fabric are measured where they are installed. Uneven shards are gathered by torch's DTensor on both, and by
phalanx.dtensor beside torch's DTensor on gloo; functional collectives are those of phalanx.collectives, and torch's on
gloo.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from list_forms import answer_of, pin, save, took
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _update_default_pg

import phalanx.collectives as pc

KIB, MIB = 1 << 10, 1 << 20
Case = tuple[str, str, Callable[[Any], Any]]  # its name, what it moves, and a call of it on a group


def cases(rank: int, ranks: int) -> Iterator[Case]:
    for nbytes in (KIB, MIB):
        objects: list[Any] = [None] * ranks
        yield (
            "all_gather_object",
            f"{nbytes} B",
            lambda g, o=objects, n=nbytes: dist.all_gather_object(o, b"x" * n, group=g),
        )
    for nbytes in (64 * KIB, 8 * MIB):
        x = torch.ones(nbytes // 4)
        if find_spec("accelerate"):
            from accelerate import PartialState
            from accelerate.utils import gather

            PartialState(cpu=True)
            yield "accelerate gather", f"{nbytes} B", lambda g, x=x, gather=gather: gather(x)
        if find_spec("lightning_fabric"):
            from lightning_fabric.utilities.distributed import _all_gather_ddp_if_available

            yield (
                "Lightning all_gather",
                f"{nbytes} B",
                lambda g, x=x, call=_all_gather_ddp_if_available: call(x, group=g),
            )
    yield from expert_steps(rank, ranks)
    yield from along_dims(ranks)
    yield from redistributions(rank, ranks)


def expert_steps(rank: int, ranks: int) -> Iterator[Case]:
    """Tokens of 1024 float32 go to the rank of their expert and come back; every rank has most for rank 0."""
    for tokens in (64, 2048):
        there = [
            tokens // ranks + (tokens // 4 if to == 0 else -(tokens // 4 // max(ranks - 1, 1))) for to in range(ranks)
        ]
        back = [there[rank]] * ranks
        x, y, z = (torch.ones(sum(rows), 1024) for rows in (there, back, there))
        y.zero_()

        def step(g: Any, x: Any = x, y: Any = y, z: Any = z, there: Any = there, back: Any = back) -> None:
            dist.all_to_all_single(y, x, back, there, group=g)
            dist.all_to_all_single(z, y, there, back, group=g)

        yield "expert step, uneven splits", f"{tokens} tokens", step


def along_dims(ranks: int) -> Iterator[Case]:
    """Parts of rows and of columns, joined, and summed apart."""
    for rows, columns in ((32, 512), (1024, 1024), (2048, 4096)):
        part = torch.ones(rows, columns)
        for dim in (0, 1):
            whole = torch.cat([part] * ranks, dim)

            def joined(g: Any, x: Any = part, dim: int = dim) -> Any:
                of = functional if dist.get_backend(g) == "gloo" else pc
                return of.wait_tensor(of.all_gather_tensor(x, dim, g))

            def summed(g: Any, x: Any = whole, dim: int = dim) -> Any:
                of = functional if dist.get_backend(g) == "gloo" else pc
                return of.wait_tensor(of.reduce_scatter_tensor(x, "sum", dim, g))

            yield f"all_gather_tensor, dim {dim}", f"{rows} x {columns}", joined
            yield f"reduce_scatter_tensor, dim {dim}", f"{rows} x {columns}", summed


def redistributions(rank: int, ranks: int) -> Iterator[Case]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    import phalanx.dtensor as pd

    for n in (512, 4096):
        rows = torch.ones(n // ranks, n)

        def turned(g: Any, rows: Any = rows) -> Any:
            mesh = DeviceMesh.from_group(g, "cpu")
            if dist.get_backend(g) == "gloo":
                x = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
                return x.redistribute(placements=[Shard(1)]).to_local()
            return pd.DTensor.from_local(rows, mesh, [pd.Shard(0)]).redistribute(placements=[pd.Shard(1)]).to_local()

        yield "Shard(0) to Shard(1)", f"{n} x {n}", turned
    length = 1024 * ranks - 1  # the last rank has one less
    meshes: dict[int, DeviceMesh] = {}
    for dim in (0, 1):
        own = 1024 - (rank == ranks - 1)
        mine = torch.ones((own, 256) if dim == 0 else (256, own))
        shape = torch.Size((length, 256) if dim == 0 else (256, length))

        def torchs(g: Any, mine: Any = mine, shape: Any = shape, dim: int = dim) -> Any:
            mesh = meshes.get(id(g)) or meshes.setdefault(id(g), DeviceMesh.from_group(g, "cpu"))
            stride = (shape[1], 1)
            x = DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
            return x.redistribute(placements=[Replicate()]).to_local().sum()

        def ours(g: Any, mine: Any = mine, shape: Any = shape, dim: int = dim, torchs: Any = torchs) -> Any:
            if dist.get_backend(g) == "gloo":
                return torchs(g)
            mesh = meshes.get(id(g)) or meshes.setdefault(id(g), DeviceMesh.from_group(g, "cpu"))
            x = pd.DTensor.from_local(mine, mesh, [pd.Shard(dim)], shape=shape, stride=(shape[1], 1))
            return x.redistribute(placements=[pd.Replicate()]).to_local().sum()

        moved = " x ".join(map(str, shape))
        yield f"uneven shards of dim {dim}, torch's DTensor", moved, torchs
        yield f"uneven shards of dim {dim}, phalanx.dtensor", moved, ours


def rank_main(rank: int, ranks: int, path: str, rounds: int, answers: Any) -> None:
    pin(rank, ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    gloo, ours = dist.group.WORLD, dist.new_group(backend="phalanx")
    rows = []
    for name, moved, call in cases(rank, ranks):
        times: dict[str, list[float]] = {"phalanx": [], "gloo": []}
        for turn in range(rounds + 3):
            for label, group in (("phalanx", ours), ("gloo", gloo)):
                _update_default_pg(group)  # some of them take the default group, whatever they are told
                spent = took(lambda g, _, call=call: call(g), group, False)
                if turn >= 3:
                    times[label].append(spent)
        _update_default_pg(gloo)
        rows.append({"ranks": ranks, "case": name, "moved": moved, **{k: median(v) for k, v in times.items()}})
    if rank == 0:
        answers.put(rows)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        rows += answer_of(rank_main, ranks, options.rounds)
    print(f"{'ranks':>5} {'case':42}{'moved':>14}{'phalanx us':>12}{'gloo us':>12}{'gloo/phalanx':>14}")
    for row in rows:
        print(
            f"{row['ranks']:5} {row['case']:42}{row['moved']:>14}{row['phalanx']:12.1f}{row['gloo']:12.1f}"
            f"{row['gloo'] / row['phalanx']:14.2f}"
        )
    save(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
