"""What the sweep of DTensor found: a record for each mesh and entry, kept as JSON, and the table made of them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

# Backends of torch.compile that are tried, with sizes as they are and as symbols.
COMPILED = ("aot_eager", "aot_eager:dynamic", "phalanx", "phalanx:dynamic")
# What is tried, in the order of the table: values by how tensors are cut, gradients, in-place variants; values and
# gradients when compiled.
KINDS = ("even", "uneven", "empty", "gradient", "in place", *COMPILED)
_STATUSES = ("right", "fallback", "error", "wrong")
_MOST_FAILURES = 16


@dataclass
class Record:
    """What was found for one entry on one mesh.

    Attributes:
        dtype: The dtype of the samples.
        samples: How many samples torch itself ran.
        kinds: For each kind of KINDS, how many attempts came to each status.
        failures: Attempts that were wrong or raised: "kind status: tensors and placements: what", the first ones.
        notes: Why samples or the entry were left out.
        data_dependent: Whether shapes or control flow depend on values.
        seconds: How long it took.
    """

    dtype: str = ""
    samples: int = 0
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data_dependent: bool = False
    seconds: float = 0.0

    def count(self, kind: str, status: str, text: str = "") -> None:
        """Note an attempt."""
        counts = self.kinds.setdefault(kind, {})
        counts[status] = counts.get(status, 0) + 1
        if text and sum(one.startswith(f"{kind} {status}") for one in self.failures) < 4:
            self.failures = [*self.failures, f"{kind} {status}: {text}"][:_MOST_FAILURES]

    def note(self, text: str) -> None:
        """Note why something was left out, once."""
        if text not in self.notes:
            self.notes.append(text)

    def status(self, kind: str) -> str | None:
        """The worst status of a kind; None if nothing of it was tried."""
        counts = self.kinds.get(kind, {})
        return next((one for one in reversed(_STATUSES) if counts.get(one)), None)

    @property
    def worst(self) -> str | None:
        """The worst status of all."""
        found = {self.status(kind) for kind in KINDS}
        return next((one for one in reversed(_STATUSES) if one in found), None)


class DTensorReport:
    """Records by mesh and entry, kept in a JSON file so that a sweep can go on where it stopped.

    Args:
        path: The file, or None to keep nothing.
        resume: Whether to take up what the file has.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path = path
        self.meshes: dict[str, dict[str, Record]] = {}
        if path is not None and path.exists() and resume:
            kept = json.loads(path.read_text())
            self.meshes = {
                mesh: {name: Record(**record) for name, record in records.items()}
                for mesh, records in kept["meshes"].items()
            }

    def forget_failures(self) -> None:
        """Drop the records in which something raised or was wrong, so that these entries are run again."""
        for records in self.meshes.values():
            for name in [name for name, one in records.items() if one.worst in ("error", "wrong")]:
                del records[name]

    def put(self, mesh: str, entry: str, record: Record) -> None:
        """Keep what was found for an entry."""
        self.meshes.setdefault(mesh, {})[entry] = record

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None:
            return
        part = self.path.with_suffix(".part")
        meshes = {mesh: {name: asdict(one) for name, one in records.items()} for mesh, records in self.meshes.items()}
        part.write_text(json.dumps({"torch": torch.__version__, "meshes": meshes}, indent=1))
        os.replace(part, self.path)


def table(report: DTensorReport) -> list[str]:
    """The counts of entries by mesh and kind, as lines of text."""
    lines = [f"{'mesh':6} {'kind':17} {'entries':>8} {'right':>6} {'by fallback':>12} {'error':>6} {'wrong':>6}"]
    for mesh, records in report.meshes.items():
        for kind in KINDS:
            found = [one.status(kind) for one in records.values() if one.status(kind) is not None]
            if found:
                fallback, error, wrong = (found.count(one) for one in ("fallback", "error", "wrong"))
                right = len(found) - error - wrong
                lines.append(f"{mesh:6} {kind:17} {len(found):8} {right:6} {fallback:12} {error:6} {wrong:6}")
        never = [
            name
            for name, one in records.items()
            if one.kinds and not any(counts.get("right") or counts.get("fallback") for counts in one.kinds.values())
        ]
        left = [name for name, one in records.items() if not one.kinds]
        dependent = sum(one.data_dependent for one in records.values())
        lines.append(
            f"{mesh}: {len(records) - len(left)} entries exercised, {len(left)} not; {dependent} depend on data; "
            f"{len(never)} have no working case{': ' if never else ''}{', '.join(never)}"
        )
    return lines


def reasons(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """Why entries were not exercised: the names by reason."""
    found: dict[str, list[str]] = {}
    for name, one in records.items():
        if not one.kinds:
            found.setdefault(one.notes[0] if one.notes else "no sample", []).append(name)
    return found


def lines_of(name: str, record: Record) -> list[str]:
    """The lines of progress for an entry: its counts, and what went wrong."""
    text = ", ".join(
        f"{kind} {'/'.join(f'{count} {status}' for status, count in counts.items())}"
        for kind, counts in record.kinds.items()
    )
    notes = f" ({'; '.join(record.notes)})" if record.notes else ""
    return [f"{name}: {text or 'nothing tried'}{notes}", *(f"  {one}" for one in record.failures)]
