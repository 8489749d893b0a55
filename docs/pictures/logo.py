"""The logo: a row of spears that point the same way. It has no panel, and its colours show on light and on dark."""

from __future__ import annotations

SHADES = ("#8fc1ee", "#5fa3e0", "#2f7fc8", "#1c66a8")


def logo() -> str:
    spears = []
    for rank, colour in enumerate(SHADES):
        x = 8 + 15 * rank
        spears.append(f'<path d="M{x} 58V20l6-14 6 14v38z" fill="{colour}"/>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 73 64" width="73" height="64" role="img">'
    return "\n".join([head, "<title>Phalanx</title>", *spears, "</svg>", ""])
