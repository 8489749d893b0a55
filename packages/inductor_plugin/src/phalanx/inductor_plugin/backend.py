"""The backend `phalanx` of torch.compile: Inductor with one additional pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from phalanx.inductor_plugin import _torch_compat
from phalanx.inductor_plugin._passes import GraphPass
from phalanx.inductor_plugin.config import split_options


def options(**ours: Any) -> dict[str, Any]:
    """Options that add the pass to stock Inductor: `torch.compile(model, options=phalanx.inductor_plugin.options())`.

    Args:
        ours: Options of the plug-in by their names in `Config` (`strict=True`).

    Returns:
        Options for `torch.compile(backend="inductor")`. They affect only what is compiled with them.

    Raises:
        ValueError: There is no such option, or its value is not allowed.

    Example:
        >>> total = torch.compile(lambda x: pc.all_reduce(x, "sum", group), options=options(strict=True))
        >>> total(torch.ones(2))
        tensor([2., 2.])
    """
    config, _ = split_options({f"phalanx.{name}": value for name, value in ours.items()})
    return {_torch_compat.PASS_OPTION: GraphPass(config, others=_torch_compat.present_pass())}


def phalanx(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend, as torch.compile calls it.

    Collectives of phalanx.collectives and of torch, on groups whose ranks share a host, become calls of the core that
    are complete on return; large inputs are computed into symmetric memory and communicated from there. No global state
    changes: the pass is given to Inductor for this graph and its backward only.

    Collective if the graph has a collective on a group that is not initialized yet: its ranks exchange addresses then.

    Args:
        module: The graph.
        inputs: The inputs of the first call.
        mode: As in torch.compile.
        options: Options of Inductor, and those of the plug-in (see `Config`) with the prefix "phalanx.":
            `{"phalanx.strict": True}`.

    Returns:
        The compiled graph.

    Raises:
        ValueError, RuntimeError: There is no such option or mode.
        StrictError: See `Config.strict`.

    Example:
        >>> total = torch.compile(lambda x: pc.all_reduce(x, "sum", group), backend="phalanx")
        >>> total(torch.ones(2))
        tensor([2., 2.])
    """
    try:
        config, theirs = split_options(options or {})
        _torch_compat.check_options(theirs)
        if mode is not None:
            theirs = {**_torch_compat.mode_options(mode), **theirs}
    except (ValueError, RuntimeError) as error:
        raise _torch_compat.unwrapped(error) from None
    others = theirs.pop(_torch_compat.PASS_OPTION, _torch_compat.present_pass())
    graph_pass = GraphPass(config, others=others)
    graph_pass.prepare_groups(module)  # groups are part of the key of AOTAutograd's cache, ...
    patches = {**theirs, _torch_compat.PASS_OPTION: graph_pass}
    return _torch_compat.compile_with(module, inputs, patches, graph_pass.prepare_groups)  # ... and of Inductor's
