"""The one pass over FX graphs: what Inductor is given of this package."""

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule

from phalanx.collectives import core_group, enable_group, is_core_group
from phalanx.inductor_plugin import _torch_compat, lower
from phalanx.inductor_plugin.bucket import bucket
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import Facts, GroupFacts, served
from phalanx.inductor_plugin.emit import Emitter
from phalanx.inductor_plugin.graph import collectives, split_waits
from phalanx.inductor_plugin.lowering import Lowering
from phalanx.inductor_plugin.pipeline_mm import pipeline
from phalanx.inductor_plugin.report import Report, add, check_strict


def facts_of(name: str) -> GroupFacts:
    """What is known of the group of that name in this rank.

    Its ranks meet here if they have not: collective then, as they all compile the graph.
    """
    try:
        enable_group(name)
    except ValueError:  # no group of this process: a graph that is only compiled here
        return GroupFacts(False, 0)
    if not is_core_group(name):
        return GroupFacts(False, 0)
    group = core_group(name)
    return GroupFacts(group is not None, group.group_size if group is not None else 0)


@cache
def _sources() -> str:
    """Stands for this code, so that graphs of another version are not taken from a cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for name in ("phalanx-core", "phalanx-collectives"):
        try:
            digest.update(importlib.metadata.version(name).encode())
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            digest.update(b"?")
    return digest.hexdigest()


class GraphPass(_torch_compat.CustomGraphPass):
    """Lowers the collectives of post-grad graphs.

    Args:
        config: The options.
        facts: What is known of a group, by its name; default: of the groups of this process.
        others: Passes that the user has put there, which run before.
    """

    def __init__(self, config: Config, facts: Facts = facts_of, others: Any = None) -> None:
        self.config = config
        self._facts = facts
        self._others = _torch_compat.passes_of(others)
        self._known: dict[str, GroupFacts] = {}

    def facts(self, name: str) -> GroupFacts:
        """What is known of a group. The same for the life of the pass, as it is part of its uuid."""
        if name not in self._known:
            self._known[name] = self._facts(name)
        return self._known[name]

    def uuid(self) -> Any:
        """What the caches of Inductor tell compiled graphs apart by, or None where another pass has nothing such."""
        others = [_torch_compat.uuid_of(each) for each in self._others]
        if None in others:
            return None
        known = tuple(sorted((name, facts.served, facts.size) for name, facts in self._known.items()))
        return repr((_sources(), self.config.key(), known, others))

    def look_at(self, module: GraphModule) -> None:
        """Let the ranks of the groups that a graph names meet, before the key of a cache is made. Collective then."""
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                for name in _torch_compat.groups_named(node):
                    self.facts(name)

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place.

        Raises:
            StrictError: With the option `strict`, where a collective is not lowered as well as it could be.
        """
        for other in self._others:
            other(graph)
        name = graph_name(graph)
        split_waits(graph)
        self._expand(graph)
        lines = pipeline(graph, self.config, self.facts)
        bucket(graph, self.config, self.facts)
        lowering = Lowering(graph, self.config, self.facts)
        if not lowering.tasks and not lines:
            return
        lowering.run()
        lines += lowering.lines
        graph.lint()
        add(Report(name, tuple(lines), lowering.arena_bytes))
        if self.config.strict:
            check_strict(name, lines, self.config.zero_copy_bytes)

    def _expand(self, nodes: Graph) -> None:
        """Write shard_dim_alltoall by collectives that the rest knows."""
        for one in collectives(nodes):
            if one.form.kind != "shard_dim_all_to_all" or one.group is None:
                continue
            facts = self.facts(one.group)
            if served(one, facts) is None:
                lower.expand_shard_dim_all_to_all(Emitter(nodes), one, facts.size)


def graph_name(nodes: Graph) -> str:
    """Which graph it is, for people: Dynamo's number, and what torch says of its place in training."""
    number = _torch_compat.compile_id()
    names = {node.name for node in nodes.nodes if node.op == "placeholder"}
    backward = any(name.startswith("tangents_") for name in names)
    forward = not backward and any(name.startswith("primals_") for name in names)
    place = "backward" if backward else "forward" if forward else "inference"
    return f"{number} {place}".strip()
