"""The reference of the ops: `.. phalanx-ops:: SECTION`, and `.. phalanx-ops-table::` for all of them on one table.

Which ops there are, their schemas and their kernels come from torch, where they are registered; what they are forms of
and their gradients come from the records in phalanx.collectives._op_table. Where an op has no record and no Python
function, its line is in DOES below.
"""

import inspect
import re
from typing import Any

import torch
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import phalanx.collectives
import phalanx.dtensor.experimental
import phalanx.symm_mem
from phalanx.collectives import _op_table

NAMESPACES = ("phalanx", "phalanx_ordered", "phalanx_c10d", "phalanx_dtensor")

# What an op does that is not a form of a collective.
DOES = {
    "wait_tensor": "Waits until no collective writes into the tensor any more, and gives the tensor.",
    "wait_tensor_": "Waits as wait_tensor does, and gives nothing: for generated code.",
    "broadcast_backward": "The gradient of broadcast: the sum of all ranks' tensors on the source, zeros elsewhere.",
    "symm_arena": "Gives the handle of an arena: symmetric memory of a group that a compiled graph has for itself.",
    "arena_view": "Gives a tensor in this rank's memory of an arena.",
    "arena_release_": "Does nothing when it runs. Compilers learn by it that readers come before the next writes.",
    "mm_into_": "Writes the product of two matrices into contiguous memory that is given.",
    "bmm_into_": "Writes the products of two batches of matrices into contiguous memory that is given.",
    "addmm_into_": "Writes the product of two matrices plus a bias into contiguous memory that is given.",
    "all_gather_mms": "Gives the products of all ranks' shards, one after another, with each matrix of a list.",
    "mm_reduce_scatter": "Multiplies two matrices, reduces the products of all ranks, and gives this rank's rows.",
    "one_shot_all_reduce": "Reduces a symmetric tensor over all ranks; every rank reads all inputs.",
    "one_shot_all_reduce_out": "As one_shot_all_reduce, into `out`.",
    "one_shot_all_reduce_copy": "Copies `local_input` into `symm_buffer`, then does what one_shot_all_reduce does.",
    "one_shot_all_reduce_copy_out": "As one_shot_all_reduce_copy, into `out`.",
    "two_shot_all_reduce_": "Reduces a symmetric tensor in place over all ranks; each rank reduces a part for all.",
    "two_shot_all_reduce_out": "As two_shot_all_reduce\\_, into `output`.",
    "multimem_all_reduce_": "Reduces a symmetric tensor in place over all ranks; by NVLink switches if there are any.",
    "multimem_one_shot_all_reduce": "As one_shot_all_reduce, under the name that torch has for NVLink switches.",
    "multimem_one_shot_all_reduce_out": "As multimem_one_shot_all_reduce, into `out`.",
    "multimem_one_shot_reduce_out": "Reduces a symmetric tensor to the root, by NVLink switches if there are any.",
    "multimem_all_gather_out": "Joins the tensors of all ranks in `out`, which is symmetric memory.",
    "reduce_scatter_out": "Sums a symmetric tensor over all ranks; each rank gets a part along the first or last dim.",
    "tile_reduce": "Reduces a tile of a symmetric tensor over all ranks into `out_tile` of the rank `root`.",
    "multi_root_tile_reduce": "Reduces several tiles of symmetric tensors, each into `out_tile` of its own root.",
    "_low_contention_all_gather": "Joins the tensors of all ranks along the first dim.",
    "_low_contention_reduce_scatter": "Reduces a tensor over all ranks; each rank gets its part along the first dim.",
    "get_remote_tensors": "Gives the counterparts of a symmetric tensor on all ranks, as tensors in mapped memory.",
    "stream_write_value32_": "Writes a 32-bit word of a tensor, in order with the other work of the stream.",
    "memset32_": "Writes a 32-bit word several times in a row, in order with the other work of the stream.",
    "fused_all_gather_matmul": "Gathers the shards of A and multiplies the whole with each matrix of a list.",
    "fused_all_gather_scaled_matmul": "As fused_all_gather_matmul, for scaled float8 matrices.",
    "fused_matmul_reduce_scatter": "Multiplies matrices and reduces the products of all ranks; gives a part to each.",
    "fused_scaled_matmul_reduce_scatter": "As fused_matmul_reduce_scatter, for scaled float8 matrices.",
    "ring_attention": "Computes the attention of this rank's queries to all ranks' keys and values.",
    "ring_attention_backward": "Computes the gradients of ring_attention.",
    "agree_on_graph": "Checks that all ranks compiled the same collectives; each graph of DTensors calls it first.",
    "neutral": "Gives zeros or ones in the shape of a local tensor, with a dependence on it that compilers keep.",
    "random_key": "Draws the key of the next random tensor, in the order in which eager code draws it.",
    "random_values": "Gives this rank's elements of a random tensor.",
}
# Gradients of ops that have no record.
GRADIENTS = {
    "broadcast_backward": "`broadcast`",
    "ring_attention": "`ring_attention_backward`",
    "ring_attention_backward": "refused",
}
# Ops whose line is that of a function.
FUNCTIONS = {"isend": "isend", "irecv": "irecv", "batch_p2p_ops": "batch_isend_irecv", "barrier": "barrier"}
FORMS = {
    "_": "In place",
    "_out": "Into `out`",
    "_coalesced": "For each tensor of a list",
    "_coalesced_": "For each tensor of a list, in place",
}


def all_ops() -> list[str]:
    """The ops that are registered, as namespace::name."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.partition("::")[0] in NAMESPACES)


def schema_of(op: str) -> Any:
    return torch._C._get_schema(op, "")


def base_of(op: str) -> str:
    """The name of the op of namespace phalanx that an op is a variant of."""
    namespace, name = op.split("::")
    base = _op_table.BLOCKING.get(name, name)
    return base if namespace != "phalanx_dtensor" else name


def does(base: str) -> str:
    """What an op does, in one sentence."""
    form = _op_table.FORMS.get(base)
    if form is None and base not in FUNCTIONS:
        if base in DOES:
            return DOES[base]
        kernel = next(op.kernel for op in phalanx.symm_mem._ops.OPS if op.schema.startswith(f"{base}("))
        found = getattr(phalanx.symm_mem, base, kernel)
        return re.split(r"(?<=\.) ", (inspect.getdoc(found) or "").partition("\n\n")[0])[0]
    function = FUNCTIONS[base] if form is None else form.collective.function
    text = re.split(r"(?<=\.) ", (inspect.getdoc(getattr(phalanx.collectives, function)) or "").split("\n")[0])[0]
    ending = base.removeprefix(form.collective.name) if form else ""
    return f"{FORMS[ending]}: {text[0].lower()}{text[1:]}" if ending else text


def is_functional(op: str) -> bool:
    schema = schema_of(op)
    return not any(argument.alias_info for argument in (*schema.arguments, *schema.returns))


def aliasing(op: str) -> str:
    """What an op writes, and which results are arguments, as its schema says."""
    schema = schema_of(op)
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    gives = ["" for result in schema.returns if result.alias_info]
    said = [f"writes {' and '.join(f'`{name}`' for name in written)}"] if written else []
    if gives:
        shared = schema.returns[0].alias_info.before_set
        of = next(each.name for each in schema.arguments if each.alias_info and each.alias_info.before_set == shared)
        said.append(
            f"the result is `{of}`" if base_of(op) != "arena_view" else "the result lies in the memory of `arena`"
        )
    return "; ".join(said) or "none"


def gradient(op: str) -> str:
    namespace, base = op.split("::")[0], base_of(op)
    form = _op_table.FORMS.get(base)
    if namespace == "phalanx" and base in ("wait_tensor", "barrier"):
        return "passes the gradient on"
    if base in GRADIENTS:
        return GRADIENTS[base]
    if namespace != "phalanx" or form is None:
        return "none"
    if form.writes:
        return "refused"
    only = ", for sum and avg" if form.collective.reduces else ""
    return f"`{form.collective.adjoint.op}{'_coalesced' if form.takes_list else ''}`{only}"


def kernels(op: str) -> str:
    """The devices for which an op has a kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    every = has(op, "CompositeExplicitAutograd")
    return ", ".join([key for key in ("CPU", "CUDA") if every or has(op, key)] + ["Meta"] * has(op, "Meta"))


def section_of(base: str, namespace: str) -> str:
    if namespace == "phalanx_dtensor":
        return "dtensor"
    if base in _op_table.FORMS or base == "broadcast_backward":
        return "collectives"
    if base in FUNCTIONS or base.startswith("wait_tensor"):
        return "messages"
    if base in (
        "symm_arena",
        "arena_view",
        "arena_release_",
        "mm_into_",
        "bmm_into_",
        "addmm_into_",
        "all_gather_mms",
        "mm_reduce_scatter",
    ):
        return "graphs"
    return "symmetric memory"


def families(section: str) -> dict[str, list[str]]:
    """The ops of a section: those of one base together, that of namespace phalanx first."""
    found: dict[str, list[str]] = {}
    for op in all_ops():
        if section_of(base_of(op), op.partition("::")[0]) == section:
            found.setdefault(base_of(op), []).append(op)
    order = [name for name in _op_table.FORMS if name in found]
    order += sorted(set(found) - set(order))
    return {
        name: sorted(found[name], key=lambda op: (op.partition("::")[0], op.partition("::")[2] != name))
        for name in order
    }


def path(op: str) -> str:
    return "torch.ops." + op.replace("::", ".")


def marked(text: str) -> str:
    """Single backquotes are code."""
    return re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)


def entry(base: str, ops: list[str]) -> list[str]:
    lines = []
    for number, op in enumerate(ops):
        signature = f"{path(op)}({', '.join(argument.name for argument in schema_of(op).arguments)})"
        lines.append((".. py:function:: " if number == 0 else " " * 17) + signature)
    first = ops[0]
    lines += ["", f"   {marked(does(base))}", ""]
    facts = [f"functional: {'yes' if is_functional(first) else 'no'}", f"aliasing: {aliasing(first)}"]
    facts += [f"gradient: {gradient(first)}", f"kernels: {kernels(first)}"]
    lines += [
        f"   ``{str(schema_of(first)).partition('::')[2]}``",
        "",
        f"   {marked('. '.join(fact[0].upper() + fact[1:] for fact in facts))}.",
        "",
    ]
    return lines


class Ops(SphinxDirective):
    """The ops of a section."""

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self) -> list[str]:
        found = families(self.arguments[0])
        if not found:
            raise self.error(f"there are no ops of {self.arguments[0]}")
        return [line for base, ops in found.items() for line in entry(base, ops)]

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(__file__)
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(self.lines(), source="torch.ops"), self.content_offset, node)
        return node.children


class OpsTable(Ops):
    """All ops of namespace phalanx that are not variants of another one."""

    required_arguments = 0

    def lines(self) -> list[str]:
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 40 14 22 24", ""]
        lines += ["   * - op", "     - functional", "     - aliasing", "     - gradient"]
        for section in ("collectives", "messages", "graphs", "symmetric memory", "dtensor"):
            for base, ops in families(section).items():
                short = gradient(ops[0])
                short = ("sum, avg" if "sum and avg" in short else "yes") if short.startswith("`") else short
                cells = ["yes" if is_functional(ops[0]) else "no", aliasing(ops[0]), short]
                lines += [f"   * - :py:func:`{base} <{path(ops[0])}>`", *(f"     - {marked(cell)}" for cell in cells)]
        return [*lines, ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("phalanx-ops", Ops)
    app.add_directive("phalanx-ops-table", OpsTable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
