"""The private or unlisted parts of torch that this package relies on. Nothing else in it imports any.

Each says in which versions it was read. `test_torch_compat.py` fails with a plain text when torch moves one.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

# Public, but torch.distributed does not list it for type checkers. Read in 2.11 to 2.13.
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from phalanx.core.timeouts import milliseconds

_native_c10d: Any = torch._C._distributed_c10d
_Function = TypeVar("_Function", bound=Callable[..., Any])

# ---- dispatch -------------------------------------------------------------------------------------------------------

# Read in 2.13: True while Dynamo traces the caller, and a constant for Dynamo. (torch.compiler.is_dynamo_compiling is
# the public name of the same function.)
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def constant_in_graphs(function: _Function) -> _Function:
    """As torch.compiler.assume_constant_result, which imports all of Dynamo. Read in 2.11 to 2.13."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Read in 2.11 to 2.13: makes a tensor that has sizes, strides, dtype and device, but no storage.
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

# Read in 2.11 to 2.13: what `torch.Tensor.__torch_function__` is where that protocol is off.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys
_PLAIN_KEYS: int = _dispatch_keys(torch.empty(0, device="cpu")).raw_repr()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the kernel for the CPU may be called without the dispatcher.

    The dispatcher would do nothing else: an ordinary CPU tensor (no subclass, lazy conjugate, functorch wrapper, ...)
    that needs no gradient, while no mode and no profiler wants to see the call. Read in 2.11 to 2.13.
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and _dispatch_keys(tensor).raw_repr() == _PLAIN_KEYS
        and not (tensor.requires_grad and _grad_enabled())
        and not (_dispatch_modes() or _profiling())
    )


def is_watched() -> bool:
    """Whether a mode or a profiler wants to see the ops that are called. Read in 2.11 to 2.13."""
    return bool(_dispatch_modes() or _profiling())


def kernel_call(op: Any) -> Callable[..., Any]:
    """A function of (key set, *arguments) that calls the kernel of an op for these keys. Read in 2.11 to 2.13.

    Args:
        op: An OpOverload, such as `torch.ops.phalanx.all_reduce.default`.
    """
    return cast(Callable[..., Any], op._handle.redispatch_boxed)


def below_autograd(keys: Any) -> Any:
    """The key set without autograd and what comes before it. Read in 2.11 to 2.13."""
    return keys & torch._C._after_autograd_keyset


BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd  # a context manager; read in 2.11 to 2.13


_libraries: dict[tuple[str, str], Any] = {}  # what is registered through them lives as long as they


def library(namespace: str, kind: str = "FRAGMENT") -> Any:
    """What adds to a namespace of ops."""
    make: Any = torch.library.Library  # public, without types
    if (namespace, kind) not in _libraries:
        _libraries[namespace, kind] = make(namespace, kind)
    return _libraries[namespace, kind]


def implement(to: Any, name: str, kernel: Callable[..., Any], key: str, with_keys: bool = False) -> None:
    """Register a kernel of an op. Read in 2.11 to 2.13 for `with_keys`: the kernel gets the dispatch key set first."""
    to.impl(name, kernel, key, with_keyset=with_keys)


def fall_through(to: Any, name: str, key: str) -> None:
    """Let an op pass over a dispatch key. Read in 2.13."""
    to.impl(name, torch.library.fallthrough_kernel, key)


def add_op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op of torch.ops.phalanx that stays in graphs though its result is not used. `fake` is its kernel for
    tensors without data."""
    ours, name = library("phalanx"), schema.partition("(")[0]
    ours.define(schema)
    implement(ours, name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"phalanx::{name}", fake, lib=ours)
    keep_in_graphs(getattr(torch.ops.phalanx, name).default)


def register_functionalization(op: Any, kernel: Callable[..., Any]) -> None:
    """Say how `torch.compile` makes a graph without mutations of an op. Read in 2.13."""
    op.py_functionalize_impl(kernel)


def is_tracing() -> bool:
    """Whether ops are being recorded or run on fake tensors: by make_fx, AOTAutograd, export. Read in 2.13."""
    mode, keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    if mode(keys.FAKE) is not None or mode(keys.PROXY) is not None or mode(keys.FUNCTIONAL) is not None:
        return True
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))


def keep_in_graphs(op: Any) -> None:
    """Keep an op in a graph though its result is not used. Read in 2.11 to 2.13."""
    torch.fx.node.has_side_effect(op)


def is_view(op: Any) -> bool:
    """Whether an aten op returns views of its first argument and runs as it is. Read in 2.11 to 2.13.

    Ops that the dispatcher takes apart before they get here (`to`, `contiguous`, `reshape`) are none.
    """
    arguments = op._schema.arguments
    if not arguments or op.namespace != "aten":
        return False
    alias = arguments[0].alias_info
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if alias is None or alias.is_write or torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite):
        return False
    return all(result.alias_info is not None for result in op._schema.returns)


# ---- process groups -------------------------------------------------------------------------------------------------


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of that name in this rank, or None. Read in 2.11 to 2.13."""
    try:
        return _c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (RuntimeError, ValueError):
        return None


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether the group is one of this rank's and was not destroyed. Read in 2.11 to 2.13.

    torch.distributed knows it, or it has a name by which ops find it.
    """
    return is_known(group) or group_named(name_of(group)) is group


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed made the group; else somebody registered it by a name. Read in 2.11 to 2.13."""
    return group in _c10d._world.pg_map


def name_of(group: dist.ProcessGroup) -> str:
    """The name of a group; "" where it was never given one. Read in 2.13."""
    try:
        return str(group.group_name)
    except RuntimeError:
        return ""


def registered_groups() -> list[dist.ProcessGroup]:
    """The groups of this rank that were not destroyed. Read in 2.11 to 2.13."""
    return list(_c10d._world.pg_map)


def life_of(group: dist.ProcessGroup) -> Any:
    """An object that lives exactly as long as the group is registered, and that nobody else holds.

    It is the Python object of the group's store in the map that destroy_process_group clears. Read in 2.11 to 2.13:
    the group itself may live on in the hands of whoever has it. For a group that only has a name, the group.
    """
    known = _c10d._world.pg_map.get(group)
    return group if known is None else known[1]


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of a group, which its ranks share. Read in 2.11 to 2.13."""
    known = _c10d._world.pg_map.get(group)
    return cast(Any, group).get_group_store() if known is None else known[1]


def base_of(store: Any) -> Any:
    """The store below all prefixes. The same object for the same store, as long as somebody has it. Read in 2.13."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def wrap_backend(backend: Any, name: str, store: Any, rank: int, size: int) -> dist.ProcessGroup:
    """A process group whose tensors of the CPU a backend serves, and which torch's tables do not have. Read in 2.11 to
    2.14."""
    group: Any = dist.ProcessGroup(store, rank, size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    group._register_backend(torch.device("cpu"), custom, backend)
    group._set_group_name(name)
    return cast(dist.ProcessGroup, group)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of a group, in order; its own numbers where nobody said the global ones. Read in 2.11 to 2.13."""
    known = _c10d._world.pg_group_ranks.get(group) or {}
    if len(known) != group.size():  # of a group that was made by hand
        return tuple(range(group.size()))
    return tuple(sorted(known, key=lambda rank: known[rank]))


def timeout_ms_of(group: dist.ProcessGroup) -> int:
    """The timeout of a group in milliseconds, or 0 where it does not tell it. Read in 2.13.

    Of its backend for the CPU, if it has one.
    """
    for device in (torch.device("cpu"), *cast(Any, group)._device_types):
        try:
            timeout: timedelta = cast(Any, group)._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # it has no backend for that; or one whose options are not known
            continue
        return milliseconds(timeout)
    return 0


def default_store() -> Any:
    """The store of the default process group: all ranks see it. Read in 2.11 to 2.13."""
    return _c10d._get_default_store()


def backends_of(group: dist.ProcessGroup) -> set[str]:
    """Names of the backends of a group, such as {"gloo", "nccl"}. Read in 2.11 to 2.13."""
    config = _c10d._world.pg_backend_config.get(group)
    if config is None:
        made = cast(Any, group)
        return {str(made._get_backend(device).name()).lower() for device in made._device_types}
    return {part.rpartition(":")[2] for part in str(config).split(",")}


def tag_of(group: dist.ProcessGroup) -> str:
    """The tag of a group. Read in 2.11 to 2.13."""
    return str(_c10d._get_group_tag(group))


def find_group(ranks: list[int], tag: str) -> dist.ProcessGroup | None:
    """A process group of just these ranks and this tag, or None. Read in 2.11 to 2.13."""
    for group in _c10d._world.tags_to_pg.get(_full_tag(tag), []):
        if sorted(dist.get_process_group_ranks(group)) == sorted(ranks):
            return group
    return None


def make_group(ranks: list[int], tag: str) -> dist.ProcessGroup:
    """A new process group with a tag. Collective among `ranks`. Read in 2.11 to 2.13.

    torch makes its name from the ranks and from how many groups the calling rank has, which must be the same on all.
    (Without use_local_synchronization two groups that are made at the same time get one name, and hang: in 2.13 torch's
    own functional collectives do.)
    """
    made = _c10d._new_group_with_tag(sorted(ranks), pg_tag=tag.removeprefix("user:"), use_local_synchronization=True)
    return cast(dist.ProcessGroup, made)


def _full_tag(tag: str) -> str:
    return tag if not tag or tag.startswith(("ptd:", "user:")) else f"user:{tag}"


# ---- work of torch.distributed --------------------------------------------------------------------------------------


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Let wait_tensor wait for a Work of torch.distributed. Read in 2.11 to 2.13."""
    _native_c10d._register_work(tensor, work)


def registered_work_count() -> int:
    """How many tensors torch.distributed has work for. Read in 2.11 to 2.13."""
    return int(_native_c10d._get_work_registry_size())


@contextlib.contextmanager
def allow_inflight_collective_as_graph_input_ctx(value: bool = True) -> Iterator[None]:
    """A context in which collectives of torch.distributed with `async_op` may be waited for in a compiled graph.

    As torch.distributed._functional_collectives.allow_inflight_collective_as_graph_input_ctx: torch then remembers
    their work by the tensor, for `wait_tensor` of the graph. Read in 2.11 to 2.13.

    Args:
        value: Whether they may.

    Example:
        >>> with allow_inflight_collective_as_graph_input_ctx():
        ...     x = torch.ones(2)
        ...     work = dist.all_reduce(x, async_op=True)
        ...     torch.ops._c10d_functional.wait_tensor(x)  # as a compiled graph does
        tensor([2., 2.])
    """
    before = _native_c10d._allow_inflight_collective_as_graph_input()
    _native_c10d._set_allow_inflight_collective_as_graph_input(value)
    try:
        yield
    finally:
        _native_c10d._set_allow_inflight_collective_as_graph_input(before)


def coalesce_state() -> dict[dist.ProcessGroup, list[Any]]:
    """The process groups on which collectives are being coalesced, with what was called. Read in 2.11 to 2.13.

    all_reduce, all_gather_single and reduce_scatter_single look for their group in it, and append a `_CollOp`, with the
    attributes op, tensor, dst_tensor and redop.
    """
    return cast(dict[dist.ProcessGroup, list[Any]], _c10d._world.pg_coalesce_state)


# ---- back ends ------------------------------------------------------------------------------------------------------

# The timeout of an options object without one: kUnsetTimeout, the default of the group.
UNSET = timedelta(milliseconds=-1)


def give_tensors_as_they_are() -> None:
    """Let torch's ops of process groups give tensors with the conjugate or negative bit to a backend. Read in 2.13.

    Torch's own rule for these bits gives the backend a plain copy, and does not copy the result back: what is called in
    place would write nothing. Does nothing the second time.
    """
    if ("c10d", "IMPL") in _libraries:
        return
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            for key in ("Conjugate", "Negative"):
                fall_through(library("c10d", "IMPL"), name.removeprefix("c10d::"), key)


def backend_of(group: dist.ProcessGroup, name: str) -> Any:
    """The Backend that serves the devices for which a group has a backend of that name.

    Raises:
        RuntimeError: It has none.
    """
    for device, backend in dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).device_backend_map.items():
        if backend == name:
            return cast(Any, group)._get_backend(torch.device(device))
    raise RuntimeError(f"the process group has no backend '{name}'; it has {dist.get_backend_config(group)}")


# ---- torch's own back ends -------------------------------------------------------------------------------------------


def has_nccl() -> bool:
    """Whether this torch and this host can serve tensors of GPUs by NCCL."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def join_backends(options: Any, cpu: Any, nccl_options: Any) -> Any:
    """A process group with one backend for the CPU, and NCCL for GPUs where this host has it. Read in 2.13.

    Torch takes it as it is for the group that it makes, and asks no other backend of it: so NCCL is in it whether or
    not the caller named it. Where `cpu` is None, torch's gloo is made here, and the call is collective.
    """
    kinds = dist.ProcessGroup.BackendType
    group: Any = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    kind = kinds.GLOO if cpu is None else kinds.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, _make_gloo(options) if cpu is None else cpu)
    if has_nccl():
        group._register_backend(torch.device("cuda"), kinds.NCCL, _make_nccl(options, nccl_options))
    return group


def _make_gloo(options: Any) -> Any:
    store = PrefixStore("gloo", options.store)
    made = _native_c10d.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    _describe(made.options, options)
    made._set_sequence_number_for_group()
    return made


def _make_nccl(options: Any, given: Any) -> Any:
    own = _native_c10d.ProcessGroupNCCL.Options() if given is None else given
    own._timeout = options.timeout
    _describe(own, options)
    store = PrefixStore("nccl", options.store)
    made = _native_c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, own)
    made._set_sequence_number_for_group()
    return made


def _describe(own: Any, options: Any) -> None:
    own.global_ranks_in_group, own.group_name = options.global_ranks_in_group, options.group_id
