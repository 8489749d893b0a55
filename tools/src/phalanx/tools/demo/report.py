"""What is printed at the end: the training in numbers, and the table of costs."""

from statistics import mean, median

from phalanx.tools.demo.costs import Cost
from phalanx.tools.demo.meter import Call
from phalanx.tools.demo.options import Options
from phalanx.tools.demo.show import byte_count, say, table
from phalanx.tools.demo.train import Record


def summary(options: Options, record: Record) -> str:
    """The training in a few lines."""
    losses = record.losses
    latest = losses[-max(1, len(losses) // 10) :]
    lines = [f"steps: {len(losses)}; loss: {losses[0]:.3f} at first, {mean(latest):.3f} at last"]
    if record.step_seconds:
        speed = options.batch * options.sequence / mean(record.step_seconds)
        lines.append(f"tokens/s: {speed:,.0f}; a step: {median(record.step_seconds) * 1000:.1f} ms (median)")
    if record.metered_seconds:
        share = sum(record.communication_seconds) / sum(record.metered_seconds)
        time_ms = median(record.communication_seconds) * 1000
        lines.append(f"in collectives: {share:.0%} of a step ({time_ms:.1f} ms), waiting for the other ranks included")
    return "\n".join(lines)


def show_costs(record: Record, costs: dict[Call, Cost], rounds: int) -> None:
    """Print the table of costs.

    Args:
        record: Of the training.
        costs: Of each collective; empty to leave times out.
        rounds: Of the measurement.
    """
    head = ["collective", "bytes", "calls", *(["Phalanx", "gloo", "gloo / Phalanx"] if costs else [])]
    rows = []
    phalanx_us = gloo_us = 0.0
    for call, often in collectives(record).items():
        row = [call.name, byte_count(call.size_bytes), often]
        if costs:
            cost = costs[call]
            row += [f"{cost.phalanx_us:,.1f} us", f"{cost.gloo_us:,.1f} us", f"{cost.gloo_us / cost.phalanx_us:.1f}x"]
            phalanx_us += record.calls[call] * cost.phalanx_us
            gloo_us += record.calls[call] * cost.gloo_us
        rows.append(row)
    if costs and gloo_us:
        total = [f"{phalanx_us / 1000:.2f} ms", f"{gloo_us / 1000:.2f} ms", f"{gloo_us / phalanx_us:.1f}x"]
        rows.append(["all of a step", "", f"{record.calls.total()} a step", *total])
    say(table(head, rows))
    if costs:
        say(f"  medians of {rounds} rounds in which the two take turns; every result was checked")


def collectives(record: Record) -> dict[Call, str]:
    """Each collective of the training, the largest share first, and how often it was called."""
    in_steps = sorted(record.calls.items(), key=lambda item: (-item[0].size_bytes * item[1], item[0].name))
    found = {call: f"{count} a step" for call, count in in_steps}
    for call, count in record.calls_at_start.items():
        found.setdefault(call, f"{count} at the start")
    return found
