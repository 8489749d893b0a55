"""Lists of tensors beside one tensor, and beside gloo, in turns within the same processes.

    .venv/bin/python benchmarks/list_forms.py [--ranks 2,4] [--sizes 1k,64k,1m,8m] [--no-gloo] [--json FILE]

Two ranks have a core each; more ranks run on any. The size is that of all blocks of a list together. A cell is the
median of a call, or of 50 calls in flight divided by 50. gather and scatter have no form with one tensor, and gloo no
reduce_scatter; 50 calls are left out above `--most-in-flight`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SUFFIXES = {"k": 1 << 10, "m": 1 << 20}
IN_FLIGHT = 50
Form = Callable[[Any, bool], Any]  # of a group, asynchronous or not


def forms(ranks: int, rank: int, nbytes: int) -> dict[str, dict[str, Form]]:
    """By collective, its form with lists ("list") and that with one tensor ("one")."""
    each = nbytes // 4 // ranks
    x, y, part, small = torch.ones(each * ranks), torch.empty(each * ranks), torch.ones(each), torch.empty(each)
    ins, outs = [torch.ones(each) for _ in range(ranks)], [torch.empty(each) for _ in range(ranks)]
    at_root = rank == 0
    return {
        "all_gather": {
            "list": lambda g, a: dist.all_gather(outs, part, g, a),
            "one": lambda g, a: dist.all_gather_into_tensor(y, part, g, a),
        },
        "all_to_all": {
            "list": lambda g, a: dist.all_to_all(outs, ins, g, a),
            "one": lambda g, a: dist.all_to_all_single(y, x, None, None, g, a),
        },
        "reduce_scatter": {
            "list": lambda g, a: dist.reduce_scatter(small, ins, dist.ReduceOp.SUM, g, a),
            "one": lambda g, a: dist.reduce_scatter_tensor(small, x, dist.ReduceOp.SUM, g, a),
        },
        "gather": {"list": lambda g, a: dist.gather(part, outs if at_root else None, 0, g, a)},
        "scatter": {"list": lambda g, a: dist.scatter(small, ins if at_root else None, 0, g, a)},
    }


def took(form: Form, group: Any, flight: bool) -> float:
    """Microseconds of a call of all ranks, which start together."""
    dist.barrier(group)
    begin = time.perf_counter_ns()
    if flight:
        for work in [form(group, True) for _ in range(IN_FLIGHT)]:
            work.wait()
    else:
        form(group, False)
    return (time.perf_counter_ns() - begin) / 1e3 / (IN_FLIGHT if flight else 1)


def rank_main(rank: int, ranks: int, path: str, options: argparse.Namespace, answers: Any) -> None:
    """One rank, from its start to its end."""
    pin(rank, ranks)
    from phalanx.collectives import c10d

    c10d.register()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    gloo, ours = dist.group.WORLD, dist.new_group(backend="phalanx")
    rows = []
    for nbytes in options.sizes:
        for flight in (False, True) if nbytes <= options.most_in_flight else (False,):
            rounds = max(5, min(options.rounds, (64 << 20) // nbytes) // (4 if flight else 1))
            for name, calls in forms(ranks, rank, nbytes).items():
                cells = [("list", calls["list"], ours)]
                cells += [("one", calls["one"], ours)] if "one" in calls else []
                cells += [("gloo", calls["list"], gloo)] if options.gloo and name != "reduce_scatter" else []
                times: dict[str, list[float]] = {label: [] for label, _, _ in cells}
                for turn in range(rounds + 2):
                    for label, form, group in cells:
                        spent = took(form, group, flight)
                        if turn >= 2:
                            times[label].append(spent)
                row = {"ranks": ranks, "bytes": nbytes, "collective": name, "in_flight": IN_FLIGHT if flight else 1}
                rows.append({**row, **{label: median(spent) for label, spent in times.items()}})
    if rank == 0:
        answers.put(rows)
    dist.destroy_process_group()


def answer_of(body: Callable[..., None], ranks: int, *given: Any) -> Any:
    """What one of the ranks put into the queue. Each runs `body(rank, ranks, path of a store, *given, queue)`."""
    with tempfile.TemporaryDirectory() as folder:
        answers = mp.get_context("spawn").SimpleQueue()
        started = mp.spawn(body, (ranks, f"{folder}/store", *given, answers), ranks, join=False)
        while not started.join(0.1) and answers.empty():
            pass
        answer = answers.get()
        while not started.join():
            pass
    return answer


def save(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write the file, if one was asked for."""
    if path is not None:
        about = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        path.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def pin(rank: int, ranks: int) -> None:
    """Give each of two ranks a core and a thread; more ranks run on any core."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 2 <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)


def size_of(text: str) -> int:
    """Bytes of 256, 64k or 8m."""
    return int(text[:-1]) * SUFFIXES[text[-1].lower()] if text[-1].lower() in SUFFIXES else int(text)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'ranks':>5} {'bytes':>9} {'in flight':>9} {'collective':15}{'list us':>10}{'one us':>10}{'gloo us':>10}",
        end="",
    )
    print(f"{'list/one':>10}{'gloo/list':>10}")
    for row in rows:
        cells = "".join(f"{row[key]:10.1f}" if key in row else f"{'-':>10}" for key in ("list", "one", "gloo"))
        ratios = f"{row['list'] / row['one']:10.2f}" if "one" in row else f"{'-':>10}"
        ratios += f"{row['gloo'] / row['list']:10.2f}" if "gloo" in row else f"{'-':>10}"
        print(f"{row['ranks']:5} {row['bytes']:9} {row['in_flight']:9} {row['collective']:15}{cells}{ratios}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = "1k,64k,1m,8m,64m"
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    parser.add_argument("--sizes", type=lambda text: [size_of(each) for each in text.split(",")], default=sizes)
    parser.add_argument(
        "--most-in-flight", type=size_of, default=1 << 20, help="the largest size of 50 calls in flight"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gloo", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        rows += answer_of(rank_main, ranks, options)
    show(rows)
    save(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
