"""Analysis of FX graphs: collectives, their waits, the users of their results, and aliases."""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

import phalanx.collectives as pc
from phalanx.inductor_plugin import _torch_compat

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """The form of a collective op of torch or of Phalanx.

    Attributes:
        kind: The op of the collective, such as all_gather_into_tensor, or shard_dim_all_to_all.
        several: Whether it takes and returns a list of tensors.
        in_place: Whether it writes its input.
        out: Whether it writes an argument `out`.
    """

    kind: str
    several: bool = False
    in_place: bool = False
    out: bool = False


_NAMESPACES = ("phalanx", "_c10d_functional")
_BLOCKING = "blocking_"  # prefix of the ops of Phalanx that are complete on return


def form_of(node: Node) -> Form | None:
    """The form of the collective that a node calls, or None."""
    if node.op != "call_function" or not isinstance(node.target, _torch_compat.OpOverload):
        return None
    if node.target.namespace in _NAMESPACES:
        found = pc.form_of(_torch_compat.op_name(node.target))
        if found is None or found.collective.kind < 0:  # those with uneven parts stay as they are
            return None
        return Form(found.collective.name, found.takes_list, found.in_place, found.into_out)
    if node.target.namespace == "_dtensor" and _torch_compat.op_name(node.target) == "shard_dim_alltoall":
        return Form("shard_dim_all_to_all")
    return None


def is_wait(node: Node) -> bool:
    """Whether a node waits for its argument and returns it."""
    target: Any = node.target
    return _torch_compat.op_name(target) == "wait_tensor" and target.namespace in _NAMESPACES


def split_waits(graph: Graph) -> None:
    """Replace a wait for a list, which torch has from 2.15 on, by waits for each of its tensors."""
    for node in list(graph.nodes):
        if _torch_compat.op_name(node.target) != "wait_tensors" or node.target.namespace not in _NAMESPACES:
            continue
        for picked in list(node.users):
            tensor = node.args[0][picked.args[1]]
            with graph.inserting_before(picked):
                wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (tensor,))
            wait.meta.update(picked.meta)
            picked.replace_all_uses_with(wait)
            graph.erase_node(picked)
        graph.erase_node(node)


def value(node: Node) -> Any:
    """The fake tensor or list of a node; None if torch did not record one."""
    return node.meta.get("val")


@dataclass
class Collective:
    """A collective of the graph.

    Attributes:
        node: The call.
        form: The form of its op.
        name: The name of the op, such as all_reduce_coalesced.
        group: The name of its group; None if the graph does not say it.
        arguments: All arguments by name.
        inputs: The tensors that it reads.
        results: For each input, the nodes of its result: the first one, and the waits.
    """

    node: Node
    form: Form
    name: str
    group: str | None
    arguments: dict[str, Any]
    inputs: list[Node]
    results: list[list[Node]] = field(default_factory=list)

    def refresh(self) -> None:
        """Read the arguments again, after other nodes have been replaced."""
        self.arguments = _arguments(self.node)
        self.inputs = _inputs(self.form, self.arguments)

    def tensor(self, i: int = 0) -> torch.Tensor:
        """The fake tensor of input `i`."""
        tensor: torch.Tensor = value(self.inputs[i])
        return tensor

    @property
    def has_splits(self) -> bool:
        """Whether it is an all_to_all with split sizes, which differ between ranks."""
        arguments = self.arguments
        return self.form.kind == "all_to_all_single" and bool(
            arguments["output_split_sizes"] or arguments["input_split_sizes"]
        )

    @property
    def device(self) -> torch.device | None:
        """The device of its inputs: the CPU, or a GPU with its index. None if there are several, or others."""
        devices = {tensor.device if isinstance(tensor, torch.Tensor) else None for tensor in map(value, self.inputs)}
        device = devices.pop() if len(devices) == 1 else None
        return device if device is not None and device.type in ("cpu", "cuda") else None


def _arguments(node: Node) -> dict[str, Any]:
    schema = _torch_compat.schema_of(node.target)
    bound = {argument.name: given for argument, given in zip(schema.arguments, node.args, strict=False)}
    bound.update(node.kwargs)
    return bound


def _inputs(form: Form, arguments: dict[str, Any]) -> list[Node]:
    return list(arguments["inputs"]) if form.several else [arguments["input"]]


def with_users(start: Iterable[Node], belongs: Callable[[Node], bool]) -> list[Node]:
    """The nodes, and all users of them that belong to them (`is_wait`, `is_view`), users of users included."""
    nodes = list(start)
    for node in nodes:  # grows
        nodes.extend(user for user in node.users if belongs(user) and user not in nodes)
    return nodes


def _results(node: Node, form: Form, inputs: list[Node]) -> list[list[Node]]:
    first: list[list[Node]] = [[] for _ in inputs]
    if form.several:
        for user in node.users:
            if user.target is operator.getitem:
                first[user.args[1]].append(user)  # type: ignore[index]
    else:
        first = [[node]]
    results = [with_users(nodes, is_wait) for nodes in first]
    if form.in_place:  # a wait for the input gives the result, too
        for nodes, source in zip(results, inputs, strict=True):
            nodes.extend(with_users([source], is_wait)[1:])
    return results


def collectives(graph: Graph) -> Iterator[Collective]:
    """The collectives of a graph, in its order."""
    for node in list(graph.nodes):
        form = form_of(node)
        if form is None:
            continue
        arguments = _arguments(node)
        inputs = _inputs(form, arguments)
        group = _torch_compat.group_name_of(arguments.get("group_name"))
        name = _torch_compat.op_name(node.target).removeprefix(_BLOCKING)
        yield Collective(node, form, name, group, arguments, inputs, _results(node, form, inputs))


# ---- aliases ---------------------------------------------------------------------------------------------------------

_VIEWS = {"_unsafe_view", "reshape"}  # besides the ops whose schemas say so

# Ops whose result may lie in the memory of their first argument in Inductor, though their schemas do not say so: ops
# that change nothing, and ops that Inductor runs in place if no other node reads the argument.
_MAY_ALIAS = {
    "_reshape_copy",
    "contiguous",
    "convert_element_type",
    "_to_copy",
    "to",
    "lift_fresh_copy",
    "alias_copy",
    "view_copy",
    "index_put",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "index_add",
    "index_copy",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_scatter",
    "select_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "as_strided_scatter",
}


def is_view(node: Node) -> bool:
    """Whether a node is another view of the memory of its first argument, and computes nothing."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, _torch_compat.OpOverload) or _torch_compat.schema_of(node.target).is_mutable:
        return False
    return _torch_compat.op_name(node.target) in _VIEWS or _returns_alias(node.target)


def _returns_alias(target: Any) -> bool:
    return any(each.alias_info is not None for each in _torch_compat.schema_of(target).returns)


def _may_alias(node: Node, of: Node) -> bool:
    """Whether the result of a node may lie in the memory of `of`, one of its arguments."""
    if isinstance(node.target, _torch_compat.HigherOrderOperator):
        return True
    if not node.args or node.args[0] is not of or node.op != "call_function":
        return False
    if node.target is operator.getitem or is_view(node):
        return True
    is_op = isinstance(node.target, _torch_compat.OpOverload)
    return is_op and (_torch_compat.op_name(node.target) in _MAY_ALIAS or _returns_alias(node.target))


def uses(nodes: list[Node]) -> list[Node]:
    """The users of the memory of these nodes: users, and users of nodes that may alias them."""
    users: list[Node] = []
    queue = list(nodes)
    seen = set(queue)
    for node in queue:  # grows
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            alias = _may_alias(user, node)
            if alias:
                queue.append(user)
            if not alias or not (is_view(user) or user.target is operator.getitem):
                users.append(user)
    return users


def leaves_graph(nodes: list[Node]) -> bool:
    """Whether the memory of these nodes may be a result of the graph."""
    return any(user.op == "output" for user in uses(nodes))


def base_of(node: Node) -> Node:
    """The node whose memory this one is a view of, or itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_private(node: Node) -> bool:
    """Whether only its single user can see writes to a node: it is computed in the graph and has no other views."""
    while True:
        if len(node.users) != 1 or node.op in ("placeholder", "get_attr"):
            return False
        if not is_view(node):
            return node.op == "call_function" and node.target is not operator.getitem
        if node.target is operator.getitem:
            return False
        node = node.all_input_nodes[0]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and contiguous."""
    return tensor.layout == torch.strided and tensor.is_contiguous()
