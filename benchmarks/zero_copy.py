"""Collectives on tensors in symmetric memory, which are read where they lie, beside ordinary ones, in turns.

    .venv/bin/python benchmarks/zero_copy.py [--ranks 2] [--sizes 8k,64k,1m,16m,64m] [--rounds 30] [--json FILE]

The calls are the same for both, those of the C library that every collective of phalanx.collectives makes. Sizes are
bytes of a rank's input. Each rank has a core of its own as far as there are enough. Every round writes the inputs anew,
makes each call several times (once from 1 MiB on), in an order drawn for that round, and checks what comes out.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx import symm_mem
from phalanx.core import DType, Group, ReduceOp
from phalanx.core._lib import ffi, lib
from phalanx.core.errors import check

SUFFIXES = {"k": 1 << 10, "m": 1 << 20}
SEVERAL = 10  # calls of less than 1 MiB in a row
LISTED = 8  # calls that are coalesced; each has this part of the input

Call = Callable[[np.ndarray], np.ndarray]


def calls(core: Group, size: int) -> dict[str, Call]:
    """By name, for inputs of so many bytes. Results of sums have group_size in every element, the others ones."""
    n, count = core.group_size, size // 4
    whole, part, all_of_them = (np.ones(k, np.float32) for k in (count, count // n, count * n))
    f32, end = int(DType.FLOAT32), (ffi.NULL, ffi.NULL)
    plus, mean = int(ReduceOp.SUM), int(ReduceOp.AVG)

    def address(array: np.ndarray) -> Any:
        return ffi.cast("void *", array.ctypes.data)

    def into(out: np.ndarray | None, call: Any, *arguments: int) -> Call:
        pointers: dict[int, tuple[Any, Any]] = {}

        def run(tensor: np.ndarray) -> np.ndarray:
            into = tensor if out is None else out
            known = pointers.get(id(tensor))
            if known is None:
                known = pointers[id(tensor)] = (address(tensor), address(into))
            check(call(core.pointer, *known, *arguments, *end))
            return into

        return run

    def broadcast(tensor: np.ndarray) -> np.ndarray:
        check(lib.phx_broadcast(core.pointer, address(tensor), count, f32, 0, *end))
        return tensor

    def listed(kind: int, op: int, out: np.ndarray | None) -> Call:
        """LISTED calls of one kind as one, each on a part of the tensor."""
        rows: dict[int, Any] = {}

        def run(tensor: np.ndarray) -> np.ndarray:
            into = tensor if out is None else out
            calls = rows.get(id(tensor))
            if calls is None:
                calls = rows[id(tensor)] = ffi.new("phx_call[]", LISTED)
                for call, given, gets in zip(calls, np.split(tensor, LISTED), np.split(into, LISTED), strict=True):
                    call.struct_size, call.kind, call.dtype, call.op = ffi.sizeof("phx_call"), kind, f32, op
                    call.count = count // LISTED
                    setattr(call, "in", address(given))
                    call.out = address(gets)
            check(lib.phx_coalesced(core.pointer, calls, LISTED, *end))
            return into

        return run

    return {
        "all_reduce": into(whole, lib.phx_all_reduce, count, f32, plus),
        "all_reduce in place": into(None, lib.phx_all_reduce, count, f32, mean),
        "all_gather": into(all_of_them, lib.phx_all_gather, count, f32),
        "reduce_scatter": into(part, lib.phx_reduce_scatter, count // n, f32, plus),
        "all_to_all": into(whole, lib.phx_all_to_all, count // n, f32),
        "broadcast": broadcast,
        "scatter": into(part, lib.phx_scatter, count // n, f32, 0),
        f"{LISTED} all_reduces in place": listed(lib.PHX_CALL_ALL_REDUCE, mean, None),
        f"{LISTED} all_gathers": listed(lib.PHX_CALL_ALL_GATHER, 0, all_of_them),
    }


def measure(sizes: list[int], rounds: int) -> list[dict[str, object]]:
    group = dist.group.WORLD
    assert group is not None
    core = pc.core_group(group)
    assert core is not None, "the ranks share no memory"
    draw = random.Random(3)  # the same order on all ranks
    rows: list[dict[str, object]] = []
    for size in sizes:
        ordinary = torch.empty(size // 4)
        shared = symm_mem.empty(size // 4, dtype=torch.float32)
        symm_mem.rendezvous(shared, group)
        inputs = {"ordinary": ordinary.numpy(), "symmetric": shared.numpy()}
        by_name = calls(core, size)
        took: dict[tuple[str, str], list[float]] = {(name, where): [] for name in by_name for where in inputs}
        copies = dict.fromkeys(took, 0)
        times = 1 if size >= 1 << 20 else SEVERAL
        for turn in range(rounds + 3):
            for name, where in draw.sample(list(took), len(took)):
                tensor = inputs[where]
                tensor.fill(1)
                sums = name in ("all_reduce", "reduce_scatter")
                before = core.zero_copies
                dist.barrier()
                began = time.perf_counter()
                for _ in range(times):
                    done = by_name[name](tensor)
                end = time.perf_counter()
                assert (done == (dist.get_world_size() if sums else 1)).all(), (name, where, size)
                if turn >= 3:
                    took[name, where].append((end - began) / times * 1e6)
                    copies[name, where] += core.zero_copies - before
        for name in by_name:
            us = {where: median(took[name, where]) for where in inputs}
            share = copies[name, "symmetric"] / (rounds * times) / (LISTED if name.startswith(f"{LISTED} ") else 1)
            rows.append({"collective": name, "bytes": size, "us": us, "share_without_copy": share})
    return rows


def run_rank(rank: int, size: int, folder: str, sizes: list[int], rounds: int, output: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    rows = measure(sizes, rounds)
    if rank == 0:
        for row in rows:
            us = row["us"]
            assert isinstance(us, dict)
            print(
                f"{row['collective']:22} {row['bytes']:>9} bytes: ordinary {us['ordinary']:10,.1f} us, symmetric "
                f"{us['symmetric']:10,.1f} us ({us['ordinary'] / us['symmetric']:.2f}x), "
                f"{row['share_without_copy']:.0%} without a copy"
            )
        if output:
            about = {"ranks": size, "rounds": rounds, "cores": os.cpu_count(), "torch": torch.__version__}
            Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def bytes_of(text: str) -> int:
    return int(text[:-1]) * SUFFIXES[text[-1]] if text[-1] in SUFFIXES else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="8k,64k,256k,1m,4m,16m,64m")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = [bytes_of(each) for each in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, folder, sizes, options.rounds, options.json)
        torch.multiprocessing.spawn(run_rank, args=arguments, nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
