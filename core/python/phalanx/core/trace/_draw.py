"""Writes a picture of boxes, lines and labels: as SVG by itself, as PNG with matplotlib."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from phalanx.core.trace._read import DumpError

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
                parse_math=False,  # a name is no formula
            )
