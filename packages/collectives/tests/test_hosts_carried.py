"""Groups that span hosts where a backend of torch carries the data: NCCL for GPUs, gloo here, for tensors of the CPU.
Processes that are told to be on different hosts, and what one process can show."""

import os
import signal
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.collectives import _registry, _torch_compat
from phalanx.collectives._hosts import bridge as bridges
from phalanx.collectives._hosts import span_on_gpus
from phalanx.collectives._hosts.bridge import Bridge
from phalanx.collectives._hosts.carrier import Carrier
from phalanx.core import MismatchError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError
from ranks import run_ranks, scratch

ALL = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.uint8)


def on(*hosts):
    return [{"PHALANX_HOST_ID": str(7 + host)} for host in hosts]


def carried(group, timeout_ms=60_000):
    """The collectives of a group on several hosts over gloo, and those over our own connections."""
    assert pc.enable_group(group) is True
    entry = _registry.entry_of(group)
    own = _torch_compat.PrefixStore("carried", _torch_compat.default_store())
    places, inside = entry.hosts.places, entry.hosts.inside
    made = span_on_gpus(entry.name, entry.ranks, places, inside, "gloo", own, timeout_ms)
    return made, entry.hosts


def part(rank, shape, dtype):
    drawn = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=drawn) * 10.0 ** (rank - 1)).to(dtype)
    return torch.randint(0, 5, shape, generator=drawn).to(dtype)


def computes(rank, size):
    group = dist.group.WORLD
    spanning, over_tcp = carried(group)
    for dtype in ALL:
        for reduction in ("sum", "avg", "product", "min", "max"):
            for shape in ((), (301,), (0, 4)) if dtype != torch.float32 else ((), (7, 3), (1000,), (200_003,)):
                parts = [part(each, shape, dtype) for each in range(size)]
                got = spanning.run("all_reduce", parts[rank], reduction)
                assert got.dtype == dtype and torch.equal(got, over_tcp.run("all_reduce", parts[rank], reduction))
                if reduction in ("min", "max"):
                    wide = torch.stack([each.double() for each in parts])
                    assert torch.equal(got.double(), wide.amin(0) if reduction == "min" else wide.amax(0))
        parts = [part(each, (size * 3, 5), dtype) for each in range(size)]
        got = spanning.run("reduce_scatter_tensor", parts[rank], "sum", size)
        assert torch.equal(got, over_tcp.run("reduce_scatter_tensor", parts[rank], "sum", size))
        for shape in ((), (5, 3), (2001,), (0, 3)):
            parts = [part(each, shape, dtype) for each in range(size)]
            rows = [each.reshape(1) if each.dim() == 0 else each for each in parts]
            assert torch.equal(spanning.run("all_gather_into_tensor", parts[rank], size), torch.cat(rows))
            for source in range(size):
                assert torch.equal(spanning.run("broadcast", parts[rank], source), parts[source])
    out = torch.empty(2 * size)
    assert spanning.run("all_gather_into_tensor_out", torch.full((2,), float(rank)), size, out=out) is None
    assert out.tolist() == [float(each) for each in range(size) for _ in range(2)]
    dist.barrier()
    spanning.close()


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (0, 0, 1), (0, 1, 2, 3, 3)])
def test_what_a_backend_carries_has_the_bits_of_what_crosses_over_tcp(hosts):
    run_ranks(computes, len(hosts), start_torch=True, env=on(*hosts), timeout=120)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def call_for_ever(spanning, x, gathered):
    while True:
        if gathered:
            spanning.run("all_gather_into_tensor", x, gathered)
        else:
            spanning.run("all_reduce", x, "sum")


def fails(rank, size, what):
    address, limit = f"file://{scratch()}/c10d", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=limit)
    spanning, _ = carried(dist.group.WORLD, timeout_ms=3000)
    x = torch.ones(5000)
    assert spanning.run("all_reduce", x, "sum").tolist() == [float(size)] * 5000
    if what == "dies" and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PhalanxError) as caught:
        call_for_ever(spanning, x, size if what == "differs" and rank >= 2 else 0)
    with pytest.raises(RevokedError, match="revoked by an earlier failure"):
        spanning.run("all_reduce", x, "sum")
    spanning.close()
    return type(caught.value).__name__, str(caught.value)


def test_different_calls_on_different_hosts_are_both_named():
    found = run_ranks(fails, 4, "differs", env=on(0, 0, 1, 1))
    assert any(kind == MismatchError.__name__ for kind, _ in found), found
    for _, text in found:
        assert "all_reduce(float32, 5000, sum) #2" in text and "all_gather_into_tensor(float32, 5000) #2" in text, found


def test_the_death_of_a_rank_ends_the_collective_on_all_hosts():
    found = run_ranks(fails, 4, "dies", env=on(0, 0, 1, 1), expect_exit={3: -signal.SIGKILL})
    assert "rank 3" in found[2][1] and "died" in found[2][1], found
    for _, text in found[:2]:
        assert "rank 2" in text or "rank 3" in text, found


# ---- one process: what a stream has still to do ----------------------------------------------------------------------


class Work:
    def wait(self, timeout=None):
        assert timeout is None  # the host waits for nothing


class Backend:
    """Of a GPU: its calls return at once."""

    supports_coalescing = True

    def __init__(self):
        self.calls, self.aborted, self.batches = [], threading.Event(), 0

    def name(self):
        return "a backend"

    def _start_coalescing(self):
        self.batches += 1

    def _end_coalescing(self):
        return Work()

    def send(self, tensors, host, tag):
        self.calls.append(("send", host, tag, tensors[0].dtype, tensors[0].numel()))

    def recv(self, tensors, host, tag):
        self.calls.append(("recv", host, tag, tensors[0].dtype, tensors[0].numel()))

    def abort(self):
        self.aborted.set()

    def shutdown(self):
        self.calls.append("shutdown")


class Event:
    def __init__(self):
        self.reached = False

    def query(self):
        return self.reached


class OfGpu(torch.Tensor):
    """Of the CPU, but says that it is of a GPU."""

    device = torch.device("cuda", 0)


@pytest.fixture
def two(monkeypatch):
    """Both ends of a lane, and the events that were recorded on their streams."""
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    made = {0: {1: pair[0]}, 1: {0: pair[1]}}
    monkeypatch.setattr(bridges, "connect", lambda store, host, *_: made[host])
    events = []

    def record(device):
        assert device == torch.device("cuda", 0)
        events.append(Event())
        return events[-1]

    monkeypatch.setattr("phalanx.collectives._hosts.carrier.Mark", record)
    limit = timedelta(milliseconds=300)
    both = [Carrier(Backend(), Bridge(None, host, [4, 6], limit, "g"), [4, 6], "g", limit) for host in (0, 1)]
    for each in both:
        each.errors, each.has_failed = [], threading.Event()
        each.failed = lambda error, each=each: (each.errors.append(error), each.has_failed.set())
    yield both, events
    for each in both:
        each.close()
        assert each._thread is None or not each._thread.is_alive()
    assert all(each.fileno() == -1 for each in pair)


def trade(carrier, host, call="sum(4) #1", number=1):
    mine, theirs = (torch.zeros(4).as_subclass(OfGpu) for _ in range(2))
    load = carrier.begin(call, number, {1 - host: mine}, {1 - host: theirs})
    carrier.finish(load)
    return load


def test_a_trade_on_a_stream_is_begun_as_one_and_waited_for_by_the_stream_alone(two):
    (a, b), events = two
    load = trade(a, 0)
    assert not load.word.is_done and len(events) == 1  # the other host has not come, and nobody waited for it
    trade(b, 1)
    sent = a._backend.calls
    assert sent == [("recv", 1, 1, torch.uint8, 16), ("send", 1, 1, torch.uint8, 16)] and a._backend.batches == 1
    for event in events:
        event.reached = True
    looks, looked_twice = [], threading.Event()
    a.check = lambda: (looks.append(0), len(looks) == 2 and looked_twice.set())
    trade(a, 0, "sum(4) #2", 2)
    assert looked_twice.wait(10)
    assert load.word.is_done and not load.kept
    assert not a.errors and not b.errors


def test_another_call_of_another_host_is_told_to_both_though_nobody_waits(two):
    (a, b), _ = two
    trade(a, 0)
    with pytest.raises(
        MismatchError, match=r"rank 4 on another host called sum\(4\) #1 while rank 6 called max\(4\) #1"
    ):
        trade(b, 1, "max(4) #1")
    assert not b._backend.calls  # nothing was sent that the other one would wait for
    assert a.has_failed.wait(10)
    assert isinstance(a.errors[0], MismatchError) and "rank 6 on another host called max(4) #1" in str(a.errors[0])


def test_a_host_that_ends_while_a_stream_waits_for_it_is_named(two):
    (a, b), _ = two
    trade(a, 0)
    b.close()
    assert a.has_failed.wait(10)
    assert isinstance(a.errors[0], PeerDeadError) and "rank 6 on another host has ended" in str(a.errors[0])
    assert b._backend.name() == "a backend that was closed"


def test_a_host_that_gives_up_ends_what_a_stream_waits_for(two):
    (a, b), _ = two
    trade(a, 0)
    b.give_up(PeerDeadError("rank 7 died"))
    assert b._backend.aborted.is_set()
    assert a.has_failed.wait(10)
    assert isinstance(a.errors[0], PeerDeadError) and "gave up: rank 7 died" in str(a.errors[0])


def test_a_host_that_does_not_come_is_named_after_the_timeout(two):
    (a, _), events = two
    trade(a, 0)
    events[0].reached = True
    assert a.has_failed.wait(10)
    assert isinstance(a.errors[0], WaitTimeoutError) and "waits for rank(s) 6 on another host" in str(a.errors[0])


def test_a_stream_that_does_not_end_it_is_an_error_though_all_have_come(two):
    (a, b), _ = two
    trade(a, 0)
    trade(b, 1)
    assert a.has_failed.wait(10)
    assert isinstance(a.errors[0], WaitTimeoutError) and "all hosts called it" in str(a.errors[0])


def test_what_goes_wrong_within_a_host_ends_what_crosses(two):
    (a, _), _ = two

    def dead():
        raise PeerDeadError("rank 5 died")

    a.check = dead
    trade(a, 0)
    assert a.has_failed.wait(10)
    assert str(a.errors[0]) == "rank 5 died"
