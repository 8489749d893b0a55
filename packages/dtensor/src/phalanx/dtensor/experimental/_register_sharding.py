"""register_sharding: a sharding rule for an op of the user's own, or in the place of one that is there."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from phalanx.dtensor import _custom_handlers, _dispatch
from phalanx.dtensor._rules import registry
from phalanx.dtensor._rules.constraints import Even
from phalanx.dtensor._rules.engine import Strategy
from phalanx.dtensor._rules.parser import parse
from phalanx.dtensor._rules.registry import ArgMeta, Call, RuleSpec, SizedRule
from phalanx.dtensor._torch_compat import OpOverload
from phalanx.dtensor.placement_types import AnyPlacement, Placement, Replicate, Shard, as_placement, on_dim, split_dim

Op: TypeAlias = OpOverload
Shardings: TypeAlias = Sequence[tuple[Sequence[Placement | None], Sequence[Placement | None]]]
ShardingFunction: TypeAlias = Callable[..., Shardings | str]


def register_sharding(op: Op | list[Op], rule: str | None = None) -> Callable[[ShardingFunction], ShardingFunction]:
    """Say how an op may be sharded, as a text or with a function; it counts from the next call on. Not collective.

    As a text, in the notation of `phalanx.dtensor._rules.parser`::

        register_sharding(torch.ops.my.matmul.default, "m k, k n -> m n ; k:sum")

    The text holds for uneven and empty shards, too, and for meshes of several dims. Or with a function::

        @register_sharding(torch.ops.my.softmax.default)
        def shardings(x, dim):
            whole = ([Replicate()], [Replicate(), None])
            return [whole, *(([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != dim % x.ndim)]

    It gets the arguments of a call, tensors as objects with `shape`, `ndim` and `dtype`, and returns either a text, or
    pairs (placements of the outputs, placements of the arguments), each a way to shard one mesh dim; None stands for an
    argument that is not a tensor. Only pairs that split dims into equal parts are used, because nothing is known of the
    op on unequal parts; with whole tensors an op may always run.

    Args:
        op: An OpOverload, or several.
        rule: The text; without one a decorator is returned.

    Returns:
        A decorator; ignore it if a text was given.

    Raises:
        TypeError: `op` is not an OpOverload.
        RuleError: The text is malformed (the error gives the column), or it is not for this op. A ValueError, too.
        ValueError: This package has a handler of its own for the op (random, foreach); or, in a call, the result of the
            function does not fit the op.

    Source: torch.distributed.tensor.experimental.register_sharding; the text is this package's own.

    Example:
        >>> @torch.library.custom_op("example::triple", mutates_args=())
        ... def triple(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 3
        >>> fake = triple.register_fake(torch.empty_like)
        >>> register = register_sharding(torch.ops.example.triple.default, "... -> ...")
        >>> triple(distribute_tensor(torch.ones(4), mesh, [Shard(0)])).placements
        (Shard(dim=0),)
    """
    ops = list(op) if isinstance(op, (list, tuple)) else [op]
    for one in ops:
        if not isinstance(one, OpOverload):
            raise TypeError(
                f"register_sharding: op must be an OpOverload, not {type(one).__name__}: write "
                "torch.ops.library.name.default"
            )
        if _custom_handlers.find(one) is not None:
            raise ValueError(
                f"register_sharding: {one} has a handler of its own in this package, so it cannot have a rule"
            )

    if rule is not None:
        for one in ops:
            _check(one, rule)
        _put(ops, rule)

    def decorator(function: ShardingFunction) -> ShardingFunction:
        _put(ops, lambda call: _written(function, call))
        return function

    return decorator


def _put(ops: Sequence[Op], entry: Any) -> None:
    for one in ops:
        registry.replace(str(one), entry)
    _dispatch.forget_plans()


# ---- as a text -------------------------------------------------------------------------------------------------------


def _tensor_returns(op: Op) -> int | None:
    """How many tensors an op returns; None if it depends on the call."""
    types = [str(one.type) for one in op._schema.returns]
    return None if any(one.startswith("List") for one in types) else sum("Tensor" in one for one in types)


def _check(op: Op, text: str) -> None:
    """Whether a rule is one, and for this op."""
    rule = parse(text)
    count, arguments = _tensor_returns(op), op._schema.arguments
    if count is not None and count != len(rule.outputs):
        raise ValueError(
            f"register_sharding: the rule '{text}' has {len(rule.outputs)} tensors after '->', and {op} returns {count}"
        )
    kinds = [str(one.type) for one in arguments]
    least = sum(kind == "Tensor" for kind in kinds)
    has_list = any(kind.startswith("List[") and "Tensor" in kind for kind in kinds)
    most = None if has_list else sum("Tensor" in kind for kind in kinds)
    if len(rule.inputs) < least or (most is not None and len(rule.inputs) > most):
        raise ValueError(
            f"register_sharding: the rule '{text}' has {len(rule.inputs)} tensors before '->', and {op} takes "
            f"{least if most == least else f'{least} or more'}: {op._schema}"
        )
    clauses = [("size", index) for index, _ in rule.size_args] + [("count", index) for index, _ in rule.count_args]
    for word, number in clauses:
        if number >= len(arguments):
            raise ValueError(
                f"register_sharding: '{word} {number}' in the rule '{text}': {op} has arguments 0 to "
                f"{len(arguments) - 1}"
            )


# ---- with a function -------------------------------------------------------------------------------------------------


def _written(function: ShardingFunction, call: Call) -> RuleSpec:
    """The rule that a function of the user returns for a call."""
    positional, named = _as_called(call)
    found = function(*positional, **named)
    if isinstance(found, str):
        _check(call.op, found)
        return found
    sizes: dict[str, int] = {}
    strategies = [_strategy(call, index, one, sizes) for index, one in enumerate(found)]
    count = len(strategies[0].outputs) if strategies else _tensor_returns(call.op) or 1
    whole = Strategy((Replicate(),) * len(call.tensors), (Replicate(),) * count)
    if whole not in strategies:
        strategies.append(whole)
    text = f"{', '.join('*' * len(call.tensors))} -> {', '.join('*' * count)}"
    return SizedRule(text, sizes, tuple(strategies))


def _as_called(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as torch passes them on: defaults at the end are left out."""
    bound = list(zip(call.op._schema.arguments, call.args, strict=True))
    positional = [(one, value) for one, value in bound if not one.kwarg_only]
    while positional and _is_default(*positional[-1]):
        positional.pop()
    named = {one.name: value for one, value in bound if one.kwarg_only and not _is_default(one, value)}
    return [value for _, value in positional], named


def _is_default(argument: Any, value: Any) -> bool:
    default = argument.default_value
    return argument.has_default_value() and type(value) is type(default) and bool(value == default)


def _strategy(call: Call, index: int, given: Any, sizes: dict[str, int]) -> Strategy:
    """One pair of the list as a strategy."""
    where = f"register_sharding: entry {index} of the list for {call.op}"
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        raise ValueError(f"{where} must be a pair (placements of outputs, placements of arguments), not {given!r}")
    outputs, inputs = (list(one) for one in given)
    count = _tensor_returns(call.op)
    placed = [_placement(where, one) for one in outputs if one is not None]
    if not placed or (count is not None and len(placed) != count):
        raise ValueError(f"{where} has placements for {len(placed)} outputs, and the op returns {count} tensors")
    flat = [one for value in call.args for one in (value if isinstance(value, list) else [value])]
    wanted: list[AnyPlacement] = []
    for number, value in enumerate(flat):
        placement = inputs[number] if number < len(inputs) else None
        if isinstance(value, ArgMeta):
            if placement is None:
                raise ValueError(f"{where}: argument {number} is a tensor, and has no placement: write Replicate()")
            wanted.append(_on(where, number, _placement(where, placement), value))
        elif placement is not None:
            raise ValueError(f"{where}: argument {number} is not a tensor, and has {placement!r}: write None")
    if len(inputs) > len(flat):
        raise ValueError(f"{where} has placements for {len(inputs)} arguments, and the call has {len(flat)}")
    cut = tuple((at, one.dim) for at, one in enumerate(wanted) if isinstance(one, Shard))
    if not cut:
        return Strategy(tuple(wanted), tuple(placed))
    # A factor of its own: the parts of one entry are nothing to those of another.
    factor = f"entry{index}"
    sizes[factor] = call.tensors[cut[0][0]].shape[cut[0][1]]
    return Strategy(tuple(wanted), tuple(placed), factor, (Even(cut),))


def _placement(where: str, given: Any) -> AnyPlacement:
    if not isinstance(given, Placement):
        raise ValueError(f"{where} has {given!r}, which is not a placement: write Shard(dim), Replicate() or Partial()")
    placement = as_placement(given)
    if split_dim(placement) is not None and not isinstance(placement, Shard):
        raise ValueError(
            f"{where} has {placement!r}, which a rule cannot have: write Shard(dim), Replicate() or Partial()"
        )
    return placement


def _on(where: str, number: int, placement: AnyPlacement, tensor: ArgMeta) -> AnyPlacement:
    """The placement with a dim that the tensor has, counted from the front."""
    if not isinstance(placement, Shard):
        return placement
    if not -tensor.ndim <= placement.dim < tensor.ndim:
        raise ValueError(
            f"{where}: argument {number} has {tensor.ndim} dims, and {placement!r} splits a dim that it does not have"
        )
    return on_dim(placement, placement.dim % tensor.ndim)
