"""The model as one compiled graph, DTensors and their collectives included: what `--compile` trains with."""

import importlib
from collections import Counter

from phalanx.tools.demo.model import Transformer
from phalanx.tools.demo.options import PLUGIN, PLUGIN_BACKEND


def compile_model(model: Transformer, backend: str) -> None:
    """Let the model run compiled from its next call on, which compiles; collective as all calls are.

    Args:
        model: Its parameters are DTensors.
        backend: Of torch.compile.
    """
    model.compile(backend=backend, fullgraph=True, dynamic=False)


def reports(backend: str) -> list[str]:
    """What the backend says of each graph that it compiled on this rank; nothing, if it is not ours."""
    if backend != PLUGIN_BACKEND:
        return []
    found = [_shortened(str(each)) for each in importlib.import_module(PLUGIN).reports()]
    return found or [
        "The graphs are of an earlier run, from Inductor's cache; with TORCHINDUCTOR_FX_GRAPH_CACHE=0 they get reports."
    ]


def _shortened(text: str) -> str:
    """A report in which lines that are equal are one; the blocks of a model have the same graphs."""
    head, *lines = text.splitlines()
    return "\n".join([head, *(f"  {count} x {line.strip()}" for line, count in Counter(lines).items())])
