"""What is printed at the end: the training in numbers, and the table of costs."""

from statistics import mean, median

from phalanx.collectives._demo.costs import Cost
from phalanx.collectives._demo.meter import Call
from phalanx.collectives._demo.options import Options
from phalanx.collectives._demo.show import byte_count, say, table
from phalanx.collectives._demo.train import Record


def summary(options: Options, record: Record) -> str:
    """The training in a few lines."""
    lines = [f"{options.steps} steps: loss {record.first_loss:.3f} to {record.last_loss:.3f}"]
    if record.step_seconds:
        step_ms = median(record.step_seconds) * 1000
        characters = options.batch * options.sequence / mean(record.step_seconds)
        lines.append(f"{characters:,.0f} tokens/s; {step_ms:.1f} ms a step (median)")
        if record.metered_steps:
            communication_ms = record.communication_seconds / record.metered_steps * 1000
            lines.append(
                f"of it {communication_ms:.1f} ms ({communication_ms / step_ms:.0%}) in communication, waiting for the "
                "other ranks included"
            )
    return "\n".join(lines)


def show_costs(record: Record, costs: dict[Call, Cost], rounds: int) -> None:
    """Print the table of costs.

    Args:
        record: Of the training.
        costs: Of each collective; empty to leave times out.
        rounds: Of the measurement.
    """
    steps = max(1, record.metered_steps)
    head = ["collective", "bytes", "calls", *(["Phalanx", "gloo", "gloo / Phalanx"] if costs else [])]
    rows = []
    phalanx_us = gloo_us = 0.0
    for call, often in collectives(record).items():
        row = [call.name, byte_count(call.size_bytes), often]
        if costs:
            cost = costs[call]
            row += [f"{cost.phalanx_us:,.1f} us", f"{cost.gloo_us:,.1f} us", f"{cost.gloo_us / cost.phalanx_us:.1f}x"]
            phalanx_us += record.calls[call] / steps * cost.phalanx_us
            gloo_us += record.calls[call] / steps * cost.gloo_us
        rows.append(row)
    if costs and gloo_us:
        total = [f"{phalanx_us / 1000:.2f} ms", f"{gloo_us / 1000:.2f} ms", f"{gloo_us / phalanx_us:.1f}x"]
        rows.append(["all of a step", "", f"{sum(record.calls.values()) / steps:g} a step", *total])
    say(table(head, rows))
    if costs:
        say(f"  medians of {rounds} rounds in which the two take turns; every result was checked")


def collectives(record: Record) -> dict[Call, str]:
    """Each collective of the training, the largest share first, and how often it was called."""
    steps = max(1, record.metered_steps)
    in_steps = sorted(record.calls.items(), key=lambda item: (-item[0].size_bytes * item[1], item[0].name))
    found = {call: f"{count / steps:g} a step" for call, count in in_steps}
    for call, count in record.calls_at_start.items():
        found.setdefault(call, f"{count} at the start")
    return found
