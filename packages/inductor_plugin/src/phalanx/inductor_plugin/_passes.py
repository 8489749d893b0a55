"""The pass over FX graphs that is given to Inductor."""

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
from phalanx.inductor_plugin import _collective_calls, _torch_compat
from phalanx.inductor_plugin._bucketing import bucket
from phalanx.inductor_plugin._eligibility import GroupFacts, served
from phalanx.inductor_plugin._fx_builder import FxBuilder
from phalanx.inductor_plugin._graph import collectives, split_waits
from phalanx.inductor_plugin._lowering import Lowering
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.report import Report, StrictError, add, check_strict

Ask = Callable[[str, torch.device | None], GroupFacts]  # by the name of a group, and a GPU where that matters


def facts_of(name: str, gpu: torch.device | None = None) -> GroupFacts:
    """The properties of the group of that name.

    Collective if the group is not initialized yet: all of its ranks compile the graph. `gpu` is a GPU of this rank, to
    learn whether the core serves it.
    """
    try:
        enable_group(name)
    except ValueError:  # no group of this process: a graph that is only compiled here
        return GroupFacts(False, 0)
    group = core_group(name) if is_core_group(name) else None
    if group is None:
        return GroupFacts(False, 0)
    gpus = None if gpu is None else enable_group(name, device=gpu) and is_core_group(name, device=gpu)
    return GroupFacts(True, group.group_size, gpus, group.hosts <= 1)


@cache
def _sources() -> str:
    """A digest of this code, so that graphs of another version are not taken from a cache."""
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
    """Lowers the collectives of post-grad graphs, after the passes of the user, `others`."""

    def __init__(self, config: Config, facts: Ask = facts_of, others: Any = None) -> None:
        self.config = config
        self._facts = facts
        self._others = _torch_compat.passes_of(others)
        self._known: dict[str, GroupFacts] = {}

    def facts(self, name: str, gpu: torch.device | None = None) -> GroupFacts:
        """The properties of a group. They stay the same for the life of the pass, as they are part of its uuid.

        Only the first GPU of the tensors of a collective is asked about.
        """
        known = self._known.get(name)
        if known is None or (gpu is not None and known.gpus is None and known.served):
            known = self._known[name] = self._facts(name, gpu)
        return known

    def uuid(self) -> Any:
        """The key of the pass in the caches of Inductor, or None if a pass of the user has none."""
        others = [_torch_compat.uuid_of(each) for each in self._others]
        if None in others:
            return None
        known = tuple(sorted((name, *astuple(facts)) for name, facts in self._known.items()))
        return repr((_sources(), self.config.key(), known, others))

    def prepare_groups(self, module: GraphModule) -> None:
        """Initialize the groups that a graph names, before the key of a cache is computed.

        Collective if the graph names a group that is not initialized.
        """
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                for name in _torch_compat.groups_named(node):
                    self.facts(name, _torch_compat.gpu_of(node))

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place.

        Raises:
            StrictError: With the option `strict`, if a collective still needs copies.
        """
        for other in self._others:
            other(graph)
        name = graph_name(graph)
        split_waits(graph)
        self._prepare(graph)
        bucket(graph, self.config, self.facts)
        lowering = Lowering(graph, self.config, self.facts)
        if not lowering.tasks:
            return
        lowering.run()
        graph.lint()
        add(Report(name, tuple(lowering.collectives), lowering.arena_bytes))
        if self.config.strict:
            try:
                check_strict(name, lowering.collectives, self.config.zero_copy_bytes)
            except StrictError as error:
                raise _torch_compat.unwrapped(error) from None

    def _prepare(self, graph: Graph) -> None:
        """As `prepare_groups`, for graphs that it was not called with. All ranks do so in the order of the graph.

        Also replaces shard_dim_alltoall by collectives that the lowering knows.
        """
        for collective in collectives(graph):
            if collective.group is None:
                continue
            on_gpu = collective.device is not None and collective.device.type == "cuda"
            facts = self.facts(collective.group, collective.device if on_gpu else None)
            if collective.form.kind == "shard_dim_all_to_all" and served(collective, facts) is None:
                _collective_calls.expand_shard_dim_all_to_all(FxBuilder(graph), collective, facts.size)


def graph_name(nodes: Graph) -> str:
    """The name of a graph in reports: Dynamo's number of the compilation, and forward, backward or inference."""
    number = _torch_compat.compile_id()
    names = {node.name for node in nodes.nodes if node.op == "placeholder"}
    backward = any(name.startswith("tangents_") for name in names)
    forward = not backward and any(name.startswith("primals_") for name in names)
    place = "backward" if backward else "forward" if forward else "inference"
    return f"{number} {place}".strip()
