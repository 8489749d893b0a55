"""Tensors with the conjugate or the negative bit, of every call that writes an argument."""

import functools

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import join, run_groups
from phalanx.collectives import _library
from ranks import run_ranks


def negative(value):
    made = torch.tensor([value * 1j] * 3).conj().imag  # -value
    assert made.is_neg()
    return made


def conjugate(value):
    made = torch.tensor([value * (1 + 2j)] * 3).conj()
    assert made.is_conj()
    return made


def each_kind(rank, size):
    for make in (negative, conjugate):
        yield functools.partial(make, rank + 1.0), [(make(r + 1.0) + 0).tolist() for r in range(size)]


def total(parts):
    return [sum(column) for column in zip(*parts, strict=True)]


def functional(rank, size):
    join(rank, size, backend="gloo")
    group = dist.group.WORLD
    name = group.group_name
    for make, parts in each_kind(rank, size):
        assert pc.all_reduce(make(), "sum", group).tolist() == total(parts)
        x = make()
        pc.all_reduce_(x, "sum", group)
        assert x.tolist() == total(parts)
        x = make()
        pc.broadcast_(x, 1, group)
        assert x.tolist() == parts[1]
        xs = [make(), make().resolve_conj().resolve_neg()]
        torch.ops.phalanx.all_reduce_coalesced_(xs, "sum", name)
        assert [torch.ops.phalanx.wait_tensor(each).tolist() for each in xs] == [total(parts)] * 2
        out = like_with_bit(make(), size)
        torch.ops.phalanx.all_gather_into_tensor_out(make(), size, name, out=out)
        assert torch.ops.phalanx.wait_tensor(out).tolist() == [value for part in parts for value in part]


def like_with_bit(tensor, size):
    """A tensor for the gathered ones of all ranks, with the same bit."""
    empty = torch.zeros(size * tensor.numel(), dtype=torch.complex64).conj()
    return empty.imag if tensor.is_neg() else empty


def reductions(make, parts, rank, size):
    x = make()
    dist.all_reduce(x)
    assert x.tolist() == total(parts)
    x = make()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == total(parts)
    x = make()
    dist.reduce(x, 0)
    assert x.tolist() == (total(parts) if rank == 0 else parts[rank])
    x = make()
    dist.reduce_scatter(x, [make() for _ in range(size)])
    assert x.tolist() == total(parts)
    xs = [make(), make()]
    with dist._coalescing_manager():
        for each in xs:
            dist.all_reduce(each)
    assert [each.tolist() for each in xs] == [total(parts)] * 2


def backend(rank, size):
    join(rank, size)
    for make, parts in each_kind(rank, size):
        if make.func is conjugate:  # torch refuses it
            with pytest.raises(RuntimeError, match="conjugate"):
                dist.all_reduce(make())
            continue
        reductions(make, parts, rank, size)
        x = make()
        dist.broadcast(x, 1)
        assert x.tolist() == parts[1]
        outs = [make() for _ in range(size)]
        dist.all_gather(outs, make())
        assert [each.tolist() for each in outs] == parts
        outs = [make() for _ in range(size)] if rank == 0 else None
        dist.gather(make(), outs, 0)
        assert rank or [each.tolist() for each in outs] == parts
        x = make()
        dist.scatter(x, [make() for _ in range(size)] if rank == 1 else None, 1)
        assert x.tolist() == parts[1]
        outs = [make() for _ in range(size)]
        dist.all_to_all(outs, [make() for _ in range(size)])
        assert [each.tolist() for each in outs] == parts
        if rank == 0:
            dist.send(make(), 1)
        else:
            x = make()
            dist.recv(x, 0)
            assert x.tolist() == parts[0]
    dist.destroy_process_group()


def test_functional_collectives_write_tensors_with_bits():
    run_ranks(functional, 2)


def test_the_backend_writes_tensors_with_bits():
    run_groups(backend, 2)


def test_every_op_that_writes_and_returns_nothing_has_the_rule():
    _library.loaded()
    for namespace in ("phalanx", "phalanx_ordered"):
        for name in dir(getattr(torch.ops, namespace)):
            packet = getattr(getattr(torch.ops, namespace), name)
            if not isinstance(packet, torch._ops.OpOverloadPacket):
                continue
            schema = packet.default._schema
            writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
            if not writes or schema.returns:
                continue
            for key in ("Conjugate", "Negative"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key), (namespace, name)
