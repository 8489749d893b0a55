"""What connects hosts, in one process: addresses, frames, and what the other end is told."""

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch

from phalanx.collectives._hosts import bridge as bridges
from phalanx.collectives._hosts.address import own_address
from phalanx.collectives._hosts.bridge import Bridge
from phalanx.collectives._hosts.stream import OtherCall, Stream, Trade
from phalanx.core import MismatchError, PeerDeadError, WaitTimeoutError


class Server:
    """As a torch store, of which only the address is looked at."""

    def __init__(self, host):
        self.host = host


class Prefixed:
    def __init__(self, store):
        self.underlying_store = store


def test_the_address_is_that_of_the_interface_that_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0,lo")
    assert own_address(None) == "127.0.0.1"
    monkeypatch.setenv("PHALANX_SOCKET_IFNAME", "nonsense0")
    with pytest.raises(OSError, match=r"PHALANX_SOCKET_IFNAME is 'nonsense0', but there is no such interface.*lo"):
        own_address(None)


def test_else_it_is_that_on_the_way_to_the_server_of_the_store(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "PHALANX_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    ways = {"server": "10.1.2.3", "looped": "127.0.0.1", socket.gethostname(): "127.0.1.1", "192.0.2.1": "10.9.9.9"}
    monkeypatch.setattr("phalanx.collectives._hosts.address._on_the_way_to", lambda host: ways.get(host, ""))
    assert own_address(Prefixed(Prefixed(Server("server")))) == "10.1.2.3"
    assert own_address(Server("looped")) == "10.9.9.9"  # a loopback is of no use to other hosts
    del ways["192.0.2.1"]
    assert own_address(Server("looped")) == "127.0.0.1"  # unless there is nothing else
    assert own_address(object()) == "127.0.1.1"


def test_the_way_to_this_host_is_found_without_sending_anything():
    from phalanx.collectives._hosts.address import _on_the_way_to

    assert _on_the_way_to("127.0.0.1") == "127.0.0.1"
    assert _on_the_way_to("no.such.host.invalid") == ""


# ---- frames ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    yield pair
    for each in pair:
        each.close()


def view(tensor):
    return bridges._bytes_of(tensor)


def test_frames_may_come_in_pieces_and_several_at_once(ends):
    sender, receiver = Stream(ends[0], 1), Stream(ends[1], 0)
    data = [torch.arange(count, dtype=torch.int64) for count in (3, 0, 5000)]
    for number, each in enumerate(data):
        sender.post(Trade(f"call {number}", number), view(each))
    sender.send()
    bytes_sent = b""
    while len(bytes_sent) < 3 * 1024 + 8 * 5003:
        bytes_sent += ends[1].recv(1 << 20)
        sender.send()
    assert not sender.wants_out
    out = [torch.empty_like(each) for each in data]
    trades = [Trade(f"call {number}", number) for number in range(3)]
    for trade, each in zip(trades, out, strict=True):
        receiver.expect(trade, view(each))
    for begin in range(0, len(bytes_sent), 777):
        ends[0].send(bytes_sent[begin : begin + 777])
        receiver.receive()
    assert all(trade.is_done for trade in trades) and not receiver.wants_in
    assert all(torch.equal(a, b) for a, b in zip(data, out, strict=True))


@pytest.mark.parametrize(
    ("said", "number", "count", "told"),
    [("barrier #1", 1, 4, "barrier #1"), ("sum #1", 2, 4, "transfer 2"), ("sum #1", 1, 3, "with 3 bytes")],
)
def test_a_frame_of_another_call_is_told(ends, said, number, count, told):
    sender, receiver = Stream(ends[0], 1), Stream(ends[1], 0)
    sender.post(Trade(said, number), view(torch.zeros(count, dtype=torch.uint8)))
    sender.send()
    receiver.expect(Trade("sum #1", 1), view(torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(OtherCall, match=told):
        receiver.receive()


def test_bytes_that_are_no_frame_are_no_call_that_could_be_meant(ends):
    receiver = Stream(ends[1], 0)
    receiver.expect(Trade("sum #1", 1), view(torch.zeros(4, dtype=torch.uint8)))
    ends[0].send(os.urandom(1024))
    with pytest.raises(OtherCall):
        receiver.receive()


# ---- the bridge ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    """Both ends of a bridge."""
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    made = {0: {1: pair[0]}, 1: {0: pair[1]}}
    monkeypatch.setattr(bridges, "connect", lambda store, host, *_: made[host])
    both = [Bridge(None, host, [4, 6], timedelta(milliseconds=500), "g") for host in (0, 1)]
    yield both
    for each in both:
        each.close()
    assert all(each.fileno() == -1 for each in pair)


def begin(bridge, host, call="sum #1", number=1, count=1000):
    out, into = torch.full((count,), float(host)), torch.empty(count)
    return bridge.begin(call, number, {1 - host: out}, {1 - host: into}), into


def test_several_trades_may_be_under_way_and_end_in_any_order(two):
    begun = [[begin(bridge, host, number=number) for number in range(5)] for host, bridge in enumerate(two)]
    for host, bridge in enumerate(two):
        for trade, into in reversed(begun[host]):
            bridge.finish(trade)
            assert into.tolist() == [1.0 - host] * 1000


def test_more_than_the_kernel_holds_goes_both_ways_at_once(two):
    count = 4 << 20
    found = {}

    def run(host):
        trade, into = begin(two[host], host, count=count)
        two[host].finish(trade)
        found[host] = bool((into == 1.0 - host).all())

    threads = [threading.Thread(target=run, args=(host,)) for host in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {0: True, 1: True}


def test_a_rank_that_does_not_come_is_named(two):
    trade, _ = begin(two[0], 0)
    with pytest.raises(
        WaitTimeoutError,
        match=r"timed out after 500 ms \(the timeout of the group\): rank 4 still waits for rank\(s\) 6",
    ) as caught:
        two[0].finish(trade)
    assert (caught.value.rank, caught.value.peer, caught.value.operation) == (4, 6, "sum #1")
    two[0].give_up(caught.value)
    two[0].close()
    with pytest.raises(WaitTimeoutError, match=r"rank 4 on another host gave up: sum #1 .* waits for rank\(s\) 6"):
        two[1].finish(begin(two[1], 1)[0])
    with pytest.raises(PeerDeadError, match="were closed"):
        begin(two[0], 0, number=2)


def test_different_calls_are_told_on_both_sides(two):
    begun = [begin(two[0], 0)[0], begin(two[1], 1, "product #1")[0]]
    for host in (0, 1):
        with pytest.raises(MismatchError) as caught:
            two[host].finish(begun[host])
        assert "called sum #1" in str(caught.value) and "called product #1" in str(caught.value)


def test_who_gives_up_is_quoted_even_when_it_is_gone_by_then(two):
    two[1].give_up(WaitTimeoutError("rank 7 did not come"))
    two[1].close()
    with pytest.raises(WaitTimeoutError, match="rank 6 on another host gave up: rank 7 did not come"):
        two[0].finish(begin(two[0], 0)[0])


def test_what_was_said_is_also_read_by_one_that_only_sends(two):
    two[1].give_up(PeerDeadError("rank 7 died"))
    two[1].close()
    with pytest.raises(PeerDeadError, match="gave up: rank 7 died"):
        two[0].finish(two[0].begin("send #1", 1, {1: torch.zeros(8 << 20)}, {}))


def test_a_connection_that_ends_is_told_at_once(two):
    trade, _ = begin(two[0], 0)
    two[1].close()
    with pytest.raises(PeerDeadError, match="the connection to rank 6 on another host has ended"):
        two[0].finish(trade)


def test_a_close_from_another_thread_ends_a_wait(two, monkeypatch):
    monkeypatch.setattr(two[0], "_timeout", timedelta(seconds=60))
    trade, _ = begin(two[0], 0)
    closer = threading.Timer(0.2, two[0].close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(PeerDeadError, match="were closed"):
        two[0].finish(trade)
    assert time.monotonic() - began < 30
    closer.join()
