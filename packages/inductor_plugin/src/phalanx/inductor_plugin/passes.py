"""The one pass over FX graphs: what Inductor is given of this package."""

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from phalanx.collectives import core_group, enable_group, is_core_group
from phalanx.inductor_plugin import _torch_compat, lower
from phalanx.inductor_plugin.bucket import bucket
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import GroupFacts, served
from phalanx.inductor_plugin.emit import Emitter
from phalanx.inductor_plugin.graph import collectives, split_waits
from phalanx.inductor_plugin.lowering import Lowering
from phalanx.inductor_plugin.pipeline_mm import pipeline
from phalanx.inductor_plugin.report import Report, add, check_strict

Ask = Callable[[str, torch.device | None], GroupFacts]  # by the name of a group, and a GPU where that matters


def facts_of(name: str, gpu: torch.device | None = None) -> GroupFacts:
    """What is known of the group of that name in this rank.

    Its ranks meet here if they have not: collective then, as they all compile the graph.

    Args:
        name: Of the group.
        gpu: That of this rank, to learn whether the core serves it.
    """
    try:
        enable_group(name)
    except ValueError:  # no group of this process: a graph that is only compiled here
        return GroupFacts(False, 0)
    if not is_core_group(name):
        return GroupFacts(False, 0)
    group = core_group(name)
    if group is None:
        return GroupFacts(False, 0)
    gpus = None if gpu is None else enable_group(name, device=gpu) and is_core_group(name, device=gpu)
    return GroupFacts(True, group.group_size, gpus, group.hosts <= 1)


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
        facts: What is known of a group, by its name and a GPU; default: of the groups of this process.
        others: Passes that the user has put there, which run before.
    """

    def __init__(self, config: Config, facts: Ask = facts_of, others: Any = None) -> None:
        self.config = config
        self._facts = facts
        self._others = _torch_compat.passes_of(others)
        self._known: dict[str, GroupFacts] = {}

    def facts(self, name: str, gpu: torch.device | None = None) -> GroupFacts:
        """What is known of a group. The same for the life of the pass, as it is part of its uuid.

        Args:
            name: Of the group.
            gpu: Where tensors of its collectives lie, if on a GPU. The first one that is named is asked about.
        """
        known = self._known.get(name)
        if known is None or (gpu is not None and known.gpus is None and known.served):
            known = self._known[name] = self._facts(name, gpu)
        return known

    def uuid(self) -> Any:
        """What the caches of Inductor tell compiled graphs apart by, or None where another pass has nothing such."""
        others = [_torch_compat.uuid_of(each) for each in self._others]
        if None in others:
            return None
        known = tuple(sorted((name, *astuple(facts)) for name, facts in self._known.items()))
        return repr((_sources(), self.config.key(), known, others))

    def look_at(self, module: GraphModule) -> None:
        """Let the ranks of the groups that a graph names meet, before the key of a cache is made. Collective then."""
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                for name in _torch_compat.groups_named(node):
                    self.facts(name, _torch_compat.gpu_of(node))

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place.

        Raises:
            StrictError: With the option `strict`, where a collective is not lowered as well as it could be.
        """
        for other in self._others:
            other(graph)
        name = graph_name(graph)
        split_waits(graph)
        self._meet(graph)
        self._expand(graph)
        lines, unpiped = pipeline(graph, self.config, self.facts)
        bucket(graph, self.config, self.facts)
        lowering = Lowering(graph, self.config, self.facts, unpiped)
        if not lowering.tasks and not lines:
            return
        lowering.run()
        lines += lowering.lines
        graph.lint()
        add(Report(name, tuple(lines), lowering.arena_bytes))
        if self.config.strict:
            check_strict(name, lines, self.config.zero_copy_bytes)

    def _meet(self, nodes: Graph) -> None:
        """Learn of the groups, where `look_at` was not shown the graph. All ranks do so in the order of the graph."""
        for one in collectives(nodes):
            if one.group is not None:
                on_gpu = one.device is not None and one.device.type == "cuda"
                self.facts(one.group, one.device if on_gpu else None)

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
