"""Issues small, independent all_reduces as one call."""

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from phalanx.inductor_plugin import _graph, _ops
from phalanx.inductor_plugin._eligibility import Facts, GroupFacts, input_bytes, served
from phalanx.inductor_plugin._fx_builder import FxBuilder, replace
from phalanx.inductor_plugin._graph import Collective
from phalanx.inductor_plugin.config import Config

_MAX_MEMBERS = 64  # of one call

Key = tuple[str, str, torch.dtype]


@dataclass
class _Bucket:
    members: list[Collective] = field(default_factory=list)
    results: set[Node] = field(default_factory=set)


def _key(collective: Collective, facts: GroupFacts | None, config: Config) -> Key | None:
    if collective.name != "all_reduce" or served(collective, facts) is not None or collective.group is None:
        return None
    nbytes = input_bytes(collective.tensor())
    if nbytes is None or not 0 < nbytes <= config.bucket_bytes or not isinstance(collective.tensor().numel(), int):
        return None
    return collective.group, str(collective.arguments["reduce_op"]), collective.tensor().dtype


def bucket(graph: Graph, config: Config, facts: Facts) -> None:
    """Issue small all_reduces of one group, reduction and dtype as one call, at the place of the last of them.

    They are joined only if no node between them uses a result, so that no computation is delayed.
    """
    if config.bucket_bytes == 0:
        return
    known = {collective.node: collective for collective in _graph.collectives(graph)}
    open_buckets: dict[Key, _Bucket] = {}
    closed: list[_Bucket] = []
    for node in graph.nodes:
        for used in [key for key, bucket in open_buckets.items() if _uses(node, bucket)]:
            closed.append(open_buckets.pop(used))
        collective = known.get(node)
        if collective is None:
            continue
        key = _key(collective, facts(collective.group) if collective.group else None, config)
        if key is None:
            continue
        current = open_buckets.setdefault(key, _Bucket())
        if len(current.members) == _MAX_MEMBERS:
            closed.append(current)
            current = open_buckets[key] = _Bucket()
        current.members.append(collective)
        current.results.update(collective.results[0])
    builder = FxBuilder(graph)
    for joined in [*closed, *open_buckets.values()]:
        if len(joined.members) > 1:
            _join(builder, joined.members)


def _uses(node: Node, bucket: _Bucket) -> bool:
    return node not in bucket.results and any(used in bucket.results for used in node.all_input_nodes)


def _join(builder: FxBuilder, members: list[Collective]) -> None:
    last = members[-1]
    builder.before(last.node)
    for collective in members:
        collective.refresh()
    inputs = [collective.inputs[0] for collective in members]
    joined = builder.call(_ops.plain("all_reduce_coalesced"), inputs, last.arguments["reduce_op"], last.group)
    for i, collective in enumerate(members):
        result = builder.call(operator.getitem, joined, i)
        replace(collective.results[0], builder.call(_ops.plain("wait_tensor"), result))
