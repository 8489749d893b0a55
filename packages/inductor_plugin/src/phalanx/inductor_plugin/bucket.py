"""Small reductions that do not depend on each other, issued as one."""

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from phalanx.inductor_plugin import graph as graphs
from phalanx.inductor_plugin import ops
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import Facts, GroupFacts, input_bytes, served
from phalanx.inductor_plugin.emit import Emitter, replace
from phalanx.inductor_plugin.graph import Collective

_MOST = 64  # members of one call

Key = tuple[str, str, torch.dtype]


@dataclass
class _Bucket:
    members: list[Collective] = field(default_factory=list)
    results: set[Node] = field(default_factory=set)


def _key(one: Collective, facts: GroupFacts | None, config: Config) -> Key | None:
    if one.name != "all_reduce" or served(one, facts) is not None or one.group is None:
        return None
    nbytes = input_bytes(one.tensor())
    if nbytes is None or not 0 < nbytes <= config.bucket_bytes or not isinstance(one.tensor().numel(), int):
        return None
    return one.group, str(one.arguments["reduce_op"]), one.tensor().dtype


def bucket(graph: Graph, config: Config, facts: Facts) -> None:
    """Issue small all_reduces of one group, reduction and dtype as one, where the first is when the last was.

    That is only done where nothing uses a result between them, so nothing waits longer for memory or for data.
    """
    if config.bucket_bytes == 0:
        return
    known = {one.node: one for one in graphs.collectives(graph)}
    open_buckets: dict[Key, _Bucket] = {}
    closed: list[_Bucket] = []
    for node in graph.nodes:
        for used in [each for each, bucket in open_buckets.items() if _uses(node, bucket)]:
            closed.append(open_buckets.pop(used))
        one = known.get(node)
        key = _key(one, facts(one.group) if one.group else None, config) if one is not None else None
        if one is None or key is None:
            continue
        current = open_buckets.setdefault(key, _Bucket())
        if len(current.members) == _MOST:
            closed.append(current)
            current = open_buckets[key] = _Bucket()
        current.members.append(one)
        current.results.update(one.results[0])
    emit = Emitter(graph)
    for each in [*closed, *open_buckets.values()]:
        if len(each.members) > 1:
            _join(emit, each.members)


def _uses(node: Node, bucket: _Bucket) -> bool:
    return node not in bucket.results and any(given in bucket.results for given in node.all_input_nodes)


def _join(emit: Emitter, members: list[Collective]) -> None:
    last = members[-1]
    emit.before(last.node)
    for one in members:
        one.refresh()
    inputs = [one.inputs[0] for one in members]
    joined = emit.call(ops.plain("all_reduce_coalesced"), inputs, last.arguments["reduce_op"], last.group)
    for i, one in enumerate(members):
        result = emit.call(operator.getitem, joined, i)
        replace(one.results[0], emit.call(ops.plain("wait_tensor"), result))
