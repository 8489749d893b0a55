"""A picture made of boxes, lines and texts, written as SVG.

Every picture has a light panel of its own, so that it reads the same on light and on dark pages. Coordinates are
rounded when they are written, so that a picture is the same bytes wherever it is made.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

INK, MUTED, LINE, PANEL = "#1b2a38", "#52677a", "#8aa0b4", "#ffffff"
BLUE, LIGHT_BLUE = "#1c66a8", "#dcebf8"
ORANGE, LIGHT_ORANGE = "#b8540b", "#fdebd8"
GREEN, LIGHT_GREEN = "#27763a", "#ddf2e1"
RED, LIGHT_RED = "#b3261e", "#fbe1df"
GREY = "#eef2f6"
RANKS = ("#cfe3f6", "#fbdcc0", "#cfead5", "#e4d7f2")  # fill of what belongs to rank 0, 1, 2, 3
Point = tuple[float, float]


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """Collects shapes; `text()` is the finished SVG.

    Args:
        width: Of the panel, in pixels.
        height: The same.
        title: What the picture shows, for readers of the screen.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []
        self.colours: list[str] = []  # of arrows: each needs a tip of its own

    def shape(self, markup: str) -> None:
        self.parts.append(markup)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        fill: str = GREY,
        stroke: str = LINE,
        size: float = 13,
        bold: bool = False,
        dashed: bool = False,
        radius: float = 4,
        note: str = "",
    ) -> None:
        """A rectangle; the lines of its text are centred. `note` is what a pointer that rests on it shows."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        where = (
            f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" rx="{number(radius)}"'
        )
        rect = f'<rect {where} fill="{fill}" stroke="{stroke}"{dash}'
        self.shape(f"{rect}><title>{html.escape(note)}</title></rect>" if note else rect + "/>")
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * size * 0.65
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + index * size * 1.3 + size * 0.35, line, size=size, bold=bold)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        colour: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        where = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}"'
        self.shape(f'<text {where} fill="{colour}"{weight}{turn}>{html.escape(text)}</text>')

    def line(
        self, points: Sequence[Point], *, colour: str = MUTED, width: float = 1.5, dashed: bool = False, end: str = ""
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        style = f'fill="none" stroke="{colour}" stroke-width="{number(width)}"{dash}{end}'
        self.shape(f'<polyline points="{path}" {style}/>')

    def arrow(
        self,
        *points: Point,
        colour: str = MUTED,
        width: float = 1.5,
        dashed: bool = False,
        text: str = "",
        shift: Point = (0, -5),
    ) -> None:
        """A line with a tip at its last point. The text stands in the middle of the line, moved by `shift`."""
        if colour not in self.colours:
            self.colours.append(colour)
        tip = f' marker-end="url(#tip{self.colours.index(colour)})"'
        self.line(points, colour=colour, width=width, dashed=dashed, end=tip)
        if text:
            (x1, y1), (x2, y2) = points[0], points[-1]
            self.text((x1 + x2) / 2 + shift[0], (y1 + y2) / 2 + shift[1], text, size=12, colour=colour)

    def circle(self, x: float, y: float, radius: float, *, fill: str = INK, note: str = "") -> None:
        where = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{fill}"'
        self.shape(f"<circle {where}><title>{html.escape(note)}</title></circle>" if note else f"<circle {where}/>")

    def finished(self) -> str:
        tips = "".join(
            f'<marker id="tip{index}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for index, colour in enumerate(self.colours)
        )
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="{number(self.width)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
        panel = f'<rect width="{number(self.width)}" height="{number(self.height)}" rx="8" fill="{PANEL}"/>'
        defs = [f"<defs>{tips}</defs>"] if tips else []
        return "\n".join([head, f"<title>{html.escape(self.title)}</title>", *defs, panel, *self.parts, "</svg>", ""])


class Axes:
    """A plot area with one axis of bytes or categories and one of values, both logarithmic or linear.

    Args:
        picture: Where it is drawn.
        area: Left, top, width and height of the area.
        x: Lowest and highest value.
        y: The same.
        log_x: Whether steps of equal length are equal factors.
        log_y: The same.
    """

    def __init__(
        self,
        picture: Picture,
        area: tuple[float, float, float, float],
        x: Point,
        y: Point,
        *,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        self.picture, self.area, self.x, self.y, self.log_x, self.log_y = picture, area, x, y, log_x, log_y

    def at(self, x: float, y: float) -> Point:
        left, top, width, height = self.area
        return (
            left + width * self._part(x, self.x, self.log_x),
            top + height * (1 - self._part(y, self.y, self.log_y)),
        )

    @staticmethod
    def _part(value: float, ends: Point, log: bool) -> float:
        low, high = ends
        if log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def grid(self, xs: dict[float, str], ys: dict[float, str], x_title: str, y_title: str) -> None:
        left, top, width, height = self.area
        for value, label in xs.items():
            x, _ = self.at(value, self.y[0])
            self.picture.line([(x, top), (x, top + height)], colour="#e1e7ed", width=1)
            self.picture.text(x, top + height + 18, label, size=12, colour=MUTED)
        for value, label in ys.items():
            _, y = self.at(self.x[0], value)
            self.picture.line([(left, y), (left + width, y)], colour="#e1e7ed", width=1)
            self.picture.text(left - 8, y + 4, label, size=12, colour=MUTED, anchor="end")
        self.picture.text(left + width / 2, top + height + 38, x_title, size=12, colour=MUTED)
        self.picture.text(left - 56, top + height / 2, y_title, size=12, colour=MUTED, turned=True)

    def curve(self, points: Sequence[Point], colour: str, *, width: float = 2, dashed: bool = False) -> None:
        self.picture.line([self.at(x, y) for x, y in points], colour=colour, width=width, dashed=dashed)
        for x, y in points:
            self.picture.circle(*self.at(x, y), width + 0.8, fill=colour, note=f"{y:.4g}")
