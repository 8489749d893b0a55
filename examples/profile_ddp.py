"""Profiles a training step of two ranks, and says from the trace how much each collective moved and how fast.

python examples/profile_ddp.py [--out FOLDER] [--picture FILE.svg]

It reads the events `record_param_comms` of the exported trace, as HTA and other tools do; --picture draws them
with what the flight recorder of the core has of the same collectives, by their sequence numbers.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from phalanx.collectives.profiling import flight_record

CHANNEL = 1  # of the core, on which torch's process groups are counted
DTYPES = {"Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8}


@dataclass(frozen=True)
class Comms:
    """One collective of a trace.

    Attributes:
        name: As torch calls it.
        sequence: Its number in its group.
        group: Name of the group.
        moved_bytes: The larger one of what goes in and what comes out.
        start_us, duration_us: When it ran, to its completion.
    """

    name: str
    sequence: int
    group: str
    moved_bytes: int
    start_us: float
    duration_us: float


# [read]
def read(trace: Path) -> list[Comms]:
    """The collectives of an exported trace, in order."""
    events = sorted((e for e in json.loads(trace.read_text())["traceEvents"] if "dur" in e), key=lambda e: e["ts"])
    found = []
    for i, event in enumerate(events):
        if event["name"] != "record_param_comms":
            continue
        args = event["args"]
        elements = max(args["In msg nelems"], args["Out msg nelems"])
        # The event of the work begins inside this one, and ends when it is complete.
        end_us = event["ts"] + event["dur"]
        within = (e for e in events[i + 1 :] if e["ts"] <= end_us and e["name"].startswith("phalanx:"))
        work = next(within, event)
        found.append(
            Comms(
                args["Collective name"],
                int(args.get("Seq", 0)),
                args["Process Group Name"],
                elements * DTYPES.get(args["dtype"], 4),
                event["ts"],
                work["ts"] + work["dur"] - event["ts"],
            )
        )
    return found


def table(collectives: Iterable[Comms]) -> str:
    """Bytes and bandwidth by collective."""
    rows: dict[str, list[Comms]] = {}
    for each in collectives:
        rows.setdefault(each.name, []).append(each)
    lines = [f"{'collective':<22}{'calls':>6}{'bytes':>12}{'time':>12}{'bandwidth':>14}"]
    for name, calls in rows.items():
        moved, time_us = sum(call.moved_bytes for call in calls), sum(call.duration_us for call in calls)
        lines.append(f"{name:<22}{len(calls):>6}{moved:>12}{time_us:>9.0f} us{moved / time_us / 1000:>9.3f} GB/s")
    return "\n".join(lines)


# [read end]


def step(net: torch.nn.Module) -> None:
    """Forward and backward, with a mean of the losses for the log."""
    loss = net(torch.ones(16, 256)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())


def run(rank: int, out: str) -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1)
    for _ in range(2):  # the first one ends with DDP choosing its buckets
        step(wrapped)
    dist.barrier()
    # [profile]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        step(wrapped)
    prof.export_chrome_trace(f"{out}/trace{rank}.json")
    Path(f"{out}/dump{rank}.json").write_text(flight_record())  # what `phalanx trace` reads
    # [profile end]
    dist.barrier()  # the files of all ranks are there


def recorded(dump: Path) -> dict[int, dict[str, Any]]:
    """What the flight recorder of a rank has of its own collectives in the default group, by sequence number."""
    given = json.loads(dump.read_text())
    for group in given["groups"]:
        for member in group["members"]:
            if member["rank"] != given["rank"]:
                continue
            for channel in member["channels"]:
                if channel and channel["channel"] == CHANNEL:
                    return {entry["sequence"]: entry for entry in channel["entries"]}
    return {}


def picture(out: Path, world_size: int) -> str:
    """The timelines of all ranks as SVG: for each the profile above, and the flight recorder below it."""
    rows: list[tuple[str, list[tuple[str, float, float]]]] = []
    for rank in range(world_size):
        calls, kept = read(out / f"trace{rank}.json"), recorded(out / f"dump{rank}.json")
        first_us = calls[0].start_us
        spans = [(f"#{c.sequence} {c.name}", c.start_us - first_us, c.duration_us) for c in calls]
        rows.append((f"rank {rank}, profile", spans))
        mine = [kept[c.sequence] for c in calls]
        # The two have clocks of their own: the first collective is laid on the first.
        first_ns = mine[0]["start_ns"]
        times = [((e["start_ns"] - first_ns) / 1000, (e["end_ns"] - e["start_ns"]) / 1000) for e in mine]
        spans = [(f"#{e['sequence']} {e['call']}", *at) for e, at in zip(mine, times, strict=True)]
        rows.append((f"rank {rank}, recorder", spans))
    end_us = max(start + duration for _, spans in rows for _, start, duration in spans)
    left, width, height = 130, 900, 44
    scale = (width - left - 20) / end_us
    total = len(rows) * height + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" viewBox="0 0 {width} {total}"',
        'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{total}" fill="#fff"/>',
    ]
    colours = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
    for number, (title, spans) in enumerate(rows):
        y = 10 + number * height
        lines.append(f'<text x="8" y="{y + 20}">{escape(title)}</text>')
        for place, (label, start, duration) in enumerate(spans):
            x, wide = left + start * scale, max(duration * scale, 2)
            colour = colours[place % len(colours)]
            text = escape(f"{label}: {duration:.0f} us")
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 8 * (place % 2)}" width="{wide:.1f}" height="14" fill="{colour}" '
                f'fill-opacity="0.8"><title>{text}</title></rect>'
            )
            lines.append(
                f'<text x="{x + 2:.1f}" y="{y + 11 + 8 * (place % 2)}" font-size="9">#{label[1:].split()[0]}</text>'
            )
    y = len(rows) * height + 14
    lines.append(f'<line x1="{left}" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#888"/>')
    for part in range(5):
        x = left + part / 4 * end_us * scale
        lines.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{part / 4 * end_us:.0f} us</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def show(out: Path, world_size: int, to: Path | None) -> None:
    """Prints what the traces in a folder say, compares them with the dumps, and draws both."""
    for rank in range(world_size):
        calls, kept = read(out / f"trace{rank}.json"), recorded(out / f"dump{rank}.json")
        assert calls and {call.sequence for call in calls} <= set(kept), "the recorder has other numbers"
        print(f"rank {rank}\n{table(calls)}")
    # Two buckets of gradients, and one loss.
    parameters = 256 * 512 + 512 + 512 * 256 + 256
    reduced = [call.moved_bytes for call in read(out / "trace0.json") if call.name == "allreduce"]
    assert sum(reduced) == 4 * (parameters + 1), reduced
    if to:
        to.write_text(picture(out, world_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the traces and dumps in this folder")
    parser.add_argument("--picture", type=Path, help="draw the timelines as SVG")
    options = parser.parse_args()
    dist.init_process_group("phalanx")
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as scratch:
        folder = [str(options.out or scratch)]
        dist.broadcast_object_list(folder)
        out = Path(folder[0])
        out.mkdir(parents=True, exist_ok=True)
        run(rank, folder[0])
        if rank == 0:
            show(out, size, options.picture)
        dist.barrier()  # the folder goes when rank 0 has read all
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
