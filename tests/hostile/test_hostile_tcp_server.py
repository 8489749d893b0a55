"""What listens where ranks expect their TCP store is no store, or one that knows the token and answers as it likes."""

import contextlib
import json
import os
import random
import socket
import struct
import threading

import pytest

from liar import WAIT_SECONDS, raised, world_of
from phalanx.core import FileStore, TCPStore, ffi, lib
from ranks import run_ranks, scratch
from tcp_wire import MAGIC, MAX_VALUE, TOKEN, proof
from wire import PeerRecord

SERVER = 1
ANSWER = 64


class Server:
    """Accepts connections, and lets `talk(connection)` do the rest with each until the victim has said what it saw."""

    def __init__(self, talk):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._accept, args=(talk,))]
        self.threads[0].start()

    def _accept(self, talk):
        with contextlib.suppress(OSError):  # the end: the listener was shut down
            while True:
                connection, _ = self.listener.accept()
                connection.settimeout(WAIT_SECONDS)
                self.threads.append(threading.Thread(target=self._talk, args=(talk, connection)))
                self.threads[-1].start()

    def _talk(self, talk, connection):
        with connection, contextlib.suppress(ConnectionError):
            talk(connection, self.over)

    def close(self):
        self.over.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


def read(connection, size):
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def greet(connection, server_id=bytes(32)):
    greeting = MAGIC + os.urandom(32) + server_id
    connection.sendall(greeting)
    return greeting, read(connection, ANSWER)


def shake_hands(connection, server_id=bytes(32)):
    """As a right server that has the token."""
    greeting, answer = greet(connection, server_id)
    if answer[32:] == proof(b"client", TOKEN, greeting, answer[:32]):
        connection.sendall(b"\1" + proof(b"server", TOKEN, greeting, answer[:32]))


def hostile_server(rank, world_size, talk, use, args):
    note = FileStore(scratch() / "note")
    if rank == SERVER:
        server = Server(globals()[talk](*args))
        note.set("port", str(server.listener.getsockname()[1]))
        note.get("said", WAIT_SECONDS * 1000)
        server.close()
        return None
    port = int(note.get("port", WAIT_SECONDS * 1000))
    result = use(port)
    note.set("said", b"")
    return result


def connect(port, timeout_ms=5000):
    return TCPStore.connect("127.0.0.1", port, token=TOKEN, timeout_ms=timeout_ms)


def connect_soon(port):
    return raised(lambda: connect(port, 500))


def connect_at_leisure(port):
    return raised(lambda: connect(port))


def get_soon(port):
    store = connect(port)
    return raised(lambda: store.get("key", 300))


def get_at_leisure(port):
    store = connect(port)
    return raised(lambda: store.get("key", 5000))


def attack(talk, *args, use=get_at_leisure):
    return run_ranks(hostile_server, 2, talk, use, args)[0]


# ---- one that does not know the token


def say_before(data):
    """Sends that, whatever it is told, and stays."""

    def talk(connection, over):
        connection.sendall(data)
        over.wait()

    return talk


@pytest.mark.parametrize("data", [b"", MAGIC, MAGIC + bytes(63)], ids=["nothing", "a magic number", "half a greeting"])
def test_a_server_that_does_not_finish_its_greeting_ends_a_connect_with_a_timeout(data):
    error, _, text = attack("say_before", data, use=connect_soon)
    assert error == "WaitTimeoutError"
    assert "could not reach a store at 127.0.0.1:" in text and "timed out after 500 ms" in text


NOISE = random.Random(0).randbytes(1 << 20)


@pytest.mark.parametrize("data", [bytes(72), b"HTTP/1.1 200 OK\r\n" * 1000, NOISE], ids=["zeros", "web", "noise"])
def test_what_is_no_store_is_reported_as_such(data):
    error, _, text = attack("say_before", data, use=connect_at_leisure)
    assert error == "InvalidArgumentError"
    assert "not a store of this version" in text


def pose(verdict):
    """Greets properly, and then claims to know the token."""

    def talk(connection, over):
        greeting, answer = greet(connection)
        replies = {
            "zeros": b"\1" + bytes(32),
            "the client's own proof": b"\1" + answer[32:],
            "another token": b"\1" + proof(b"server", b"another token", greeting, answer[:32]),
            "refusal": b"\0" + bytes(32),
        }
        connection.sendall(replies[verdict])
        over.wait()

    return talk


@pytest.mark.parametrize("verdict", ["zeros", "the client's own proof", "another token"])
def test_a_server_that_poses_is_not_trusted(verdict):
    error, _, text = attack("pose", verdict, use=connect_at_leisure)
    assert error == "AccessDeniedError"
    assert "the server does not know this token" in text


def test_a_server_that_refuses_everybody_is_named():
    error, _, text = attack("pose", "refusal", use=connect_at_leisure)
    assert error == "AccessDeniedError"
    assert "the server refused this token" in text


# ---- one that knows it


def answer_with(data, drip):
    """Reads a request, and answers it with these bytes: at once, or one after another for ever."""

    def talk(connection, over):
        shake_hands(connection)
        while request := read(connection, 4):
            read(connection, struct.unpack("<I", request)[0])
            if not drip:
                connection.sendall(data)
                continue
            while not over.wait(0.01):
                connection.sendall(data)

    return talk


def test_a_server_that_never_answers_ends_a_call_with_a_timeout():
    error, _, text = attack("answer_with", b"", False, use=get_soon)
    assert error == "WaitTimeoutError"
    assert "timed out after" in text and "did not answer" in text


def test_an_answer_that_comes_too_slowly_ends_a_call_with_a_timeout():
    error, _, text = attack("answer_with", struct.pack("<I", 1 << 16), True, use=get_soon)
    assert error == "WaitTimeoutError"
    assert "timed out after" in text and "did not answer" in text


OK = struct.pack("<iq", 0, 0)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<I", (1 << 32) - 1) + OK, "a reply of impossible size"),
        (struct.pack("<I", 12 + MAX_VALUE + 1) + OK, "a reply of impossible size"),
        (struct.pack("<I", 0), "a reply without a whole header"),
        (struct.pack("<I", 11) + OK[:11], "a reply without a whole header"),
        (struct.pack("<Iiq", 12, 1, 0), "an unknown status"),
        (struct.pack("<Iiq", 12, -16, 0), "an unknown status"),
        (struct.pack("<Iiq", 12, -(1 << 31), 0), "an unknown status"),
    ],
    ids=["4 GiB", "just too long", "empty", "too short", "status 1", "status -16", "the least status"],
)
def test_an_answer_that_cannot_be_is_an_error(data, text):
    error, _, told = attack("answer_with", data, False)
    assert error == "InternalError"
    assert "the store at 127.0.0.1:" in told and text in told


def test_an_error_text_that_is_no_text_can_be_read():
    data = struct.pack("<Iiq", 12 + 3000, -9, 0) + b"\xff%s%n\0" * 500
    error, _, told = attack("answer_with", data, False)
    assert error == "NotFoundError"
    assert "%s%n" in told


def hang_up(data):
    def talk(connection, over):
        shake_hands(connection)
        read(connection, 8)
        connection.sendall(data)

    return talk


@pytest.mark.parametrize("data", [b"", struct.pack("<I", 100), struct.pack("<I", 100) + OK], ids=len)
def test_a_server_that_ends_inside_an_answer_has_gone_away(data):
    error, _, text = attack("hang_up", data)
    assert error == "PeerDeadError"
    assert "went away" in text


def be_replaced():
    """Another server each time."""

    def talk(connection, over):
        shake_hands(connection, os.urandom(32))
        read(connection, 8)

    return talk


def get_twice(port):
    store = connect(port)
    return [raised(lambda: store.get("key", 5000)) for _ in range(2)]


def test_a_server_that_took_the_place_of_another_is_not_taken_for_it():
    first, second = attack("be_replaced", use=get_twice)
    assert first[0] == second[0] == "PeerDeadError"
    assert "another one is served at its address" in second[2]


# ---- what ranks make of it


def make_group(port):
    world = world_of(0, 2, store=connect(port))
    told = raised(lambda: world.create_group("g", [0, 1], timeout_ms=5000))
    world.finalize()
    return told


@pytest.mark.parametrize(
    "value",
    [b"", b"PHXPEER3", b"PHXPEER3" + bytes(63), bytes(72), NOISE],
    ids=["nothing", "a magic number", "most of one", "zeros", "noise"],
)
def test_a_record_that_is_none_is_refused(value):
    data = struct.pack("<I", 12 + len(value)) + OK + value
    error, _, text = attack("answer_with", data, False, use=make_group)
    assert error == "InvalidArgumentError"
    assert "is not a record of a rank" in text


def test_a_record_that_leads_nowhere_is_refused():
    about = json.loads(ffi.string(lib.phx_build_info()))
    build = struct.pack("16s16s", about["version"].encode(), about["build"].encode())
    nobody = bytes(16)
    value = PeerRecord(rank=1, pid=-5, uid=0, host_id=1, uuid=nobody, token=nobody, build=build).pack()
    data = struct.pack("<I", 12 + len(value)) + OK + value
    error, _, text = attack("answer_with", data, False, use=make_group)
    # It does not say on which host it is, so it counts as another one, and how it is reached there is asked for next.
    assert error == "InvalidArgumentError" and "is not its address" in text
