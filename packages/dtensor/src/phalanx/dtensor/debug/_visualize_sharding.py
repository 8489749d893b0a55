"""Pictures of which rank has what: a table of text, and an SVG. Neither needs another package, and nothing is sent."""

from collections.abc import Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mesh import Mesh, coordinate_of, describe
from phalanx.dtensor._redistribute.comm import ranks_of


class _Cell(NamedTuple):
    """A box of the tensor that the same ranks have."""

    rows: tuple[int, int]  # first, and the one after the last
    columns: tuple[int, int]
    ranks: tuple[int, ...]


def _cells(operation: str, tensor: Any) -> list[_Cell]:
    spec: DTensorSpec = tensor._spec
    if spec.ndim > 2:
        raise RuntimeError(
            f"{operation}: supports only tensors of up to two dims, and this tensor has {spec.ndim}: take a slice of "
            "it, or print tensor._spec"
        )
    owners: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    coordinates = product(*map(range, spec.mesh.shape))
    for rank, coordinate in zip(ranks_of(spec.mesh), coordinates, strict=True):
        runs: list[Sequence[Any]] = [*spec.local_runs_at(coordinate)]
        runs += [((0, 1),)] * (2 - len(runs))
        for (row, height), (column, width) in product(*runs):
            owners.setdefault(((row, row + height), (column, column + width)), []).append(rank)
    return [_Cell(rows, columns, tuple(sorted(ranks))) for (rows, columns), ranks in sorted(owners.items())]


def _is_first(mesh: Mesh) -> bool:
    coordinate = coordinate_of(mesh)
    return coordinate is not None and not any(coordinate)


def _names(mesh: Mesh, ranks: Sequence[int]) -> str:
    return f"{mesh.device_type}:{','.join(map(str, ranks))}"


# ---- text -----------------------------------------------------------------------------------------------------------


def visualize_sharding(dtensor: Any, header: str = "", use_rich: bool = False) -> None:
    """Print which rank has which rows and columns of a tensor. Not collective: only the first rank of the mesh prints.

    Args:
        dtensor: A DTensor of up to two dims. Nothing is printed for an empty one.
        header: A line above the table.
        use_rich: Colours, each set of ranks with its own, as the terminal's escape sequences; no package is needed.

    Raises:
        RuntimeError: The tensor has more than two dims.

    Source: torch.distributed.tensor.debug.visualize_sharding.

    Example:
        >>> visualize_sharding(ones(4, 2, device_mesh=mesh, placements=[Shard(0)]))  # on rank 0
                 Col 0-1
        -------  -------
        Row 0-1  cpu:0
        Row 2-3  cpu:1
    """
    cells = _cells("visualize_sharding", dtensor)
    if cells and _is_first(dtensor._spec.mesh):
        if header:
            print(header)
        print(table(dtensor, colours=use_rich))


def table(tensor: Any, *, colours: bool = False) -> str:
    """The table that `visualize_sharding` prints."""
    cells = _cells("visualize_sharding", tensor)
    mesh = tensor._spec.mesh
    rows = sorted({cell.rows for cell in cells})
    columns = sorted({cell.columns for cell in cells})
    found = {(cell.rows, cell.columns): cell.ranks for cell in cells}
    groups = sorted({cell.ranks for cell in cells})
    texts = [["", *(_range("Col", one) for one in columns)]]
    for row in rows:
        names = (_names(mesh, found[row, one]) if (row, one) in found else "" for one in columns)
        texts.append([_range("Row", row), *names])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines: list[str] = []
    for index, line in enumerate(texts):
        padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        if colours and index:
            own = [found.get((rows[index - 1], one)) for one in columns]
            padded[1:] = [
                text if ranks is None else f"\033[30;4{1 + groups.index(ranks) % 6}m{text}\033[0m"
                for text, ranks in zip(padded[1:], own, strict=True)
            ]
        lines.append("  ".join(padded).rstrip())
        if not index:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _range(name: str, run: tuple[int, int]) -> str:
    return f"{name} {run[0]}-{run[1] - 1}"


# ---- picture --------------------------------------------------------------------------------------------------------

_LONGEST = 420.0  # of the tensor, in pixels
_SHORTEST = 60.0


def draw_sharding(dtensor: Any, path: str | Path) -> None:
    """Write a picture (SVG) of which rank has which part of a tensor. Not collective: only the first rank of the mesh
    writes it.

    Args:
        dtensor: A DTensor of up to two dims.
        path: The file.

    Raises:
        RuntimeError: The tensor has more than two dims.

    Example:
        >>> draw_sharding(ones(4, 2, device_mesh=mesh, placements=[Shard(0)]), "weight.svg")
    """
    text = svg(dtensor)
    if _is_first(dtensor._spec.mesh):
        Path(path).write_text(text)


def svg(tensor: Any) -> str:
    """The picture that `draw_sharding` writes."""
    cells = _cells("draw_sharding", tensor)
    spec: DTensorSpec = tensor._spec
    height, width = (*spec.shape, 1, 1)[:2]
    scale = _LONGEST / max(height, width, 1)
    size = max(width * scale, _SHORTEST), max(height * scale, _SHORTEST)
    left, top = 20.0, 44.0
    groups = sorted({cell.ranks for cell in cells})
    where = f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)} on mesh {describe(spec.mesh)}"
    picture = f'width="{max(size[0] + 2 * left, 320):.0f}" height="{size[1] + top + 20:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {picture} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="20" y="18">{escape(where)}</text>',
        f'<text x="20" y="34">{escape(", ".join(map(repr, spec.placements)))}</text>',
    ]
    for cell in cells:
        x = left + cell.columns[0] / width * size[0]
        y = top + cell.rows[0] / height * size[1]
        w = (cell.columns[1] - cell.columns[0]) / width * size[0]
        h = (cell.rows[1] - cell.rows[0]) / height * size[1]
        hue = 360 * groups.index(cell.ranks) // max(len(groups), 1)
        where = f"rows {cell.rows[0]}-{cell.rows[1] - 1}, columns {cell.columns[0]}-{cell.columns[1] - 1}"
        name = _names(spec.mesh, cell.ranks)
        parts.append(
            f'<g><title>{escape(name)}: {where}</title><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" '
            f'height="{h:.1f}" fill="hsl({hue},60%,80%)" stroke="#333"/><text x="{x + w / 2:.1f}" '
            f'y="{y + h / 2:.1f}" text-anchor="middle" dominant-baseline="middle">{escape(name)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])
