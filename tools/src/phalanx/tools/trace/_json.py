"""The result of `phalanx trace` for programs."""

import json
from typing import Any

from phalanx.tools.trace._analysis import Analysis, Collective
from phalanx.tools.trace._read import Dump


def text(dumps: list[Dump], analyses: list[Analysis], troubles: list[str]) -> str:
    """A JSON object.

    Args:
        dumps: The dumps that were read.
        analyses: The analyses of the groups to show.
        troubles: A sentence for each trouble; none where nothing is stuck.
    """
    result = {
        "stuck": bool(troubles),
        "verdicts": troubles,
        "dumps": [{"file": dump.origin, "rank": dump.rank, "pid": dump.pid, "host": dump.host} for dump in dumps],
        "groups": [_group(analysis) for analysis in analyses],
    }
    return json.dumps(result, indent=2)


def _group(analysis: Analysis) -> dict[str, Any]:
    group = analysis.group
    return {
        "name": group.name,
        "id": group.id,
        "host": group.host,
        "state": group.state,
        "error": None if group.error is None else vars(group.error),
        "ranks": [
            vars(summary) | {"pid": member.pid, "process": member.process}
            for summary, member in zip(analysis.summaries, group.members, strict=True)
        ],
        "collectives": [_collective(each) for channel in analysis.channels.values() for each in channel],
    }


def _collective(each: Collective) -> dict[str, Any]:
    return {
        "channel": each.channel,
        "sequence": each.sequence,
        "calls": {call: list(callers) for call, callers in each.descriptions.items()},
        "took_ns": each.took_ns,
        "last": each.last,
        "late_ns": each.late_ns,
        "not_started": list(each.absent),
        "not_completed": list(each.under_way),
        "differs": each.differs,
        "errors": {status: list(callers) for status, callers in each.errors.items()},
    }
