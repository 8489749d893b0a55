"""Makes dumps of the flight recorder as the core writes them, out of times that a test chooses."""

import json

SECOND = 1_000_000_000
UNIX_NS = 1_760_000_000 * SECOND  # 2025-10-09 08:53:20 UTC


def entry(sequence, start_ns, end_ns=None, call="all_reduce", **changes):
    """What a rank recorded of a collective; pending without an end."""
    made = {
        "sequence": sequence,
        "call": call,
        "dtype": "float32",
        "count": 512,
        "op": "sum" if "reduce" in call else None,
        "root": None,
        "bytes": 2048,
        "algorithm": 1,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "status": "pending" if end_ns is None else "ok",
    }
    return made | changes


def channel(*entries, number=0, started=None, completed=None):
    """A channel of a rank; what it started and completed is what its entries say."""
    done = [each["sequence"] for each in entries if each["end_ns"] is not None]
    return {
        "channel": number,
        "started": entries[-1]["sequence"] if started is None else started,
        "completed": max(done, default=0) if completed is None else completed,
        "entries": list(entries),
    }


def member(rank, *channels, process="sleeping"):
    """A rank of a group, whose pid is 4121 + rank."""
    return {"rank": rank, "pid": 4121 + rank, "process": process, "channels": list(channels)}


def group(*members, name="tp", **changes):
    made = {"name": name, "id": f"0x{name}", "state": "active", "error": None, "members": list(members)}
    return made | changes


def failure(status, sequence=0, **changes):
    made = {"status": status, "rank": 0, "peer": 2, "operation": "all_reduce", "sequence": sequence, "text": "a text"}
    return made | changes


def dump(*groups, rank=0, world_size=4, dumped_ns=10 * SECOND, **changes):
    """A whole dump, as the object that the file holds."""
    made = {
        "format": "phalanx-flight-recorder",
        "version": 1,
        "phalanx": "0.1.0",
        "host": "node1",
        "rank": rank,
        "world_size": world_size,
        "pid": 4121 + rank,
        "dumped_ns": dumped_ns,
        "dumped_unix_ns": UNIX_NS + dumped_ns - 10 * SECOND,
        "groups": list(groups),
    }
    return made | changes


def write(folder, *dumps):
    """Write dumps as 0.json, 1.json and so on; gives the paths as text."""
    paths = []
    for number, each in enumerate(dumps):
        path = folder / f"{number}.json"
        path.write_text(json.dumps(each))
        paths.append(str(path))
    return paths


def stuck():
    """Three of four ranks wait since 4.2 s in the third collective; rank 2 was late before, too."""
    start = 5 * SECOND
    first = {0: 0, 1: 1_000, 2: 3_000, 3: 2_000}
    second = {0: 100_000, 1: 100_500, 2: 110_000, 3: 102_000}
    members = []
    for rank in range(4):
        entries = [
            entry(1, start + first[rank], start + 8_000 + rank, call="broadcast", root=0),
            entry(2, start + second[rank], start + 112_500),
        ]
        if rank != 2:
            entries.append(entry(3, start + 800_000_000 + 1000 * rank))
        members.append(member(rank, channel(*entries), process="stopped" if rank == 2 else "sleeping"))
    return dump(group(*members))
