"""Measures: one run, all participants in turns, round by round."""

import contextlib
import datetime
import os
import platform
import random
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.tools._progress import Progress
from phalanx.tools.bench import _limits, _peers
from phalanx.tools.bench._native import COLLECTIVES, CORRUPT, DTYPE_BYTES, LISTS, blocks, library_path
from phalanx.tools.bench._peers import OTHER
from phalanx.tools.bench._team import Team, TeamAbsentError, TeamError

PILOT_ROUNDS = 2  # find out how long a call takes: one to make connections and caches warm, one to look
PILOT_CALLS = 3
MOST_CALLS = 200
OWN = "phalanx"
PYTHON_WAYS = (
    "phalanx.collectives.all_reduce",
    "phalanx.collectives.all_reduce_",
    "torch.ops.phalanx.all_reduce",
    "torch.ops.phalanx.all_reduce_",
    "torch.ops.phalanx.blocking_all_reduce",
    "torch.ops.phalanx.blocking_all_reduce_",
    "phalanx.core Group.all_reduce",
    "phx_all_reduce (C, by cffi)",
)
GLOO_WAYS = ("torch.distributed", "functional")


@dataclass(frozen=True)
class Job:
    """What to measure; the command line.

    Attributes:
        level: "c" or "python".
        collectives: Names.
        sizes: Bytes.
        ranks: How many processes each participant has.
        dtypes: Names.
        buffers: "user", "symmetric", "list".
        rounds: How often each participant has its turn for each row.
        round_ms: How long a turn is meant to take.
        peers: Names.
        peers_dir: Where their environments are.
        against: Another installation of Phalanx.
        realtime: Whether ranks ask for SCHED_FIFO.
        timeout: Seconds for one command to the ranks.
        corrupt: A participant whose results are spoilt before they are checked; for tests.
    """

    level: str
    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    dtypes: tuple[str, ...]
    buffers: tuple[str, ...]
    rounds: int
    round_ms: float
    peers: tuple[str, ...]
    peers_dir: Path
    against: _peers.Installation | None = None
    realtime: bool = False
    timeout: float = 120.0
    corrupt: str = ""


@dataclass
class Lane:
    """One way of one participant, while one row is measured."""

    team: Team
    variant: str
    calls: int = 1
    iteration: int = 0
    slowest_ns: list[int] = field(default_factory=list)
    rank0_ns: list[int] = field(default_factory=list)
    switches: int = 0  # of the ranks' cores to another thread
    iterations: int = 0  # in which these were counted


class Benchmark:
    """A run.

    Attributes:
        failures: What went wrong with Phalanx itself: then the run failed.
        interrupted: What ended the run before all rows were measured, if anything did.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.failures: list[str] = []
        self.interrupted: KeyboardInterrupt | None = None
        self._progress: Progress | None = None
        self._absent: dict[str, str] = {}  # participant: why
        self._teams: dict[str, Team] = {}
        self._versions: dict[str, Any] = {"python": platform.python_version()}
        self._probes = _limits.Probes()
        self._cores = sorted(os.sched_getaffinity(0))
        self._own = OWN if job.level == "c" else "python"
        self._names = (self._own, *(() if job.against is None else (OTHER,)), *job.peers)

    def run(self) -> dict[str, Any]:
        """Measure everything.

        Returns:
            The result, as it is written to a file. An interrupted run has the rows that were measured until then.
        """
        rows: list[dict[str, Any]] = []
        call_ns = None
        planned = list(self._plan())
        total = len(planned) * (PILOT_ROUNDS + self.job.rounds)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory,
                Progress("phalanx bench", total) as self._progress,
            ):
                try:
                    self._start(Path(directory))
                    call_ns = self._call_ns()
                    for measured in self._sweep(planned):
                        rows += measured
                except KeyboardInterrupt as error:
                    self.interrupted = error
                    for team in self._teams.values():  # they may be in the midst of a long turn
                        team.kill()
                finally:
                    self._stop()
        finally:
            self._stop()
            self._progress = None
        measured_rows = len({(row["collective"], row["dtype"], row["bytes"]) for row in rows})
        complete = {"complete": self.interrupted is None, "rows_measured": measured_rows, "rows_planned": len(planned)}
        return self._result(rows) | complete | {"call_ns": call_ns}

    # ---- participants ------------------------------------------------------------------------------------------------

    def _start(self, directory: Path) -> None:
        job = self.job
        library = library_path()
        for name in (*self._names, "limits"):
            self._say(f"{name}: starting")
            try:
                self._teams[name] = Team(
                    name,
                    job.ranks,
                    directory,
                    self._cores,
                    job.level,
                    library,
                    job.peers_dir,
                    job.realtime,
                    job.timeout,
                    job.against if name == OTHER else None,
                )
                versions = self._teams[name].versions
                self._versions |= (
                    {f"{OTHER} {key}": text for key, text in versions.items()} if name == OTHER else versions
                )
            except _peers.AbsentError as error:
                self._absent[name] = nameless(str(error))
            except TeamError as error:
                self._lose(name, str(error))

    def _stop(self) -> None:
        while self._teams:
            self._teams.popitem()[1].end()

    def _lose(self, name: str, why: str) -> None:
        self._teams.pop(name, None)
        why = nameless(why)
        self._absent[name] = why
        self._say(f"{name}: {why}")
        if name in (self._own, OTHER, "limits"):
            self.failures.append(f"{name}: {why}")

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _plan(self) -> Iterator[tuple[str, str, int, int]]:
        """Collective, dtype, elements of a block and bytes of each row."""
        for collective in self.job.collectives:
            if self.job.buffers == ("list",) and collective not in LISTS:
                continue
            for dtype in self.job.dtypes if collective != "barrier" else self.job.dtypes[:1]:
                for count, size in self._counts(collective, dtype):
                    yield collective, dtype, count, size

    def _sweep(self, planned: list[tuple[str, str, int, int]]) -> Iterator[list[dict[str, Any]]]:
        self._probe()
        for number, (collective, dtype, count, size) in enumerate(planned, 1):
            self._say(f"{number}/{len(planned)} {collective}" + (f" {dtype} {size:,} bytes" if size else ""))
            yield list(self._row(collective, dtype, count, size))
            if number == len(planned) or planned[number][:2] != (collective, dtype):
                self._probe()

    def _probe(self) -> None:
        sample = _limits.Sample()
        for what in ("round_trip", "latency", "moves"):
            sample.add(self._ask_limits(what, _limits.probe_sizes(max(self.job.sizes))))
        if sample.moves:
            self._probes.samples.append(sample)

    def _call_ns(self) -> float | None:
        """What one of our calls costs without any peer."""
        if self.job.level != "c" or OWN not in self._teams:
            return None
        try:
            answers = self._teams[OWN].ask({"do": "probe", "what": "call", "sizes": []})
        except TeamError as error:
            self._lose(OWN, str(error))
            return None
        means: list[float] = [sum(answer["call_ns"]) / len(answer["call_ns"]) for answer in answers]
        return round(median(means), 1)

    def _ask_limits(self, what: str, sizes: list[int]) -> list[dict[str, Any]]:
        if "limits" in self._teams:
            try:
                return self._teams["limits"].ask({"do": "probe", "what": what, "sizes": sizes})
            except TeamError as error:
                self._lose("limits", str(error))
        return []

    def _round_trip_ns(self) -> float | None:
        """How far apart the first two cores are now."""
        trips = [trip for answer in self._ask_limits("round_trip", []) for trip in answer["round_trip_ns"]]
        return percentile(sorted(trips), 0.5) if trips else None

    def _counts(self, collective: str, dtype: str) -> list[tuple[int, int]]:
        """Elements of a block, and bytes of the row. The bytes are those of the larger one of input and output."""
        if collective == "barrier":
            return [(0, 0)]
        unit = DTYPE_BYTES[dtype] * max(blocks(collective, self.job.ranks))
        counts = dict.fromkeys(max(1, size // unit) for size in self.job.sizes)
        return [(count, count * unit) for count in counts]

    def _variants(self, name: str, collective: str) -> tuple[str, ...]:
        if self.job.level == "python":
            return PYTHON_WAYS if name == "python" else GLOO_WAYS
        buffers = [each for each in self.job.buffers if each != "list" or collective in LISTS]
        if name not in (OWN, OTHER):
            buffers = list(map(_peers.peer_variant, buffers))
        return tuple(dict.fromkeys(buffers))

    def _row(self, collective: str, dtype: str, count: int, size: int) -> Iterator[dict[str, Any]]:
        lanes: list[Lane] = []
        absent: dict[tuple[str, str], str] = {}
        for name in self._names:
            for variant in self._variants(name, collective):
                if name not in self._teams:
                    absent[name, variant] = self._absent[name]
                    continue
                command = {"collective": collective, "dtype": dtype, "count": count, "variant": variant}
                try:
                    self._teams[name].ask({"do": "prepare", **command})
                    lanes.append(Lane(self._teams[name], variant))
                except TeamAbsentError as error:
                    absent[name, variant] = nameless(str(error))
                    if name == self._own:
                        self.failures.append(f"{name}, {collective} {dtype}, {variant}: {error}")
                except TeamError as error:
                    self._lose(name, str(error))
                    absent[name, variant] = self._absent[name]
        trips: list[float] = []
        for number in range(-PILOT_ROUNDS, self.job.rounds):
            if number >= 0 and (trip := self._round_trip_ns()) is not None:
                trips.append(trip)
            for lane in random.Random(number).sample(lanes, len(lanes)):  # nobody always comes after the same one
                if lane.team.name not in self._teams:
                    continue
                try:
                    self._turn(lane, counts=number >= 0)
                    lane.team.rest()
                except TeamError as error:
                    self._lose(lane.team.name, f"{collective} {dtype}, {size:,} bytes: {error}")
            if self._progress is not None:
                self._progress.advance()
        for name in {lane.team.name for lane in lanes} & set(self._teams):
            try:
                self._teams[name].ask({"do": "finish"})
            except TeamError as error:
                self._lose(name, str(error))
        measured = {(lane.team.name, lane.variant): lane for lane in lanes if lane.team.name in self._teams}
        for name in self._names:
            for variant in self._variants(name, collective):
                row = {"collective": collective, "dtype": dtype, "bytes": size, "who": name, "variant": variant}
                if (name, variant) in measured:
                    row |= self._figures(measured[name, variant], collective, size)
                    row |= self._by_distance(measured[name, variant], trips)
                else:
                    row["absent"] = absent.get((name, variant)) or self._absent.get(name, "it was not measured")
                yield row

    def _turn(self, lane: Lane, counts: bool) -> None:
        calls = lane.calls if counts else PILOT_CALLS
        warm_up = max(1, calls // 10)
        answers = lane.team.ask(
            {
                "do": "round",
                "variant": lane.variant,
                "iteration": lane.iteration,
                "warm_up": warm_up,
                "calls": calls,
                "flags": CORRUPT if lane.team.name == self.job.corrupt else 0,
            }
        )
        lane.iteration += warm_up + calls
        if counts:
            lane.slowest_ns += map(max, *(answer["times"] for answer in answers))
            lane.rank0_ns += answers[0]["times"]
            lane.switches += sum(answer["switches"] for answer in answers)
            lane.iterations += warm_up + calls
        else:
            each_ns = max(answer["wall_ns"] for answer in answers) / (warm_up + calls)
            lane.calls = max(1, min(MOST_CALLS, int(self.job.round_ms * 1e6 / each_ns)))

    def _figures(self, lane: Lane, collective: str, size: int) -> dict[str, Any]:
        slowest = sorted(lane.slowest_ns)
        middle = percentile(slowest, 0.5)
        factors = {"all_reduce": 2.0, "broadcast": self.job.ranks / (self.job.ranks - 1)}
        bus = factors.get(collective, 1.0) * (self.job.ranks - 1) / self.job.ranks
        speed = size / middle if middle else 0.0
        return {
            "calls": len(slowest),
            "median_us": round(middle / 1000, 3),
            "p10_us": round(percentile(slowest, 0.1) / 1000, 3),
            "p90_us": round(percentile(slowest, 0.9) / 1000, 3),
            # With the two barriers around the call. Of each rank.
            "switches": round(lane.switches / (lane.iterations * self.job.ranks), 3),
            "rank0_median_us": round(percentile(sorted(lane.rank0_ns), 0.5) / 1000, 3),
            "algbw_gb_s": round(speed, 3),
            "busbw_gb_s": round(speed * bus, 3),
        }

    def _by_distance(self, lane: Lane, trips: list[float]) -> dict[str, Any]:
        """How far apart the cores were, and medians of the rounds in which they were near and far."""
        if len(trips) * lane.calls != len(lane.slowest_ns):
            return {}
        ordered = sorted(trips)
        parts: dict[bool, list[int]] = {False: [], True: []}
        for number, trip in enumerate(trips):
            calls = lane.slowest_ns[number * lane.calls : (number + 1) * lane.calls]
            parts[trip > _limits.FAR * ordered[0]] += calls
        found: dict[str, Any] = {
            "round_trip_ns": [round(percentile(ordered, part), 1) for part in (0.1, 0.5, 0.9)],
            "far_calls": len(parts[True]),
        }
        for far, name in ((False, "near_median_us"), (True, "far_median_us")):
            if parts[far]:
                found[name] = round(percentile(sorted(parts[far]), 0.5) / 1000, 3)
        return found

    # ---- the result --------------------------------------------------------------------------------------------------

    def _result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        probes = self._probes
        pinned_to = min(job.ranks, len(self._cores))
        for row in rows:
            if probes.samples and "median_us" in row and job.level == "c" and row["who"] == OWN:
                place = probes.table_for(row["round_trip_ns"][1] if "round_trip_ns" in row else None)
                what = (row["collective"], row["variant"], row["bytes"], job.ranks, pinned_to)
                row["limit"] = _limits.limit(probes.tables[place], *what) | {"table": place}
        return {
            "benchmark": "phalanx bench",
            "format": 1,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "versions": self._versions,
            "level": job.level,
            "ranks": job.ranks,
            "cores": pinned_to,
            "rounds": job.rounds,
            "realtime": job.realtime,
            "statistic": "of all calls of all rounds; a call takes as long as on its slowest rank",
            "collectives": [name for name in COLLECTIVES if name in job.collectives],
            "peers": {name: self._absent.get(name, "") for name in job.peers},
            "probes": _limits.table_of(probes.samples) if probes.samples else None,
            "probe_tables": probes.tables,
            "rows": rows,
            "failures": self.failures,
        }

    def _say(self, text: str) -> None:
        if self._progress is not None and self._progress.shown:
            self._progress.title(text)
        else:
            print(f"phalanx bench: {text}", file=sys.stderr, flush=True)


def nameless(text: str) -> str:
    """An error without directories and without this machine's name: results are published."""
    text = re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "this host", text)[:400]


def percentile(ordered: Sequence[float], part: float) -> float:
    """A percentile of sorted numbers; between two of them, in proportion."""
    if not ordered:
        return 0.0
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def machine() -> dict[str, Any]:
    """The machine, without anything that names it."""
    found: dict[str, Any] = {"cpu": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            found["cpu"] = model.group(1).strip()
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            caches[f"L{level} {kind.lower()}"] = size
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found["memory_gib"] = round(int(line.split()[1]) / (1 << 20), 1)
    return {**found, "caches": caches}
