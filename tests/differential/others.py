"""Cases without tensors of a layout: objects, barriers, and calls with arguments that are wrong on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[dist.ProcessGroup, int, int], Any]


@dataclass(frozen=True)
class Other:
    """A call by its name.

    Attributes:
        kind: "objects", "barriers" or "refusals".
        entry: Its name.
    """

    kind: str
    entry: str
    layout: str = ""
    dtype: str = ""
    op: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.entry}"


def _object(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "x" * (10 * rank + 1), "tensor": [float(rank)] * rank, "none": None}


def _all_gather_object(group: Any, rank: int, size: int) -> Any:
    made = [None] * size
    dist.all_gather_object(made, _object(rank), group)
    return made


def _gather_object(group: Any, rank: int, size: int) -> Any:
    made = [None] * size if rank == size - 1 else None
    dist.gather_object(_object(rank), made, size - 1, group)
    return made


def _broadcast_object_list(group: Any, rank: int, size: int) -> Any:
    made = [_object(rank), rank, "text", None]
    dist.broadcast_object_list(made, size - 1, group)
    return made


def _scatter_object_list(group: Any, rank: int, size: int) -> Any:
    made = [None]
    dist.scatter_object_list(made, [_object(each) for each in range(size)] if rank == 1 else None, 1, group)
    return made


def _send_object_list(group: Any, rank: int, size: int) -> Any:
    made: list[Any] = [None, None]
    if rank == 0:
        for other in range(1, size):
            dist.send_object_list([_object(other), other], other, group)
        return None
    dist.recv_object_list(made, 0, group)
    return made


def _unpicklable(group: Any, rank: int, size: int) -> Any:
    return dist.all_gather_object([None] * size, lambda: rank, group)


OBJECTS: dict[str, tuple[Call, Callable[[int, int], Any]]] = {
    "all_gather_object": (_all_gather_object, lambda rank, size: [_object(each) for each in range(size)]),
    "gather_object": (
        _gather_object,
        lambda rank, size: [_object(each) for each in range(size)] if rank == size - 1 else None,
    ),
    "broadcast_object_list": (
        _broadcast_object_list,
        lambda rank, size: [_object(size - 1), size - 1, "text", None],
    ),
    "scatter_object_list": (_scatter_object_list, lambda rank, size: [_object(rank)]),
    "send_object_list, recv_object_list": (
        _send_object_list,
        lambda rank, size: [_object(rank), rank] if rank else None,
    ),
    "all_gather_object of what cannot be pickled": (_unpicklable, lambda rank, size: "an error"),
}


def _sparse(group: Any, rank: int, size: int) -> Any:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, size]]), torch.tensor([1.0, 2.0]), (size + 1,))
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense().tolist()


def _managed(group: Any, rank: int, size: int) -> Any:
    tensors = [torch.full((3,), rank + 1.0), torch.full((2,), rank + 2.0)]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return [tensor.tolist() for tensor in tensors]


BARRIERS: dict[str, tuple[Call, Callable[[int, int], Any]]] = {
    "dist.barrier": (lambda group, rank, size: dist.barrier(group), lambda rank, size: None),
    "dist.barrier async": (
        lambda group, rank, size: dist.barrier(group, async_op=True).wait() and None,
        lambda rank, size: None,
    ),
    "dist.barrier, device_ids": (
        lambda group, rank, size: dist.barrier(group, device_ids=[0]),
        lambda rank, size: None,
    ),
    "pg.barrier(opts)": (lambda group, rank, size: group.barrier(_opts("Barrier")).wait() and None, lambda *_: None),
    "pg.barrier(timeout)": (
        lambda group, rank, size: group.barrier(timeout=timedelta(seconds=5)).wait() and None,
        lambda *_: None,
    ),
    "pg.monitored_barrier": (
        lambda group, rank, size: group.monitored_barrier(timedelta(seconds=5), False),
        lambda *_: None,
    ),
    "dist.monitored_barrier": (
        lambda group, rank, size: dist.monitored_barrier(group, timedelta(seconds=5)),
        lambda *_: None,
    ),
    "dist.all_reduce of a sparse tensor": (
        _sparse,
        lambda rank, size: [1.0] * size + [2.0 * size],
    ),
    "dist._coalescing_manager": (
        _managed,
        lambda rank, size: [[size * (size + 1) / 2] * 3, [size * (size + 3) / 2] * 2],
    ),
}


def _opts(name: str) -> Any:
    return getattr(torch._C._distributed_c10d, f"{name}Options")()


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


_I = torch.int64

# Each is wrong on all ranks alike, so that no rank waits for another.
REFUSALS: dict[str, Call] = {
    "all_reduce: no tensor": lambda g, r, n: dist.all_reduce(3, group=g),
    "all_reduce: a list": lambda g, r, n: dist.all_reduce([_x(2)], group=g),
    "all_reduce_coalesced: no tensors": lambda g, r, n: dist.all_reduce_coalesced([], group=g),
    "all_reduce_coalesced: two dtypes": lambda g, r, n: dist.all_reduce_coalesced([_x(2), _x(2, dtype=_I)], group=g),
    "pg.allreduce: no tensors": lambda g, r, n: g.allreduce([], _opts("Allreduce")),
    "pg.allreduce: two tensors": lambda g, r, n: g.allreduce([_x(2), _x(2)], _opts("Allreduce")).wait(),
    "pg.broadcast: no tensors": lambda g, r, n: g.broadcast([], _opts("Broadcast")),
    "pg.broadcast: root beyond": lambda g, r, n: g.broadcast(_x(2), n),
    "pg.reduce: root beyond": lambda g, r, n: g.reduce(_x(2), n),
    "pg.reduce: negative root": lambda g, r, n: g.reduce(_x(2), -1),
    "broadcast: root beyond": lambda g, r, n: dist.broadcast(_x(2), n, group=g),
    "reduce: root beyond": lambda g, r, n: dist.reduce(_x(2), n, group=g),
    "all_gather: short list": lambda g, r, n: dist.all_gather([_x(2)] * (n - 1), _x(2), group=g),
    "all_gather: long list": lambda g, r, n: dist.all_gather([_x(2) for _ in range(n + 1)], _x(2), group=g),
    "all_gather: another dtype": lambda g, r, n: dist.all_gather([_x(2, dtype=_I) for _ in range(n)], _x(2), group=g),
    "all_gather: another size": lambda g, r, n: dist.all_gather([_x(3) for _ in range(n)], _x(2), group=g),
    "all_gather_into_tensor: another size": lambda g, r, n: dist.all_gather_into_tensor(_x(2 * n + 1), _x(2), group=g),
    "all_gather_into_tensor: another dtype": lambda g, r, n: dist.all_gather_into_tensor(
        _x(2 * n, dtype=_I), _x(2), group=g
    ),
    "all_gather_coalesced: lists by tensor": lambda g, r, n: dist.all_gather_coalesced(
        [[_x(2) for _ in range(n)] for _ in range(n + 1)], [_x(2)] * (n + 1), group=g
    ),
    "all_gather_coalesced: short list": lambda g, r, n: dist.all_gather_coalesced(
        [[_x(2)] for _ in range(n)], [_x(2), _x(3)], group=g
    ),
    "all_gather_coalesced: another size": lambda g, r, n: dist.all_gather_coalesced(
        [[_x(3)] for _ in range(n)], [_x(2)], group=g
    ),
    "all_gather_coalesced: no tensors": lambda g, r, n: dist.all_gather_coalesced([[] for _ in range(n)], [], group=g),
    "gather: short list": lambda g, r, n: g.gather([[_x(2)] * (n - 1)], [_x(2)], _opts("Gather")),
    "gather: outputs on all ranks": lambda g, r, n: dist.gather(_x(2), [_x(2) for _ in range(n)], n, group=g),
    "scatter: root beyond": lambda g, r, n: dist.scatter(_x(2), None, n, group=g),
    "reduce_scatter: short list": lambda g, r, n: dist.reduce_scatter(_x(2), [_x(2)] * (n - 1), group=g),
    "reduce_scatter: another dtype": lambda g, r, n: dist.reduce_scatter(
        _x(2), [_x(2, dtype=_I) for _ in range(n)], group=g
    ),
    "reduce_scatter_tensor: another size": lambda g, r, n: dist.reduce_scatter_tensor(_x(2), _x(2 * n + 1), group=g),
    "all_to_all: short lists": lambda g, r, n: dist.all_to_all([_x(2)] * (n - 1), [_x(2)] * (n - 1), group=g),
    "all_to_all_single: no multiple": lambda g, r, n: dist.all_to_all_single(_x(n + 1), _x(n + 1), group=g),
    "all_to_all_single: wrong sum": lambda g, r, n: dist.all_to_all_single(_x(n), _x(n), [2] * n, [2] * n, group=g),
    "all_to_all_single: negative split": lambda g, r, n: dist.all_to_all_single(
        _x(n), _x(n), [-1, n + 1, *[0] * (n - 2)], [-1, n + 1, *[0] * (n - 2)], group=g
    ),
    "all_to_all_single: short splits": lambda g, r, n: dist.all_to_all_single(_x(n), _x(n), [n], [n], group=g),
    "all_to_all_single: another dtype": lambda g, r, n: dist.all_to_all_single(_x(n), _x(n, dtype=_I), group=g),
    "send: to itself": lambda g, r, n: dist.send(_x(2), r, g),
    "send: beyond": lambda g, r, n: dist.send(_x(2), n, g),
    "recv: beyond": lambda g, r, n: dist.recv(_x(2), n, g),
    "send: negative tag": lambda g, r, n: dist.send(_x(2), (r + 1) % n, g, -1),
    "pg.send: negative rank": lambda g, r, n: g.send([_x(2)], -1, 0),
    "pg.send: two tensors": lambda g, r, n: g.send([_x(2), _x(2)], (r + 1) % n, 0),
    "batch_isend_irecv: nothing": lambda g, r, n: dist.batch_isend_irecv([]),
    "pg.allreduce: no reduction": lambda g, r, n: g.allreduce([_x(2)], dist.ReduceOp.UNUSED),
}


def other_cases() -> list[Other]:
    made = [Other("objects", name) for name in OBJECTS]
    made += [Other("barriers", name) for name in BARRIERS]
    return made + [Other("refusals", name) for name in REFUSALS]


def call(case: Other, group: dist.ProcessGroup, rank: int, size: int) -> Any:
    """Make the call."""
    if case.kind == "refusals":
        return REFUSALS[case.entry](group, rank, size)
    return {**OBJECTS, **BARRIERS}[case.entry][0](group, rank, size)


def wanted(case: Other, rank: int, size: int) -> Any:
    """What it returns; "an error" where it cannot."""
    if case.kind == "refusals":
        return "an error"
    return {**OBJECTS, **BARRIERS}[case.entry][1](rank, size)
