"""The private or unlisted parts of torch that this package relies on. Nothing else in it imports any.

Each says in which versions it was read. `test_torch_compat.py` fails with a plain text when torch moves one.
"""

import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import islice
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.types import IntLikeType
from torch.utils import checkpoint

# Read in 2.11 to 2.13.
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

# ---- modules of torch that are not imported here, since they bring sympy or Dynamo -----------------------------------

_awaited: dict[str, list[Callable[[], object]]] = {}


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Have a function called once before the import of a module returns: at once, if the module is there already."""
    if name in sys.modules:
        importlib.import_module(name)  # waits for another thread that is importing it
        call()
        return
    if not _awaited:
        sys.meta_path.insert(0, _Finder())
    _awaited.setdefault(name, []).append(call)


class _Finder:
    """Finds the modules of `when_imported` as the other finders do, and adds the calls to what runs a module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _awaited:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                for call in _awaited.pop(name, ()):
                    call()

            loader.exec_module = exec_module
        return spec


# ---- placements ------------------------------------------------------------------------------------------------------

_PLACEMENTS = "torch.distributed.tensor.placement_types"
# The base classes of torch's placements; 2.11 has them in Python only.
_native: Any = getattr(torch._C, "_distributed", None)
Placement: Any = getattr(_native, "Placement", None) or importlib.import_module(_PLACEMENTS).Placement


def torch_placement(name: str) -> Any:
    """The class of torch for Shard, StridedShard, Replicate or Partial; imports torch's placements."""
    return getattr(importlib.import_module(_PLACEMENTS), "_StridedShard" if name == "StridedShard" else name)


def placement_base(name: str) -> Any:
    """A class to derive a placement from, until `adopt_placements` replaces it by the class of torch of that name.

    torch's own class derives from the same class in C++. Read in 2.13.
    """
    native = getattr(_native, name, None)
    if native is None:
        return torch_placement(name)
    return type(name, (native,), {"__module__": __name__})


def adopt_placements(ours: Sequence[Any], members: dict[type, tuple[str, ...]]) -> None:
    """Once torch's placements are imported, derive ours, whose last bases are from `placement_base`, from them, and let
    Dynamo hold instances of the classes in `members` as constants, and call or read these members while it traces.

    Dynamo imports torch's placements itself. Subclasses of these inherit their registration; ours adds members that
    torch's have not. Where torch has not registered its own, as in 2.11, Dynamo knows placements by `isinstance` alone,
    and refuses classes whose metaclass is not its own: there is nothing to register. Read in 2.11 and 2.13.
    """

    def adopt() -> None:
        for cls in ours:
            base = torch_placement(cls.__name__)
            if cls.__bases__[-1] is not base:
                cls.__bases__ = (*cls.__bases__[:-1], base)
        try:
            from torch._library.opaque_object import MemberType, is_opaque_type, register_opaque_type
        except ImportError:
            return
        if is_opaque_type(Placement):
            for cls, names in members.items():
                register_opaque_type(cls, typ="value", members=dict.fromkeys(names, MemberType.USE_REAL))

    when_imported(_PLACEMENTS, adopt)


def _make_wrapper(cls: Any, local: torch.Tensor, spec: Any, requires_grad: bool) -> Any:
    made = torch.Tensor._make_wrapper_subclass(
        cls,
        spec.shape,
        strides=spec.stride,
        dtype=spec.dtype,
        device=local.device,
        layout=local.layout,
        requires_grad=requires_grad,
    )
    made._local_tensor = local
    made._spec = spec
    return made


# A wrapper of `cls` with the slots _local_tensor and _spec: torch makes its own DTensors with the first, which takes
# half the time. Read in 2.11 to 2.13.
_new: Any = getattr(torch.Tensor, "_dtensor__new__", None)
# Read in 2.11 to 2.13: the __torch_function__ of a class whose ops are seen below autograd only.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
make_wrapper: Callable[[Any, torch.Tensor, Any, bool], Any] = _make_wrapper if _new is None else _new


def bare(op: Any) -> Callable[..., Any]:
    """The function that an OpOverload calls: the same without a frame of Python. Read in 2.11 to 2.13."""
    found: Callable[..., Any] = op._op
    return found


def fake_mode() -> Any:
    """A mode in which tensors have no values. Read in 2.11 to 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Let compiled functions have calls of a function in their graph, and not look into it.

    torch.compiler.allow_in_graph imports Dynamo, so it is called when Dynamo is imported. Read in 2.11 to 2.13.
    """
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(function))  # type: ignore[no-untyped-call]


# Public, but under a private name or without types. Read in 2.11 to 2.13.
OpOverload: TypeAlias = torch._ops.OpOverload
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
tensor_data: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values: what is done with it is done while tracing. Read in 2.11 to 2.13."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_higher_order(op: Any) -> bool:
    """Whether an op is one that takes functions. Read in 2.11 to 2.13."""
    return isinstance(op, torch._ops.HigherOrderOperator)


def untraced() -> Any:
    """A context in which no mode sees what is called, so that nothing is recorded. Read in 2.11 to 2.13."""
    return _disable_current_modes()


def tracing_fake_mode() -> Any:
    """The fake mode of whoever traces now, or None. Read in 2.11 to 2.13."""
    return torch._guards.detect_fake_mode()


def real_mesh(mesh: Any) -> Any:
    """The mesh, where torch.compile gives a stand-in for one; what is given otherwise. Read in 2.13."""
    return mesh.real_obj if type(mesh) is not DeviceMesh and type(mesh).__name__ == "FakeScriptObject" else mesh


def decomposition(op: Any) -> Callable[..., Any] | None:
    """The decomposition of an op, as a function of the same arguments, or None. Read in 2.11 to 2.13."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        composite: Callable[..., Any] = op.decompose
        return composite
    with untraced():
        from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found


def in_decomposition() -> bool:
    """Whether torch takes an op apart, as it does for graphs before the op is dispatched. Slow. Read in 2.13."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        if frame.f_globals.get("__name__", "").startswith(("torch._decomp", "torch._refs")):
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread. Read in 2.11 to 2.13."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def lazy_changes_made() -> Iterator[None]:
    """Within it, ops see what conj(), imag and zeros without memory leave undone, also below `__torch_dispatch__`.

    Read in 2.11 to 2.13.
    """
    with ExitStack() as stack:
        for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def current_mesh(who: str) -> DeviceMesh:
    """The mesh of the `with mesh:` around; a RuntimeError if there is none. Read in 2.11 to 2.13."""
    found: DeviceMesh | None = None
    with suppress(AttributeError, ImportError, RuntimeError):
        from torch.distributed.device_mesh import _mesh_resources

        found = _mesh_resources.get_current_mesh()
    if found is None:
        raise RuntimeError(f"{who}: no mesh was given: give one, or write `with mesh:` around the call")
    return found


# Public, but without types. Read in 2.11 to 2.13.
sym_min: Callable[[IntLikeType, IntLikeType], IntLikeType] = torch.sym_min
sym_max: Callable[[IntLikeType, IntLikeType], IntLikeType] = torch.sym_max


def surely_divides(size: IntLikeType, divisor: IntLikeType) -> bool:
    """Whether a size is known to be a multiple of `divisor`; False where a SymInt does not say.

    Where a SymInt has a hint, the answer becomes a guard. Read in 2.13.
    """
    return _surely(size % divisor == 0)  # type: ignore[operator]


def surely_equal(a: IntLikeType, b: IntLikeType) -> bool:
    """Whether two sizes are known to be equal; False where a SymInt does not say. Read in 2.13."""
    return _surely(a == b)


def known_equal(a: IntLikeType, b: IntLikeType) -> bool:
    """Whether two sizes are equal whatever their symbols are. Never a guard. Read in 2.13."""
    return _known(a == b)


def known_to_divide(size: IntLikeType, divisor: IntLikeType) -> bool:
    """Whether a size is a multiple of another whatever their symbols are. Never a guard. Read in 2.13."""
    return _known(size % divisor == 0)  # type: ignore[operator]


def hint(size: IntLikeType) -> int:
    """The size that a SymInt had when it was made: for estimates, of which no guard is to come; 64 where there is none.

    Read in 2.13; earlier versions keep it in the node.
    """
    if type(size) is int:
        return size
    try:
        from torch.fx.experimental.symbolic_shapes import optimization_hint
    except ImportError:
        found = getattr(getattr(size, "node", None), "hint", None)
        return 64 if found is None else int(found)
    return int(optimization_hint(size, fallback=64))


def plain(size: IntLikeType) -> IntLikeType:
    """The int, where a SymInt is one whatever its symbols are. Read in 2.13."""
    if type(size) is int:
        return size
    known: int | None = size.node.maybe_as_int()  # type: ignore[union-attr]
    return size if known is None else known


def in_graph_sizes(size: IntLikeType, known: Sequence[torch.SymInt]) -> IntLikeType:
    """A size as the graph can have it: made of sizes that it knows; the int, if it is one.

    A SymInt that was made while nothing was recorded is one that a graph knows by its expression alone: it cannot be an
    argument there. So the known size of the same expression is taken, or the expression is worked out once more from
    known sizes, which records it. Read in 2.13.
    """
    size = plain(size)
    if type(size) is int:
        return size
    expression = size.node.expr  # type: ignore[union-attr]
    # The stride of a gradient may be unknown to the graph as well: torch gives it sizes only.
    tracer = graph_tracer()
    known = [one for one in known if tracer is None or _slot_of(one, tracer) is not None]
    found = next((one for one in known if one.node.expr == expression), None)
    if found is not None:
        return found
    symbols = {one.node.expr: one for one in reversed(known) if one.node.expr.is_Symbol}
    if not expression.free_symbols or not expression.free_symbols <= symbols.keys():
        return size
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return plain(sympy_interp(PythonReferenceAnalysis, symbols, expression))


# Only who traces has a SymInt, and what looks at one brings sympy.


def _known(truth: Any) -> bool:
    if type(truth) is bool:
        return truth
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(truth))


def _surely(truth: Any) -> bool:
    if type(truth) is bool:
        return truth
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(truth))


def mesh_key(mesh: DeviceMesh) -> Hashable:
    """The key by which torch compares meshes, without the mesh.

    2.13 has a method for it. Earlier versions are asked for what they show: ranks, shape, names and device type; and
    the thread, which stands for the rank under the threaded backend. Read in 2.13.
    """
    own: Callable[[], Hashable] | None = getattr(mesh, "_hash_key", None)
    if own is not None:
        return own()
    ranks = tuple(mesh.mesh.flatten().tolist())
    return ranks, tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type, getattr(mesh, "_thread_id", None)


def group_named(name: str) -> Any:
    """The process group of that name in this rank; a RuntimeError if there is none. Read in 2.11 to 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def op_library(
    namespace: str, ops: Iterable[tuple[str, Callable[..., Any], Callable[..., Any], tuple[torch.Tag, ...]]]
) -> Any:
    """Define ops of torch.ops.<namespace> that have no gradient, each by its schema, its kernel, what it does to
    tensors without data, and its tags. They live as long as what is returned. Public, but without types.
    """
    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, kernel, fake, tags in ops:
        name = schema.partition("(")[0]
        library.define(schema, tags=tags)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return library


def before_autograd(names: Sequence[str], around: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Have around(what goes on with the op, args, kwargs) called for ops of aten, such as "quantile.scalar", before
    torch takes them apart, where tensors have a __torch_dispatch__. What is returned must be kept.

    Such tensors have a key above that of autograd, at which torch has nothing of its own for these ops. Read in 2.13.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    key = torch._C.DispatchKey.PythonTLSSnapshot

    def kernel(op: Any) -> Callable[..., Any]:
        def run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            return around(partial(op.redispatch, keys.remove(key)), args, kwargs)

        return run

    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, kernel(op), "PythonTLSSnapshot", with_keyset=True)
    return library


def add_gradient(name: str, backward: Callable[..., Any], save: Callable[..., Any] | None, library: Any) -> None:
    """Give the op "namespace::name" of a library that `op_library` returned a gradient. Public, but without types.

    save(ctx, inputs, output) is called after the op; backward(ctx, gradients of the results) gives those of the inputs.
    """
    torch.library.register_autograd(name, backward, setup_context=save, lib=library)


def graph_tracer() -> Any:
    """The object that records ops in a graph now, or None: it identifies the graph. Read in 2.11 to 2.13."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def keep_effect(op: Any) -> None:
    """Say that an op has an effect: compilers neither drop, repeat nor merge it.

    2.13 calls the enumeration EffectType and keeps _EffectType, its name in 2.11. Read in 2.11 and 2.13.
    """
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    kinds: Any = getattr(effects, "EffectType", None) or effects._EffectType
    effects._register_effectful_op(op, kinds.ORDERED)


class _Saved(dict[str, Any]):
    """What a node of a graph says of itself; that it is saved for backward is not written over."""

    def __setitem__(self, name: str, value: Any) -> None:
        from torch.utils.checkpoint import CheckpointPolicy

        super().__setitem__(name, CheckpointPolicy.MUST_SAVE if name == "recompute" else value)


@contextmanager
def _recorded_nodes() -> Iterator[list[Any]]:
    """A list that has, after the context, the nodes that were recorded in the graph within it, the last first."""
    tracer = graph_tracer()
    nodes = () if tracer is None else tracer.graph.nodes
    before = len(nodes)
    found: list[Any] = []
    yield found
    found += islice(reversed(nodes), len(nodes) - before)


@contextmanager
def saved_for_backward() -> Iterator[None]:
    """What is recorded within is never computed again for backward: what that needs is saved.

    Also in a checkpointed block, which marks all nodes that it has recorded. Read in 2.11 to 2.13.
    """
    with _recorded_nodes() as nodes:
        yield
    for node in nodes:
        node.meta = _Saved(node.meta)
        node.meta["recompute"] = None


_mode = torch._C._get_dispatch_mode
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


def is_recorded() -> bool:
    """Whether AOTAutograd runs this, to make a graph of it or to learn what the graph will return. Read in 2.13.

    Dynamo, which traces moves of plain tensors, cannot be asked for a mode, and has none.
    """
    return not torch.compiler.is_dynamo_compiling() and _mode(_FUNCTIONAL) is not None


def compile_name() -> str:
    """The number that Dynamo has given to the graph that is being made: `0/1`; empty if it makes none. Read in 2.13."""
    found = torch._guards.CompileContext.current_compile_id()
    return "" if found is None else str(found)


def last_node(tracer: Any, op: Any) -> Any:
    """The last node of a graph that calls an op, also as an effect. Read in 2.13."""
    return next(node for node in reversed(tracer.graph.nodes) if op in (node.target, *node.args[:2]))


def set_arguments(node: Any, op: Any, arguments: tuple[Any, ...]) -> None:
    """Give other arguments to a node that calls an op, also as an effect: (token, op, arguments). Read in 2.13."""
    node.args = arguments if node.target is op else (*node.args[:2], *arguments)


def graph_node_of(tensor: torch.Tensor) -> Any:
    """The node of the graph that is being made whose value a tensor has now; None if there is none. Read in 2.13."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = _slot_of(tensor, graph_tracer())
    return None if slot is None else slot.proxy.node


def _slot_of(value: Any, tracer: Any) -> Any:
    """What a graph that is being made has for a tensor or a size; None if it knows of none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    return get_proxy_slot(value, tracer, None)


@contextmanager
def keep_collectives(namespace: str) -> Iterator[None]:
    """Ops of a namespace that are recorded within are kept as they are, which torch does for its own collectives.

    They are not computed again for backward, but in a checkpointed block, which marks its nodes later; what backward
    calls is not moved to forward; and no two of them are merged. Read in 2.13.
    """
    from torch._functorch.compile_utils import rand_ops
    from torch.utils.checkpoint import CheckpointPolicy

    with _recorded_nodes() as nodes:
        yield
    for node in nodes:
        if getattr(node.target, "namespace", None) == namespace:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if in_backward():
                node.meta["partitioner_tag"] = "must_be_in_backward"
            packet = node.target.overloadpacket
            if packet not in rand_ops:
                rand_ops.append(packet)


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh in the order of their coordinates, also while fake tensors are in use.

    The mesh makes the tensor that says so from another one when it is asked. Read in 2.13.
    """
    with untraced():
        return tuple(mesh.mesh.flatten().tolist())


def mesh_groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the process groups of a mesh, one for each mesh dim. Read in 2.11 to 2.13."""
    return tuple(str(group.group_name) for group in mesh.get_all_groups())


# FSDP2 and the state dicts of checkpoints know torch's own DTensor only, by `isinstance` in the modules below. There
# is no place where another class could be registered, so `_fsdp` and `_checkpoint` put other names into these modules:
# classes derived from torch's, and a class of which DTensors of both packages are instances. Read in 2.13; a
# version that makes the spec of a sharded parameter elsewhere stays as it is.


def when_fsdp_is_imported(call: Callable[[Any, Any, Any], object]) -> None:
    """Call a function with the modules of FSDP2 that make parameters, groups of them and collectives, once imported."""
    package = "torch.distributed.fsdp._fully_shard"

    def found() -> None:
        modules = [
            sys.modules.get(f"{package}.{name}") for name in ("_fsdp_param", "_fsdp_param_group", "_fsdp_collectives")
        ]
        if None not in modules and hasattr(modules[0].FSDPParam, "_init_sharding_spec"):  # type: ignore[union-attr]
            call(*modules)

    when_imported(package, found)


def when_state_dicts_are_imported(call: Callable[[Any], object]) -> None:
    """Call a function with the module that gathers and spreads state dicts, once it is imported."""
    name = "torch.distributed._state_dict_utils"
    when_imported(name, lambda: call(sys.modules[name]))


@cache
def either_dtensor(ours: type) -> Any:
    """A class of which torch's DTensors and those of a class of ours are instances; it makes torch's. Read in 2.13."""
    from torch.distributed.tensor import DTensor as theirs  # noqa: N813

    class Either(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, (theirs, ours))

    class DTensor(metaclass=Either):
        from_local = staticmethod(theirs.from_local)

    return DTensor


def torch_spec(mesh: DeviceMesh, placements: Sequence[Any], meta: tuple[Any, Any, Any]) -> Any:
    """The spec of a DTensor of torch, of a mesh, placements of torch, and shape, stride and dtype. Read in 2.13."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(*meta))


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh whose dims are those of several meshes of one root, in this order. Read in 2.13."""
    joined: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return joined


def torch_dtensor() -> Any:
    """The class DTensor of torch; imports it. Public."""
    from torch.distributed.tensor import DTensor

    return DTensor


def is_torch_dtensor(value: object) -> bool:
    """Whether a value is a DTensor of torch. It does not import the class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


# ---- activation checkpoints ------------------------------------------------------------------------------------------


def enclosing_checkpoints() -> list[tuple[Any, str]]:
    """The functions that compute again the activation checkpoints in which the caller runs, the innermost first.

    Each is (object, name of the attribute of the object that holds the function). No public function returns these
    objects: they are found in the frames that run now, and, for a checkpoint that hooks of a module have begun, behind
    the hooks of saved tensors. Read in 2.13.
    """
    found: list[tuple[Any, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            values = frame.f_locals
            if frame.f_code.co_name == "forward" and "run_function" in values:
                found.append((values["ctx"], "run_function"))
            elif frame.f_code.co_name == "checkpoint":
                generator = getattr(values.get("gen"), "gi_frame", None)
                if generator is not None and "new_frame" in generator.f_locals:
                    found.append((generator.f_locals["new_frame"], "recompute_fn"))
        frame = frame.f_back
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    cells = () if hooks is None else (getattr(hooks[0], "__closure__", None) or ())
    for cell in cells:
        holder = cell.cell_contents
        if isinstance(holder, checkpoint._CheckpointFrame) and not any(holder is one for one, _ in found):
            found.append((holder, "recompute_fn"))
    return found


def keep_as_recomputed(holder: Any, tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a checkpoint of `enclosing_checkpoints` that has recorded a tensor itself, while it computed again, have its
    values of that time, in memory that nobody writes into.
    """
    for saved in getattr(holder, "recomputed", {}).values():
        for handle, one in list(saved.items()):
            if one is tensor:
                saved[handle] = values
