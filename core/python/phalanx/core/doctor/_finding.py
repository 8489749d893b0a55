"""What a check says."""

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "ok", "warn" or "fail".
        name: What was looked at.
        text: What was found.
        advice: What to do. With "ok" it may be had for the asking, or is good to know; "" when there is nothing.
    """

    level: str
    name: str
    text: str
    advice: str = ""
