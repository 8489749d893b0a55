"""The peer: torch.distributed's gloo, whose ranks die and stop in an all_reduce as ours do."""

from __future__ import annotations

import datetime
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import process
from table import times

TIMEOUT_SECONDS = 5  # its own is 30 minutes
DEADLINE_SECONDS = 40
USE_AFTERWARDS_SECONDS = 1  # a second call of a group that is of no use hangs for the whole timeout again


def run_all(sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    sizes = [each for each in sizes if each <= 4] if quick else sizes
    return [_row(kind, size, 1 if quick or kind == "stop" else 3) for kind in ("kill", "stop") for size in sizes]


def _row(kind: str, size: int, runs: int) -> dict[str, Any]:
    errors: list[dict[str, Any]] = []
    took = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="phx-campaign-") as folder:
            fault_ns, told = _run(kind, size, Path(folder))
        errors += told
        took += [(each["raised_at"] - fault_ns) / 1e6 for each in told]
    return {
        "kind": kind,
        "ranks": size,
        "runs": runs,
        "survivors": len(errors),
        "time_to_error_ms": times(took),
        "named": sum(each["named"] for each in errors),
        "usable": sum(each["usable"] for each in errors),
    }


def _run(kind: str, size: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    victim = size // 2
    ranks = [
        process.start(
            rank, folder / f"output.{rank}", lambda pipe, rank=rank: _rank(kind, rank, size, victim, folder, pipe)
        )
        for rank in range(size)
    ]
    survivors = [each for each in ranks if each.rank != victim]

    def watch() -> None:
        if all(each.said("error") or each.exit is not None for each in survivors):
            ranks[victim].signal(signal.SIGKILL)
            (folder / "over").touch()

    process.run(ranks, DEADLINE_SECONDS, watch)
    fault_ns = int((folder / "fault").read_text())
    return fault_ns, [error for each in survivors if (error := each.said("error"))]


def _rank(kind: str, rank: int, size: int, victim: int, folder: Path, pipe: int) -> int:
    import json

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    x = torch.ones(1024)
    dist.all_reduce(x)
    dist.barrier()
    if rank == victim:
        (folder / "fault").write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    try:
        while True:
            dist.all_reduce(x)
    except Exception as error:
        now, text = time.monotonic_ns(), str(error)
    usable = True
    try:
        work = dist.all_reduce(x, async_op=True)
        usable = bool(work is not None and work.wait(datetime.timedelta(seconds=USE_AFTERWARDS_SECONDS)))
    except Exception:
        usable = False
    named = re.search(rf"\brank:? *{victim}\b", text) is not None
    line = {"event": "error", "raised_at": now, "text": text, "named": named, "usable": usable}
    os.write(pipe, (json.dumps(line) + "\n").encode())
    while not (folder / "over").exists():  # a survivor that ended would be noticed as the dead one is
        time.sleep(0.01)
    return 0
