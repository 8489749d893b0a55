"""Graphs as the plug-in's pass gets them and leaves them, without compiling any: for tests of one process.

    from inductor_graphs import lowered

    graph = lowered(lambda x: fc.all_reduce(x.relu(), "sum", "0"), torch.randn(4), zero_copy_bytes=0)
    assert names(graph) == [...]

The process has a process group of torch's backend "fake", of `size` ranks, and the pass is told that the core serves
it. Nothing is sent.

    made = traced(lambda x: fc.all_reduce(x.relu(), "sum", "0") + 1, on_gpu(4), zero_copy_bytes=0)

does the same without Dynamo and autograd, also for tensors that are nowhere (`on_gpu`), and gives a module that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.inductor_plugin._eligibility import GroupFacts
from phalanx.inductor_plugin._passes import GraphPass, facts_of
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.report import Report, clear_reports, reports

__all__ = ["Lowered", "Traced", "fake_group", "lowered", "names", "nowhere", "on_gpu", "traced"]


@contextlib.contextmanager
def fake_group(size: int = 2) -> Iterator[str]:
    """A process group that sends nothing. Gives its name."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


@dataclass
class Lowered:
    """The graphs that a function became (forward, then backward), and what the pass reported."""

    graphs: list[torch.fx.Graph]
    reports: list[Report]

    @property
    def graph(self) -> torch.fx.Graph:
        """The only one."""
        (graph,) = self.graphs
        return graph


def lowered(
    function: Callable[..., Any],
    *inputs: Any,
    size: int = 2,
    served: bool = True,
    gpus: bool = True,
    shares_memory: bool = True,
    dynamic: bool | None = False,
    backward: bool = False,
    **config: Any,
) -> Lowered:
    """Trace a function, and let the pass rewrite its graphs.

    Args:
        function: Uses functional collectives on the process group of `fake_group`.
        inputs: What it is called with.
        size: Of every group, as the pass is told.
        served: Whether the core serves it, as the pass is told.
        gpus: Whether on GPUs, too.
        shares_memory: Whether its ranks are on one host.
        dynamic: As in torch.compile.
        backward: Also run the backward of the sum of its result.
        config: Options of the plug-in that are not as by default.
    """
    graphs: list[torch.fx.Graph] = []

    def facts(name: str, gpu: torch.device | None) -> GroupFacts:
        return GroupFacts(served, size, None if gpu is None else gpus, shares_memory)

    graph_pass = GraphPass(Config(**config), facts)

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        graph_pass(module.graph)
        module.recompile()
        graphs.append(module.graph)
        return lambda *args: _results(module, args)

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        return aot_module_simplified(
            module, given, fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table()
        )

    torch._dynamo.reset()
    clear_reports()
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    if backward:
        result.sum().backward()
    return Lowered(graphs, reports())


def _results(module: torch.fx.GraphModule, args: Any) -> Any:
    """Tensors of the shapes that the graph gives: nothing is computed."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    symbols: dict[Any, int] = {}
    for node, given in zip((node for node in module.graph.nodes if node.op == "placeholder"), args, strict=True):
        if isinstance(given, int) and not isinstance(node.meta["val"], int):
            symbols[node.meta["val"].node.expr] = given

    def number(value: Any) -> int:
        return value if isinstance(value, int) else int(value.node.expr.subs(symbols))

    def made(node: Any) -> Any:
        if not isinstance(node, torch.fx.Node):
            return node
        found = node.meta["val"]
        if not isinstance(found, torch.Tensor):
            return number(found)
        return torch.zeros([number(one) for one in found.shape], dtype=found.dtype)

    return [made(one) for one in output.args[0]]


_nowhere = FakeTensorMode()


def nowhere(*sizes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """A tensor without memory, of a device that need not be there: for `traced`."""
    with _nowhere:
        return torch.empty(*sizes, dtype=dtype, device=device)


def on_gpu(*sizes: int, dtype: torch.dtype = torch.float32, index: int = 0) -> torch.Tensor:
    """The same of a GPU."""
    return nowhere(*sizes, dtype=dtype, device=f"cuda:{index}")


@dataclass
class Traced:
    """What a function became, as a module that computes it, and what the pass reported."""

    module: torch.fx.GraphModule
    report: Report | None

    @property
    def names(self) -> list[str]:
        """Its calls."""
        return names(self.module.graph)


def traced(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    facts: GroupFacts | None = None,
    symbolic: bool = False,
    **config: Any,
) -> Traced:
    """Trace a function of tensors, and let the pass rewrite its graph. Inductor's own passes are not run.

    Args:
        function: Uses functional collectives.
        inputs: What it is traced with: real tensors, or those of `on_gpu`.
        facts: What the pass is told of every group; by default, what is so of the groups of this process.
        symbolic: Sizes are symbols.
        config: Options of the plug-in that are not as by default.
    """
    mode = "symbolic" if symbolic else "real" if hasattr(inputs[0], "fake_mode") else "fake"
    module = make_fx(function, tracing_mode=mode)(*inputs)
    clear_reports()
    GraphPass(Config(**config), facts_of if facts is None else lambda *_: facts)(module.graph)
    module.recompile()
    return Traced(module, next(iter(reports()), None))


def names(graph: torch.fx.Graph) -> list[str]:
    """The calls of a graph: "mm_into_" of torch.ops.phalanx, "ordered.all_reduce_", "aten.relu", ..."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            found.append(node.target.__name__)
            continue
        space = {"phalanx": "", "phalanx_ordered": "ordered."}.get(node.target.namespace, f"{node.target.namespace}.")
        found.append(f"{space}{node.target._opname}")
    return found
