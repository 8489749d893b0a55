"""The timeline of `phalanx trace`: a panel for each channel, in it a row for each rank, waiting shaded.

A picture consists of boxes, lines and labels. It is written as SVG without help, as PNG with matplotlib.
"""

import importlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.tools.trace._analysis import Analysis, Collective, lanes
from phalanx.tools.trace._read import DumpError, Group
from phalanx.tools.trace._text import duration, ranks

WORKING, WAITING, FAILED, ABSENT = "#8fb8de", "#f6d58e", "#e79a92", "#ffffff"
EDGE, ALARM, GRID, SHORTENED = "#555555", "#c0392b", "#dddddd", "#bbbbbb"
LEFT, PLOT, RIGHT = 250, 1000, 20
ROW, BAR, TITLE, AXIS = 22, 17, 30, 34
LETTER = 6.5  # pixels; about the mean of a sans-serif font of 11 pixels
_EVEN = 8  # a span of time up to so many times the median is drawn to scale

# ---- pictures, and how they are written ----------------------------------------------------------

LARGEST_PNG = 1 << 16  # pixels of a side, of matplotlib
_FONT = "DejaVu Sans, Verdana, sans-serif"


@dataclass(frozen=True)
class Box:
    """A filled rectangle, with an edge if `edge` is a colour; `title` is shown where a mouse rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A thin straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str


@dataclass(frozen=True)
class Label:
    """Text. `y` is its base line, `anchor` what `x` is of it: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    size: int = 11
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    """Shapes, each in front of those before it. Units are pixels from the upper left corner."""

    width: int
    height: int
    shapes: list[Box | Line | Label]


def write(picture: Picture, path: Path) -> None:
    """Write the kind of file that the name asks for.

    Raises:
        OSError: The file cannot be written.
        DumpError: The picture is too large for PNG.
    """
    if path.suffix == ".svg":
        path.write_text(svg(picture), encoding="utf-8")
    else:
        _png(picture, path)


def svg(picture: Picture) -> str:
    """The picture as a file of its own."""
    size = f'width="{picture.width}" height="{picture.height}" viewBox="0 0 {picture.width} {picture.height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" fill="#222">',
        f'<rect width="{picture.width}" height="{picture.height}" fill="#fff"/>',
        *(_element(shape) for shape in picture.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _element(shape: Box | Line | Label) -> str:
    if isinstance(shape, Label):
        weight = ' font-weight="bold"' if shape.bold else ""
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
        return f"<text {place}{weight}>{escape(shape.text)}</text>"
    if isinstance(shape, Line):
        ends = f'x1="{shape.x1:.1f}" y1="{shape.y1:.1f}" x2="{shape.x2:.1f}" y2="{shape.y2:.1f}"'
        return f'<line {ends} stroke="{shape.colour}"/>'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
    edge = f' stroke="{shape.edge}"' if shape.edge else ""
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    return f'<rect {place} fill="{shape.fill}"{edge}>{title}</rect>'


def _png(picture: Picture, path: Path) -> None:
    if max(picture.width, picture.height) >= LARGEST_PNG:
        raise DumpError(f"{path}: {picture.width} x {picture.height} pixels are too many for .png; write .svg")
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    patches: Any = importlib.import_module("matplotlib.patches")
    dots = 100
    figure = pyplot.figure(figsize=(picture.width / dots, picture.height / dots), dpi=dots)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    for order, artist in enumerate(_artists(picture, axes, patches, 72 / dots)):
        artist.set_zorder(order)
    figure.savefig(path)
    pyplot.close(figure)


def _artists(picture: Picture, axes: Any, patches: Any, points: float) -> Iterator[Any]:
    sides = {"start": "left", "middle": "center", "end": "right"}
    for shape in picture.shapes:
        if isinstance(shape, Box):
            corner, edge = (shape.x, shape.y), shape.edge or "none"
            yield axes.add_patch(
                patches.Rectangle(corner, shape.width, shape.height, facecolor=shape.fill, edgecolor=edge)
            )
        elif isinstance(shape, Line):
            yield from axes.plot((shape.x1, shape.x2), (shape.y1, shape.y2), color=shape.colour, linewidth=points)
        else:
            yield axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * points,
                fontweight="bold" if shape.bold else "normal",
                horizontalalignment=sides[shape.anchor],
                verticalalignment="baseline",
                color="#222",
                parse_math=False,  # a name is not a formula
            )


# ---- the timeline ----------------------------------------------------------------------------------

Shapes = list[Box | Line | Label]


def draw(analyses: list[Analysis], last: int) -> Picture:
    """Lay out the picture.

    Args:
        analyses: The analyses of the groups to draw.
        last: How many collectives of each channel to draw.
    """
    shapes = _legend()
    top = 40
    for analysis in analyses:
        for number, collectives in analysis.latest(last).items():
            if collectives:
                top = _panel(shapes, top, analysis.group, number, collectives)
    if top == 40:
        shapes.append(Label(LEFT, top + TITLE, "no collective is on record"))
        top += 2 * TITLE
    return Picture(LEFT + PLOT + RIGHT, top, shapes)


class _Scale:
    """From time to pixels. Spans in which nothing begins or ends are shortened, or they would hide all others."""

    def __init__(self, times: Iterable[int]) -> None:
        self.times = sorted(set(times))
        spans = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        self._even = max(1, int(_EVEN * median(spans))) if spans else 1
        places = [0.0]
        for span in spans:
            places.append(places[-1] + self._shortened(span))
        factor = PLOT / places[-1] if spans else 0.0
        self._places = [LEFT + place * factor for place in places]

    def _shortened(self, span: int) -> float:
        return span if span <= self._even else self._even * (1 + math.log2(span / self._even))

    def __call__(self, time: int) -> float:
        """Where a time is, which must be one of those given."""
        return self._places[bisect_right(self.times, time) - 1]

    def shortened(self) -> list[tuple[int, int]]:
        """Spans that are not to scale."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [(before, after) for before, after in pairs if after - before > self._even]


def _legend() -> Shapes:
    shapes: Shapes = []
    x = float(LEFT)
    for fill, edge, text in (
        (WORKING, EDGE, "all ranks are here"),
        (WAITING, EDGE, "waiting for others"),
        (FAILED, EDGE, "ended with an error"),
        (ABSENT, ALARM, "not started"),
        (SHORTENED, "", "longer than drawn"),
    ):
        shapes += [Box(x, 14, 26, 13, fill, edge), Label(x + 32, 25, text)]
        x += 58 + LETTER * len(text)
    return shapes


def _panel(shapes: Shapes, top: int, group: Group, number: int, collectives: list[Collective]) -> int:
    """Draw one channel below `top`; gives where it ends."""
    scale = _Scale(time for each in collectives for time in _times(each))
    shapes.append(Label(12, top + 20, f"group '{group.name}', channel {number}", 13, bold=True))
    rows: list[tuple[int, list[Collective]]] = []
    for member in group.members:
        rows += [(member.rank, lane) for lane in lanes(collectives, member.rank) or [[]]]
    first = top + TITLE
    bottom = first + ROW * len(rows)
    _axis(shapes, scale, first, bottom)
    previous = None
    for index, (rank, lane) in enumerate(rows):
        y = first + ROW * index
        if rank != previous:
            shapes.append(Label(LEFT - 12, y + 15, str(group.by_rank[rank]), anchor="end"))
            absence = next((each for each in collectives if rank in each.absent), None)
            if absence is not None:
                ends = [each.end_ns(rank) for each in collectives if rank in each.calls]
                _absence(shapes, scale, y, absence, max(ends, default=0))
        previous = rank
        for each in lane:
            _bar(shapes, scale, y, each, rank)
    return bottom + AXIS


def _times(each: Collective) -> list[int]:
    """All moments at which something in the picture begins or ends."""
    times = []
    for rank, entry in each.calls.items():
        times += [entry.start_ns, entry.start_ns + each.waits_ns.get(rank, 0), each.end_ns(rank)]
    return times


def _axis(shapes: Shapes, scale: _Scale, top: int, bottom: int) -> None:
    for before, after in scale.shortened():
        shapes.append(Box(scale(before), bottom + 1, scale(after) - scale(before), 5, SHORTENED))
    shapes.append(Line(LEFT, bottom, LEFT + PLOT, bottom, EDGE))
    free = 0.0
    for time in scale.times:
        x = scale(time)
        if x >= free:
            shapes.append(Line(x, top - 4, x, bottom + 6, GRID))
            text = duration(time - scale.times[0])
            shapes.append(Label(x, bottom + 19, text if time == scale.times[0] else f"+{text}", 10, "middle"))
            free = x + 70


def _absence(shapes: Shapes, scale: _Scale, y: int, each: Collective, since: int) -> None:
    start, end = max(each.start_ns, since), max(each.end_ns(rank) for rank in each.calls)
    if start < end:
        text = f"{each.name}: not started"
        left, right = scale(start), scale(end)
        shapes.append(Box(left, y + 2, right - left, BAR, ABSENT, ALARM, text))
        _label(shapes, left, right, y, (text, f"#{each.sequence}"))


def _bar(shapes: Shapes, scale: _Scale, y: int, each: Collective, rank: int) -> None:
    entry, end = each.calls[rank], each.end_ns(rank)
    came = entry.start_ns + each.waits_ns.get(rank, 0)
    name = f"{entry.call} #{each.sequence}"
    waited = f"{duration(came - entry.start_ns)} waiting for {ranks(each.awaited)}" if came > entry.start_ns else ""
    title = f"{name}: {entry.described}, {duration(end - entry.start_ns)}, {entry.status}" + (waited and f"; {waited}")
    left, middle, right = scale(entry.start_ns), scale(came), scale(end)
    failed = entry.status not in ("ok", "pending")
    if failed:
        # It may have waited to the end: the mark is seen all the same.
        middle = min(middle, max(left, right - 12))
    if middle > left:
        shapes.append(Box(left, y + 2, middle - left, BAR, WAITING, EDGE, title))
    if right > middle or right == left:
        shapes.append(Box(middle, y + 2, max(right - middle, 1), BAR, FAILED if failed else WORKING, EDGE, title))
    _label(shapes, left, right, y, (f"{name}: {waited or entry.status}", name, f"#{each.sequence}"))


def _label(shapes: Shapes, left: float, right: float, y: int, texts: tuple[str, ...]) -> None:
    """The first of the texts that fits."""
    for text in texts:
        if LETTER * len(text) + 8 <= right - left:
            shapes.append(Label(left + 4, y + 15, text))
            return
