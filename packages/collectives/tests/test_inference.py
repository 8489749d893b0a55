"""What inference engines ask: results joined along any dim, dicts of tensors, and all of it in groups of groups."""

import enum
import signal
import time

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import has_compiler, join, native_folder, run_groups
from phalanx.collectives import inference
from phalanx.core import PeerDeadError
from ranks import run_ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 64), (3, 40), (7, 4096), (130, 1000))


def given(rank, shape, dtype):
    """Small integers: sums of a few ranks are the same in every dtype and order."""
    return (torch.arange(shape[0] * shape[1]).reshape(shape) % 5 + rank).to(dtype)


def as_gloo(rank, size, ours):
    """Each call of an engine on groups of tensor parallelism, compared with gloo's."""
    if ours:
        join(rank, size)
    pairs = [dist.new_group([first, first + 1], backend="gloo") for first in range(0, size, 2)]
    peers = pairs[rank // 2]
    tps = [dist.new_group([first, first + 1], backend="phalanx" if ours else "gloo") for first in range(0, size, 2)]
    tp = tps[rank // 2]
    for dtype in DTYPES:
        for shape in SHAPES:
            x = given(rank, shape, dtype)
            wanted = x.clone()
            dist.all_reduce(wanted, group=peers)
            got = x.clone()
            assert pc.all_reduce_(got, "sum", tp) is got and torch.equal(got, wanted)
            lists = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(lists, x, group=peers)
            for dim in (0, 1, -1, -2):
                for tensor in (x, x.t().contiguous().t()):
                    wanted = torch.cat(lists, dim)
                    joined = inference.all_gather(tensor, tp, dim)
                    assert type(joined) is torch.Tensor and joined.is_contiguous() and torch.equal(joined, wanted)
                    for place in range(2):
                        joined = inference.gather(tensor, dim=dim, group=tp, group_dst=place)
                        assert (joined is not None) is (place == dist.get_rank(tp))
                        assert joined is None or (joined.is_contiguous() and torch.equal(joined, wanted))
    x = torch.full((2, 3), float(rank))
    first = rank // 2 * 2  # as a global rank
    got = inference.gather(x, first, tp)
    assert (got is None) is (rank != first) and (got is None or got[0].tolist() == [first] * 3 + [first + 1] * 3)
    assert (inference.gather(x, group=tp) is None) is (rank != first)


@pytest.mark.parametrize("size", [2, 4])
def test_every_call_gives_what_gloo_gives(size):  # P41
    run_groups(as_gloo, size, True, timeout=120)


def test_groups_of_gloo_have_the_same_calls():  # P41
    run_ranks(as_gloo, 2, False, start_torch=True, env={"PHALANX_NATIVE": native_folder()} if has_compiler() else None)


def compiled(rank, size):
    join(rank, size)
    group = dist.group.WORLD

    def layer(x):
        y = pc.all_reduce_(x * 2, "sum", group)
        return inference.all_gather(y, group, -1)

    x = given(rank, (3, 8), torch.bfloat16)
    wanted = layer(x.clone())
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x.clone()), wanted)


def test_they_compile_into_one_graph():  # P41
    run_groups(compiled, 2, timeout=120)


SENT = {
    "hidden": torch.arange(12.0).view(3, 4).bfloat16(),
    "residual": torch.arange(200_000, dtype=torch.int32).view(2, -1).t(),
    "empty": torch.empty(0, 5, dtype=torch.float16),
    "scalar": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]).conj(),
    "eighth": torch.ones(3).to(torch.float8_e4m3fn),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "nested": {"a": [torch.ones(1), None, (1, 2.5, "x", True)], "": {}, "inf": float("inf"), "size": torch.Size([2])},
    "many": {f"layer {i} \u00e9": torch.full((i,), i) for i in range(60)},  # its description is longer than a message
    "large": 2**70,
}


def same(got, wanted):
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.detach()
        assert type(got) is torch.Tensor and got.is_contiguous() and not got.requires_grad
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert torch.equal(*(each.resolve_conj().contiguous().view(-1).view(torch.uint8) for each in (got, wanted)))
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key, value in wanted.items():
            same(got[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert type(got) is (list if isinstance(wanted, list) else tuple) and len(got) == len(wanted)
        for mine, other in zip(got, wanted, strict=True):
            same(mine, other)
    else:
        assert type(got) is type(wanted) and got == wanted


def dicts(rank, size, ours):
    if ours:
        join(rank, size)
    group = dist.new_group([1, 0] if size == 2 else [2, 0], backend="phalanx" if ours else "gloo")
    if rank not in (0, size - 1):
        return
    pc.enable_group(group)
    for _ in range(2):
        if rank == 0:
            assert inference.send_tensor_dict(SENT, size - 1, group) == []
            inference.send_tensor_dict({}, size - 1, group, tag=3)
        else:
            same(inference.recv_tensor_dict(0, group), SENT)
            assert inference.recv_tensor_dict(0, group, tag=3) == {}
    here = dist.get_rank(group)
    works = inference.send_tensor_dict({"x": torch.ones(300_000)}, group=group, group_dst=1 - here, async_op=True)
    got = inference.recv_tensor_dict(group=group, group_src=1 - here)  # both send, and both receive
    assert len(works) == 2 and got["x"].sum().item() == 300_000
    for work in works:
        work.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_a_dict_arrives_as_it_was_sent(size):  # P42
    run_groups(dicts, size, True)


def test_groups_of_gloo_send_dicts():  # P42
    run_ranks(dicts, 2, False, start_torch=True, env={"PHALANX_NATIVE": native_folder()} if has_compiler() else None)


class Color(enum.IntEnum):
    RED = 1


def refusals(rank, size):
    join(rank, size)
    group, x = dist.group.WORLD, torch.ones(2)
    pc.enable_group(group)
    for wrong, words in (
        ({"a": {"b": [x, object()]}}, r"\['a'\]\['b'\]\[1\] is a object"),
        ({"a": Color.RED}, r"\['a'\] is a Color"),
        ({"a": {3: x}}, r"the key 3; keys must be strings"),
        ({"a": x.to_sparse()}, r"\['a'\] is a Tensor of layout torch.sparse_coo"),
        ({"a": x.to("meta")}, r"\['a'\] is a Tensor of layout torch.strided on meta"),
        ([x], "expected a dict, not list"),
    ):
        with pytest.raises(TypeError, match=words):
            inference.send_tensor_dict(wrong, 1 - rank)
    with pytest.raises(ValueError, match="dst is 7, which is not in the group"):
        inference.send_tensor_dict({"a": x}, 7)
    with pytest.raises(ValueError, match="dst is missing"):
        inference.send_tensor_dict({"a": x})
    for wrong in ({"dst": 2}, {"group_dst": 2}, {"group_dst": -1}, {"dst": True + 5}):
        with pytest.raises(ValueError, match=r"there is no rank -?\d in the group; it must be one of \[0, 1\]"):
            inference.gather(x, **wrong)
    with pytest.raises(ValueError, match="both given"):
        inference.gather(x, 0, group_dst=0)
    for call in (inference.gather, inference.all_gather):
        with pytest.raises(IndexError, match="dim is 1, and the tensor has 1 dims"):
            call(x, dim=1)
        with pytest.raises(ValueError, match="no dims"):
            call(torch.tensor(1.0))
    with pc.coalescing_manager(group):
        for call in (lambda: inference.send_tensor_dict({}, 0), lambda: inference.recv_tensor_dict(0)):
            with pytest.raises(ValueError, match="outside of the manager"):
                call()
    # Nothing was sent: what comes next is the first message.
    if rank == 0:
        inference.send_tensor_dict({"a": x}, 1)
        pc.send(torch.zeros(1024, dtype=torch.uint8), 1)
    else:
        same(inference.recv_tensor_dict(0), {"a": x})
        with pytest.raises(RuntimeError, match="what rank 0 sent with tag 0 is not the beginning of a dict"):
            inference.recv_tensor_dict(0)


def test_wrong_arguments_are_refused_before_anything_is_sent():  # P42
    run_groups(refusals, 2)


def dying(rank, size):
    join(rank, size)
    group = dist.group.WORLD
    pc.enable_group(group)
    if rank == 1:
        signal.raise_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerDeadError, match="rank 1"):
        inference.recv_tensor_dict(1)
    with pytest.raises(Exception, match="rank 1"):
        inference.gather(torch.ones(2))
    assert time.monotonic() - began < 30  # and not at the timeout


def test_a_rank_that_died_is_named():  # P42
    run_groups(dying, 2, expect_exit={1: -9})
