"""A compiled tensor-parallel block: the plug-in beside stock Inductor over two backends, and beside no communication.

    python benchmarks/compiled_block.py [--hidden 1024 2048 4096] [--tokens 1 8 32 128 512]
                                        [--dtypes float32 bfloat16] [--seconds 3] [--memory] [--json FILE]

Attention and an MLP, each after a norm, without gradients. Two ranks on a core each, with half of the heads and half of
the MLP, so that two sums over the ranks are left. They are those of torch.distributed._functional_collectives: the same
function is compiled in four ways, which take turns within the same two processes.

- gloo: torch.compile as it is, over gloo;
- phalanx: torch.compile as it is, over the backend `phalanx` of torch.distributed;
- plug-in: torch.compile(backend="phalanx") over that group;
- alone: torch.compile as it is, and the sums are left out. No way of communicating can be faster, but for noise.

Every result of the first three is compared with that of one process with the whole weights, outside the measured time.
A time is that of the slower rank. `plug-in / alone` and `gloo / plug-in` are medians of the ratios of a round.

With --memory, one more row: peak memory of a process that runs one variant only, and the bytes of its arena.
"""

import argparse
import datetime
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.nn import functional

import phalanx.collectives as pc

RANKS = 2
HEAD = 64  # features of a head
VARIANTS = ("gloo", "phalanx", "plug-in", "alone")
INPUTS = 4  # that take turns, so that nobody finds what it left in memory right
WARM_UP, LEAST_ROUNDS, MOST_ROUNDS = 2, 12, 2000
# Of the greatest element of the result: what the order of sums explains, with room.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
MEMORY_ROW = (1024, 512, "float32")

Sum = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[torch.Tensor], torch.Tensor]


# ---- the block -------------------------------------------------------------------------------------------------------


def block(x: torch.Tensor, weights: list[torch.Tensor], total: Sum) -> torch.Tensor:
    """x: [tokens, hidden]. weights: norm, qkv, out, norm, up, down, whole or a rank's part; total: adds up parts."""
    norm1, qkv, out, norm2, up, down = weights
    tokens, hidden = x.shape
    heads = functional.linear(functional.rms_norm(x, (hidden,), norm1), qkv).view(tokens, -1, 3, HEAD)
    query, key, value = heads.permute(2, 1, 0, 3).unbind()  # each [heads, tokens, HEAD]
    mixed = functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
    x = x + total(functional.linear(mixed.transpose(0, 1).reshape(tokens, -1), out))
    wide = functional.gelu(functional.linear(functional.rms_norm(x, (hidden,), norm2), up))
    return x + total(functional.linear(wide, down))


def whole_weights(hidden: int, name: str) -> list[torch.Tensor]:
    dtype = getattr(torch, name)
    drawn = torch.Generator().manual_seed(1)

    def made(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=drawn) / columns**0.5).to(dtype)

    ones = torch.ones(hidden, dtype=dtype)
    attention = [ones, made(3 * hidden, hidden), made(hidden, hidden)]
    return [*attention, ones.clone(), made(4 * hidden, hidden), made(hidden, 4 * hidden)]


def part_of(whole: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Rows of the first of two products, columns of the second."""
    norm1, qkv, out, norm2, up, down = whole
    rows, columns = (partial(torch.Tensor.chunk, chunks=RANKS, dim=dim) for dim in (0, 1))
    own = [norm1, rows(qkv)[rank], columns(out)[rank], norm2, rows(up)[rank], columns(down)[rank]]
    return [each.clone(memory_format=torch.contiguous_format) for each in own]


def compiled(who: str, weights: list[torch.Tensor], groups: dict[str, Any]) -> Run:
    group = groups.get("gloo" if who == "gloo" else "phalanx")

    def total(part: torch.Tensor) -> torch.Tensor:
        return part if who == "alone" else functional_collectives.all_reduce(part, "sum", group)

    # A code object of its own, so that no call goes through the guards of another variant.
    function = types.FunctionType(block.__code__.replace(co_name=f"block_{VARIANTS.index(who)}"), block.__globals__)
    backend = "phalanx" if who == "plug-in" else "inductor"
    call = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return lambda x: call(x, weights, total)


# ---- measuring -------------------------------------------------------------------------------------------------------


class Row:
    """One row of the table on one rank: the variants, inputs, and what must come out."""

    def __init__(self, tokens: int, whole: list[torch.Tensor], groups: dict[str, Any], who: tuple[str, ...]) -> None:
        hidden, self.dtype = len(whole[0]), whole[0].dtype
        self.what = {"hidden": hidden, "tokens": tokens, "dtype": str(self.dtype).removeprefix("torch.")}
        torch._dynamo.reset()
        drawn = torch.Generator().manual_seed(tokens)
        self.inputs = [torch.randn(tokens, hidden, generator=drawn).to(self.dtype) for _ in range(INPUTS)]
        self.expected = [block(x, whole, lambda part: part) for x in self.inputs]
        weights = part_of(whole, dist.get_rank())
        self.runs = {each: compiled(each, weights, groups) for each in who}
        self.differences = dict.fromkeys(who, 0.0)

    def time(self, who: str, number: int) -> float:
        """Microseconds of one call, whose result is checked."""
        x, expected = self.inputs[number % INPUTS], self.expected[number % INPUTS].float()
        pc.barrier()
        began = time.perf_counter()
        result = self.runs[who](x)
        taken_us = (time.perf_counter() - began) * 1e6
        if who != "alone":
            difference = float((result.float() - expected).abs().max() / expected.abs().max())
            if not difference <= TOLERANCE[self.dtype]:
                raise AssertionError(f"{self.what}, {who}: {difference:.1e} of the greatest element beside one process")
            self.differences[who] = max(self.differences[who], difference)
        return taken_us

    def measure(self, seconds: float) -> dict[str, Any]:
        """Collective. About so many seconds, after compiling."""
        began = time.perf_counter()
        for who in self.runs:
            self.time(who, 0)
        compiled_s = time.perf_counter() - began
        warm = [sum(self.time(who, number) for who in self.runs) for number in range(WARM_UP)]
        rounds = int(of_slower_rank(torch.tensor(seconds * 1e6 / min(warm))))
        rounds = min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)
        draw = random.Random(1)  # the same order on all ranks
        times_us = torch.zeros(rounds, len(self.runs), dtype=torch.float64)
        for number in range(rounds):
            for who in draw.sample(list(self.runs), len(self.runs)):
                times_us[number, list(self.runs).index(who)] = self.time(who, number)
        by_who = dict(zip(self.runs, of_slower_rank(times_us).unbind(1), strict=True))
        return {
            **self.what,
            "rounds": rounds,
            "compiled_s": compiled_s,
            "us": {who: statistics.median(taken.tolist()) for who, taken in by_who.items()},
            "plug_in_over_alone": statistics.median((by_who["plug-in"] / by_who["alone"]).tolist()),
            "gloo_over_plug_in": statistics.median((by_who["gloo"] / by_who["plug-in"]).tolist()),
            "phalanx_over_plug_in": statistics.median((by_who["phalanx"] / by_who["plug-in"]).tolist()),
            "largest_relative_difference": max(self.differences.values()),
        }


def of_slower_rank(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def peak_memory(row: Row, who: str) -> dict[str, Any]:
    """Of this process, which has only this variant, in 20 calls after it was compiled; its code is not counted."""
    for number in range(WARM_UP):
        row.time(who, number)
    row.expected, row.inputs = row.expected[:1] * INPUTS, row.inputs[:1] * INPUTS
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(20):
        row.time(who, 0)
    return {"resident_bytes": before, "peak_bytes": memory("VmHWM"), "arena_bytes": arena_bytes(who)}


def memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def arena_bytes(who: str) -> int:
    if who != "plug-in":
        return 0
    from phalanx import inductor_plugin

    return max(sum(report.arena_bytes.values()) for report in inductor_plugin.reports())


# ---- ranks and output ------------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: str, options: argparse.Namespace, memory_of: str, output: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups = {"gloo": dist.group.WORLD, "phalanx": dist.new_group(backend="phalanx")}
    with torch.no_grad():
        if memory_of:
            hidden, tokens, dtype = MEMORY_ROW
            found: Any = peak_memory(Row(tokens, whole_weights(hidden, dtype), groups, (memory_of,)), memory_of)
        else:
            found = []
            for dtype in options.dtypes:
                for hidden in options.hidden:
                    whole = whole_weights(hidden, dtype)
                    for tokens in options.tokens:
                        found.append(Row(tokens, whole, groups, VARIANTS).measure(options.seconds))
                        if rank == 0:
                            print(line_of(found[-1]), flush=True)
    if rank == 0:
        Path(output).write_text(json.dumps(found))
    dist.destroy_process_group()


def line_of(row: dict[str, Any]) -> str:
    cells = [f"{row['dtype']:8}", f"{row['hidden']:6}", f"{row['tokens']:6}"]
    cells += [f"{row['us'][who] / 1000:10.3f}" for who in VARIANTS]
    cells += [f"{row['plug_in_over_alone']:15.3f}", f"{row['gloo_over_plug_in']:14.2f}"]
    return " ".join([*cells, f"{row['rounds']:6}", f"{row['compiled_s']:8.0f}"])


def head() -> str:
    names = [f"{who:>10}" for who in VARIANTS]
    return " ".join(
        ["dtype   ", "hidden", "tokens", *names, "plug-in / alone", "gloo / plug-in", "rounds", "s to compile"]
    )


def spawn(options: argparse.Namespace, memory_of: str = "") -> Any:
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "found")
        torch.multiprocessing.spawn(run_rank, args=(folder, options, memory_of, output), nprocs=RANKS)
        return json.loads(Path(output).read_text())


def about(options: argparse.Namespace) -> dict[str, Any]:
    cpu = re.search(r"^model name\s+: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "benchmark": "compiled_block",
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": cpu[1] if cpu else platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "ranks": RANKS,
        "seconds": options.seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=3, help="of each row, after compiling")
    parser.add_argument("--memory", action="store_true", help="peak memory of each variant, too")
    parser.add_argument("--json", default="", metavar="FILE")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"  # a graph from the cache has no report
    result = about(options)
    print(f"milliseconds\n{head()}")
    result["rows"] = spawn(options)
    if options.memory:
        result["memory"] = {who: spawn(options, who) for who in VARIANTS}
        for who, found in result["memory"].items():
            peak, arena = found["peak_bytes"] / 2**20, found["arena_bytes"] / 2**20
            print(f"memory {MEMORY_ROW}, {who}: {peak:,.1f} MiB at most, of which {arena:,.2f} MiB are the arena")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
