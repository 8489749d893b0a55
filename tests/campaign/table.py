"""The summary: a row for each kind of fault, and the same as JSON."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from typing import Any

from cases import KINDS, TITLES
from judge import FAILURES, Verdict


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def times(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "p50": round(quantile(values, 0.5), 1),
        "p99": round(quantile(values, 0.99), 1),
        "max": round(max(values), 1),
        "count": len(values),
    }


def rows(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        of_kind = [each for each in verdicts if each.kind == kind]
        if not of_kind:
            continue
        row: dict[str, Any] = {"cases": len(of_kind)}
        row |= {failure: sum(each.has(failure) for each in of_kind) for failure in FAILURES}
        row["time_to_error_ms"] = {
            str(ranks): times([ms for each in of_kind if each.ranks == ranks for ms in each.error_ms])
            for ranks in sorted({each.ranks for each in of_kind})
        }
        row["shrink_ms"] = times([ms for each in of_kind for ms in each.shrink_ms])
        found[kind] = row
    return found


def render(verdicts: Sequence[Verdict], peers: Sequence[dict[str, Any]]) -> str:
    """As a table of Markdown, so that it can go into the docs as it is."""
    measures = ("error, ms: p50 / p99 / max", "shrink, ms: p50 / max")
    lines = _head(["fault", "cases", "hangs", "wrong", "leaks", "crashes", "ranks", *measures])
    for kind, row in rows(verdicts).items():
        head = [TITLES[kind], row["cases"], *(row[failure] for failure in FAILURES)]
        tail = _cell(row["shrink_ms"], ("p50", "max"))
        for ranks, measured in row["time_to_error_ms"].items():
            lines.append(_line([*head, ranks, _cell(measured, ("p50", "p99", "max")), tail]))
            head, tail = [""] * len(head), ""
    if peers:
        lines += ["", *_head(["gloo", "ranks", "runs", "error, ms: p50 / max", "names the rank", "usable afterwards"])]
        for peer in peers:
            measured = _cell(peer["time_to_error_ms"], ("p50", "max"))
            shares = [f"{peer[each]} of {peer['survivors']}" for each in ("named", "usable")]
            lines.append(_line([TITLES[peer["kind"]], peer["ranks"], peer["runs"], measured, *shares]))
    return "\n".join(lines)


def totals(verdicts: Sequence[Verdict], seconds: float) -> str:
    counts = {failure: sum(each.has(failure) for each in verdicts) for failure in FAILURES}
    exact = sum(each.exact for each in verdicts)
    return (
        f"{len(verdicts)} cases in {seconds:.0f} s, {exact} results compared: {counts['hang']} hangs, "
        f"{counts['wrong']} wrong, {counts['leak']} leaks, {counts['crash']} crashes"
    )


def as_json(
    verdicts: Sequence[Verdict], peers: Sequence[dict[str, Any]], sizes: Sequence[int], seconds: float, torch: str
) -> dict[str, Any]:
    return {
        "what": "fault campaign",
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "kernel": platform.release().split("-")[0], "arch": platform.machine()},
        "torch": torch,
        "ranks": list(sizes),
        "seconds": round(seconds),
        "cases": len(verdicts),
        "results_compared": sum(each.exact for each in verdicts),
        "totals": {failure: sum(each.has(failure) for each in verdicts) for failure in FAILURES},
        "kinds": rows(verdicts),
        "gloo": list(peers),
        "failed": [{"name": each.name, "problems": each.problems} for each in verdicts if each.problems],
    }


def _head(titles: Sequence[str]) -> list[str]:
    return [_line(titles), "|" + "---|" * len(titles)]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _cell(measured: dict[str, float], names: Sequence[str]) -> str:
    return " / ".join(f"{measured[name]:g}" for name in names) if measured else "-"
