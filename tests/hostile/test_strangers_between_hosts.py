"""Programs that connect to ranks which wait for ranks on other hosts, or pose as one of those."""

import contextlib
import json
import os
import socket
import struct
import threading
from datetime import timedelta

import pytest

from dict_store import DictStore

pytest.importorskip("torch")

from phalanx.collectives._hosts import connect as between
from phalanx.collectives._hosts.connect import connect
from phalanx.core import PeerDeadError, WaitTimeoutError

LIMIT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def on_the_loopback(monkeypatch):
    monkeypatch.setenv("PHALANX_SOCKET_IFNAME", "lo")


def listen(store, hosts=2, timeout=LIMIT):
    """Host 0 waits for the others. Returns a function that gives what came of it, and where it listens."""
    found = []

    def run():
        try:
            found.append(connect(store, 0, [10 + host for host in range(hosts)], timeout, "g"))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    store.wait(["0"], LIMIT)

    def result():
        thread.join()
        return found[0]

    address, port, _ = json.loads(store.get("0"))
    return result, (address, port)


def meet(store, result, host=1):
    """The right rank comes: the two are connected with each other, and with nobody else."""
    mine = connect(store, host, [10, 11, 12][: host + 1], LIMIT, "g")
    theirs = result()
    assert not isinstance(theirs, Exception), theirs
    theirs[host].sendall(b"hello")
    mine[0].settimeout(10)
    assert mine[0].recv(100) == b"hello"
    for connection in (*mine.values(), *theirs.values()):
        connection.close()


def hello(host=1, magic=between._MAGIC, version=between._VERSION):
    return between._HELLO.pack(magic, version, host, os.urandom(16))


def is_hung_up(connection):
    connection.settimeout(10)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_strangers_who_say_nothing_or_nonsense_hold_up_nobody():
    before = len(os.listdir("/proc/self/fd"))
    store = DictStore()
    result, where = listen(store)
    silent = [socket.create_connection(where) for _ in range(5)]
    silent[0].sendall(hello()[:7])
    for nonsense in (
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        os.urandom(500),
        hello(magic=b"PHXHOSTZ"),
        hello(version=2),
        hello(7),
    ):
        with socket.create_connection(where) as stranger:
            stranger.sendall(nonsense)
            assert is_hung_up(stranger)
    meet(store, result)
    for each in silent:
        assert is_hung_up(each)
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_whoever_has_not_read_the_store_is_nobody_even_with_a_proof_that_was_seen_before():
    store = DictStore()
    result, where = listen(store)
    with socket.create_connection(where) as stranger:
        stranger.sendall(hello())
        answer = stranger.recv(48, socket.MSG_WAITALL)
        stranger.sendall(answer[16:])  # the listener's own
        assert is_hung_up(stranger)
    with socket.create_connection(where) as stranger:
        said = hello()
        stranger.sendall(said)
        nonce = stranger.recv(48, socket.MSG_WAITALL)[:16]
        stranger.sendall(between._proof(b"\0" * 32, b"dials", said, nonce))
        assert is_hung_up(stranger)
    secret = bytes.fromhex(json.loads(store.get("0"))[2])
    with socket.create_connection(where) as stranger:  # one that was recorded, for another nonce
        said = hello()
        stranger.sendall(said)
        stranger.recv(48, socket.MSG_WAITALL)
        stranger.sendall(between._proof(secret, b"dials", said, b"\0" * 16))
        assert is_hung_up(stranger)
    meet(store, result)


def test_a_crowd_of_strangers_does_not_keep_a_rank_out():
    store = DictStore()
    result, where = listen(store)
    crowd = [socket.create_connection(where) for _ in range(3 * between._NEWCOMERS)]
    meet(store, result)
    for each in crowd:
        each.close()


def test_a_rank_that_was_there_cannot_be_replaced():
    store = DictStore()
    result, where = listen(store, hosts=3)
    first = between._Meeting(store, 1, [10, 11, 12], LIMIT, "g")
    kept = first._dial(0, first._read(0))
    with socket.create_connection(where) as second:
        second.sendall(hello(1))
        while second.recv(48) and not is_hung_up(second):  # hung up on at once, or after the first was admitted
            pass
    second_host = between._Meeting(store, 2, [10, 11, 12], LIMIT, "g")
    other = second_host._dial(0, second_host._read(0))
    made = result()
    made[1].sendall(b"x")
    kept.settimeout(10)
    assert kept.recv(1) == b"x"
    for each in (kept, other, *made.values()):
        each.close()


def impostor(answer):
    """Listens where a rank is said to listen."""
    server = socket.create_server(("127.0.0.1", 0))

    def run():
        with server, server.accept()[0] as connection:
            answer(connection)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, server.getsockname()


def test_whoever_listens_in_place_of_a_rank_is_told_from_it():
    store = DictStore()
    thread, (address, port) = impostor(lambda connection: connection.sendall(os.urandom(48)))
    store.set("0", json.dumps([address, port, "00" * 32]))
    with pytest.raises(PeerDeadError, match=rf"rank 10, at {address}, port {port}: .*not read the store"):
        connect(store, 1, [10, 11], LIMIT, "g")
    thread.join()


def test_nobody_waits_longer_than_the_timeout():
    store, short = DictStore(), timedelta(milliseconds=300)
    with pytest.raises(
        WaitTimeoutError,
        match=r"timed out after 300 ms \(.* group\): rank 11 still waits for a connection with rank\(s\) 10",
    ):
        connect(store, 1, [10, 11], short, "g")
    result, _ = listen(DictStore(), hosts=3, timeout=short)
    error = result()
    assert isinstance(error, WaitTimeoutError) and "rank(s) 11, 12. Are" in str(error)
    assert (error.rank, error.peer, error.group) == (10, 11, "g")
    quiet = threading.Event()
    thread, (address, port) = impostor(lambda _: quiet.wait(20))
    store.set("0", json.dumps([address, port, "00" * 32]))
    with pytest.raises(WaitTimeoutError, match=rf"rank\(s\) 10 \(at {address}, port {port}\)"):
        connect(store, 1, [10, 11], short, "g")
    quiet.set()
    thread.join()


def test_strangers_who_keep_coming_or_hang_up_again_and_again_do_not_make_a_wait_longer():
    short, over = timedelta(milliseconds=300), threading.Event()
    result, where = listen(DictStore(), timeout=short)

    def come_again():
        with contextlib.suppress(OSError):
            while not over.is_set():
                socket.create_connection(where).close()

    def hang_up(server):
        with server, contextlib.suppress(TimeoutError):
            server.settimeout(2)
            while not over.is_set():
                server.accept()[0].close()

    server = socket.create_server(("127.0.0.1", 0))
    threads = [threading.Thread(target=come_again), threading.Thread(target=hang_up, args=(server,))]
    for each in threads:
        each.start()
    store = DictStore()
    store.set("0", json.dumps([*server.getsockname(), "00" * 32]))
    with pytest.raises(WaitTimeoutError, match=r"rank 11 still waits for a connection with rank\(s\) 10"):
        connect(store, 1, [10, 11], short, "g")
    assert isinstance(result(), WaitTimeoutError)
    over.set()
    for each in threads:
        each.join()


def test_an_address_at_which_nobody_listens_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
    store = DictStore()
    store.set("0", json.dumps([address, port, "00" * 32]))
    with pytest.raises(PeerDeadError, match="Connection refused.*PHALANX_SOCKET_IFNAME"):
        connect(store, 1, [10, 11], LIMIT, "g")


def test_it_listens_on_one_interface_only():
    store = DictStore()
    result, (address, port) = listen(store)
    assert address == "127.0.0.1"
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert [each.split(":")[0] for each in listening if each.endswith(f":{port:04X}")] == [f"{number:08X}"]
    meet(store, result)
