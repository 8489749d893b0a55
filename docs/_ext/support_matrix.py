"""The support matrix: `.. phalanx-support:: TABLE`, where TABLE is `core`, `torch` or `reductions`.

`core` comes from the traits of the collectives in core/src/group/call_record.h and from the header, `torch` from the
records of phalanx.collectives._op_table, `reductions` from the library: one rank tries each reduction of each dtype.
"""

import re
from collections.abc import Iterable
from typing import Any

import headers
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from phalanx.collectives import _op_table
from phalanx.core import DType, ReduceOp, UnsupportedError, World

TRAITS = headers.INCLUDE.parents[1] / "src" / "group" / "call_record.h"


def collectives_of_core() -> list[tuple[str, bool]]:
    """The names of the collectives of the core, and whether they reduce, as their traits say."""
    rows = re.findall(r'\{"symm_(\w+)"([^}]*)\}', TRAITS.read_text())
    return [(name, rest.rstrip().endswith("true")) for name, rest in rows if name not in ("nothing", "coalesced")]


def core_table() -> Iterable[list[str]]:
    """Which forms each collective of the core has, and where they run."""
    yield [
        "collective",
        "reduces",
        "symmetric memory",
        "lists of blocks",
        "coalesced",
        "CPU, one host",
        "CPU, several hosts",
        "CUDA [1]_",
    ]
    declared = headers.path_of("phalanx.h").read_text()

    def form(text: str, *notes: str) -> str:
        return " ".join(["yes", *notes]) if text in declared else "no"

    for name, reduces in collectives_of_core():
        blocks = name.removesuffix("_v") if f"phx_{name}_blocks(" not in declared else name
        yield [
            f":c:func:`phx_{name}`",
            "yes" if reduces else "no",
            form(f"phx_symm_{name}(", "[6]_"),
            form(f"phx_{blocks}_blocks(", "[8]_"),
            form(f"PHX_CALL_{name.upper()} "),
            "yes",
            "yes [2]_",
            "yes",
        ]
    yield [":c:func:`phx_send`, :c:func:`phx_recv`", "no", "no", "no", "yes [7]_", "yes", "yes [2]_", "yes"]


def torch_table() -> Iterable[list[str]]:
    """Which forms each collective of torch.ops.phalanx has, and where they run."""
    yield [
        "function",
        "gradient",
        "compiled [4]_",
        "CPU, one host",
        "CPU, several hosts",
        "CUDA, one host [1]_",
        "CUDA, several hosts",
    ]
    served = ["yes", "yes [2]_", "yes", "by torch [3]_"]
    for collective in _op_table.COLLECTIVES:
        gradient = "sum, avg" if collective.reduces else "yes"
        yield [f":py:func:`~phalanx.collectives.{collective.function}`", gradient, "lowered", *served]
    yield [":py:func:`~phalanx.collectives.barrier`", "passed on", "traced", *served]
    for name in ("isend", "irecv"):
        yield [f":py:func:`~phalanx.collectives.{name}`", "no", "traced [5]_", *served]


def reductions_table() -> Iterable[list[str]]:
    """For which dtypes each reduction is defined."""
    yield ["dtype", *(f"``{op.name.lower()}``" for op in ReduceOp)]
    with World(0, 1) as world:
        group = world.create_group("docs", [0])
        for dtype in DType:
            yield [f"``{dtype.name.lower()}``", *("yes" if is_defined(group, dtype, op) else "no" for op in ReduceOp)]


def is_defined(group: Any, dtype: DType, op: ReduceOp) -> bool:
    data = bytearray(16)
    try:
        group.all_reduce(data, data, 1, dtype, op)
    except UnsupportedError:
        return False
    return True


TABLES = {"core": core_table, "torch": torch_table, "reductions": reductions_table}


class Support(SphinxDirective):
    """One table of the support matrix."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(__file__)
        self.env.note_dependency(str(TRAITS))
        self.env.note_dependency(_op_table.__file__)
        rows = list(TABLES[self.arguments[0]]())
        lines = [".. list-table::", "   :header-rows: 1", "   :class: matrix", ""]
        for row in rows:
            lines += [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(row)]
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList([*lines, ""], source=__file__), self.content_offset, node)
        return node.children


def setup(app: Sphinx) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("phalanx-support", Support)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
