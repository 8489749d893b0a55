"""The private parts of torch that this package uses. No other module of the package uses any.

Each entry says in which versions of torch it was read. `test_inductor_torch_compat.py` fails when torch moves one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as _distributed_c10d

_c10d: Any = _distributed_c10d

try:
    # Read in 2.11 to 2.15: a pass over FX graphs with a uuid for the caches, and the compiler that takes it.
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx as _compile_fx
    from torch._inductor.compile_fx import compile_fx_inner as _compile_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"phalanx.inductor_plugin needs a private part of torch that torch {torch.__version__} does not have: {error}. "
        "Install a torch from 2.11 to 2.15."
    ) from error

OpOverload = torch._ops.OpOverload  # read in 2.11 to 2.15
HigherOrderOperator = torch._ops.HigherOrderOperator


def op_name(target: Any) -> str:
    """The name of an OpOverload without namespace and overload, or "". Read in 2.11 to 2.15."""
    return str(getattr(target, "_opname", ""))


def schema_of(target: Any) -> Any:
    """The schema of an OpOverload. Read in 2.11 to 2.15."""
    return target._schema


PASS_OPTION = "post_grad_custom_post_pass"  # of Inductor's config; read in 2.11 to 2.15


def compile_with(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    prepare_groups: Callable[[torch.fx.GraphModule], None],
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with Inductor and these options. Read in 2.11 to 2.15.

    `prepare_groups` is called with each graph before Inductor looks it up in its cache.
    """

    def inner(part: torch.fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        prepare_groups(part)
        return _compile_inner(part, given, **options)

    compiled: Any = _compile_fx(module, inputs, inner_compile=inner, config_patches=dict(patches))
    return cast(Callable[..., Any], compiled)


def mode_options(mode: str) -> dict[str, Any]:
    """The options that `torch.compile(mode=...)` stands for. Read in 2.11 to 2.15.

    Raises:
        RuntimeError: There is no such mode.
    """
    from torch._inductor import list_mode_options

    known: dict[str, dict[str, Any]] = list_mode_options()
    if mode == "default":
        return {}
    if mode not in known:
        raise RuntimeError(f"backend 'phalanx': unknown mode '{mode}'; expected default, {', '.join(known)}")
    return dict(known[mode])


def unwrapped(error: Exception) -> Exception:
    """The same error in a class that Dynamo raises as it is, instead of within a BackendCompilerFailed.

    Read in 2.13. A torch without the class wraps the error.
    """
    try:
        from torch._dynamo.exc import ShortenTraceback
    except ImportError:  # pragma: no cover
        return error
    kind = type(error)
    made = type(kind.__name__, (ShortenTraceback, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    raised: Exception = made(str(error), first_useful_frame=None)
    return raised


def with_effects() -> Any:
    """The node of a call of an op with an effect: (token, op, arguments) -> (token, results).

    Read in 2.13.
    """
    return torch.ops.higher_order.with_effects


def keep_effect(op: Any) -> None:
    """Register an op for `with_effects`: Inductor keeps such calls in the order of the graph. Read in 2.13."""
    from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op

    if _get_effect(op) is None:
        _register_effectful_op(op, _EffectType.ORDERED)


def makes_cuda_graphs() -> bool:
    """Whether Inductor is to record what it compiles as CUDA graphs (mode "reduce-overhead"). Read in 2.11 to 2.15."""
    return bool(inductor_config.triton.cudagraphs)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that Inductor does not have. Read in 2.11 to 2.15.

    Raises:
        RuntimeError: There is no such option.
    """
    known = inductor_config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            raise RuntimeError(
                f"backend 'phalanx': Inductor has no option '{name}'; the options of the plug-in begin with 'phalanx.'"
            )


def present_pass() -> Any:
    """The pass that the user has already set, or None. Read in 2.11 to 2.15."""
    return getattr(inductor_config, PASS_OPTION)


def passes_of(passes: Any) -> list[Any]:
    """A pass, or several (from 2.13 on), as a list."""
    if passes is None:
        return []
    return list(passes) if isinstance(passes, list | tuple) else [passes]


def uuid_of(custom_pass: Any) -> Any:
    """The uuid of a pass, or None if it has none. Read in 2.11 to 2.15."""
    return custom_pass.uuid() if isinstance(custom_pass, CustomGraphPass) else None


def size_hint(value: Any) -> int | None:
    """The value of a symbolic size in this call, or None if it depends on the data. Read in 2.11 to 2.15."""
    if isinstance(value, int):
        return value
    node = value.node
    if not node.has_hint():
        return None
    return int(node.hint)


def group_name_of(value: Any) -> str | None:
    """The name of a group in a graph, where it is a string or (from 2.13 on) a ProcessGroup. None for other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    value = getattr(value, "real_obj", value)  # a FakeScriptObject has one
    name = getattr(value, "group_name", None)
    return str(name) if name is not None else None


_SENDING = ("_c10d_functional", "_c10d_functional_autograd", "phalanx", "phalanx_ordered", "_dtensor")


def groups_named(node: torch.fx.Node) -> list[str]:
    """The names of groups among the arguments of a collective, before or after autograd. Read in 2.11 to 2.15."""
    target = node.target
    space = getattr(target, "namespace", None) or str(getattr(target, "_qualified_op_name", "")).partition("::")[0]
    if node.op != "call_function" or space not in _SENDING:
        return []
    names = (group_name_of(argument) for argument in (*node.args, *node.kwargs.values()))
    return [name for name in names if name is not None and _is_group(name)]


def gpu_of(node: torch.fx.Node) -> torch.device | None:
    """The GPU of the tensors that a node takes, before or after autograd, or None. Read in 2.11 to 2.15."""
    for operand in node.all_input_nodes:
        value = operand.meta.get("val", operand.meta.get("example_value"))
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                return tensor.device
    return None


def _is_group(name: str) -> bool:
    try:
        _c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):  # the argument is another string, such as a reduction
        return False
    return True


def compile_id() -> str:
    """The number of the current compilation of Dynamo, such as "0/1", or "". Read in 2.11 to 2.15."""
    from torch._guards import CompileContext

    number = CompileContext.current_compile_id()
    return "" if number is None else str(number)


def is_generated(target: Any) -> bool:
    """Whether Inductor generates the kernel of an op, and so can write its result anywhere. Read in 2.11 to 2.15."""
    from torch._inductor import lowering

    aten = torch.ops.aten
    extern = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward)
    packet = getattr(target, "overloadpacket", None)
    if packet in extern:
        return False
    return target in lowering.lowerings and target not in lowering.fallbacks and packet not in lowering.fallbacks
