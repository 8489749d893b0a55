"""Programs that talk to the server of a TCP store without the token, or with it and wrongly, while ranks use it."""

import contextlib
import hmac
import os
import resource
import select
import socket
import struct
from pathlib import Path

import pytest

from liar import WAIT_SECONDS, raised, world_of
from phalanx.core import FileStore, TCPStore
from ranks import run_ranks, scratch
from tcp_wire import GET, GREETING, MAGIC, MAX_VALUE, SET, TOKEN, VERDICT, WAIT, proof, request

STRANGER = 2


class Client:
    """A connection to the server that says what it is told to."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def read(self, size):
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while len(data) < size and (more := self.socket.recv(size - len(data))):
                data += more
        return data

    def prove(self, token=TOKEN):
        greeting = self.read(GREETING)
        nonce = os.urandom(32)
        self.socket.sendall(nonce + proof(b"client", token, greeting, nonce))
        verdict = self.read(VERDICT)
        return verdict[:1] == b"\1" and hmac.compare_digest(verdict[1:], proof(b"server", token, greeting, nonce))

    def hung_up(self):
        """Whether the server closes, whatever it says before."""
        while self.read(65536):
            pass
        return True


def serve(rank, world_size, attack, args, files):
    """Ranks 0 and 1 meet in a store that rank 0 serves, and go on meeting while rank 2 attacks. Returns what it saw."""
    note = FileStore(scratch() / "note")
    if rank == STRANGER:
        port = int(note.get("port", WAIT_SECONDS * 1000))
        note.wait(["used"], WAIT_SECONDS * 1000)
        result = attack(port, *args)
        note.set("attacked", b"")
        return result
    if rank == 0:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        store = TCPStore.serve(token=TOKEN)
        store.set("secret", "kept")
        note.set("port", str(store.port))
    else:
        store = TCPStore.connect("127.0.0.1", int(note.get("port", WAIT_SECONDS * 1000)), token=TOKEN)
    world = world_of(rank, 2, store=store)
    world.create_group("before", [0, 1]).barrier()
    note.set("used", b"")
    note.get("attacked", WAIT_SECONDS * 1000)
    kept = store.get("secret", 1000)
    world.create_group("after", [0, 1]).barrier()
    world.finalize()
    return kept


def attack(what, *args, files=0):
    first, second, result = run_ranks(serve, 3, what, args, files)
    assert first == second == b"kept"
    return result


# ---- without the token


def prove_with(port, tokens):
    verdicts = []
    for token in tokens:
        with Client(port) as client:
            verdicts.append((client.prove(token), client.hung_up()))
    return verdicts


def test_a_wrong_token_is_refused():
    tokens = [b"another token", b"", TOKEN + b"\0", TOKEN[:-1], b"x" * 100_000]
    assert attack(prove_with, tokens) == [(False, True)] * len(tokens)


def connect_with(port, token):
    return raised(lambda: TCPStore.connect("127.0.0.1", port, token=token))


def test_a_client_with_a_wrong_token_is_told_so():
    error, _, text = attack(connect_with, b"another token")
    assert error == "AccessDeniedError"
    assert "the server refused this token" in text


def skip_the_proof(port):
    with Client(port) as client:
        client.socket.sendall(request(GET, b"secret") * 10)
        answer = client.read(GREETING + VERDICT + 100)
        return b"kept" in answer, client.hung_up()


def test_a_request_without_a_proof_is_not_answered():
    assert attack(skip_the_proof) == (False, True)


def replay(port):
    """The proof of a right client, recorded and sent again."""
    with Client(port) as client:
        greeting = client.read(GREETING)
        answer = os.urandom(32)
        answer += proof(b"client", TOKEN, greeting, answer)
        client.socket.sendall(answer)
        assert client.read(VERDICT)[:1] == b"\1"
    with Client(port) as thief:
        other = thief.read(GREETING)
        assert other[:8] == greeting[:8] == MAGIC
        assert other[8:40] != greeting[8:40], "the server's nonce is not fresh"
        thief.socket.sendall(answer)
        return thief.read(VERDICT)[:1] == b"\1", thief.hung_up()


def test_a_proof_that_was_recorded_is_worth_nothing():
    assert attack(replay) == (False, True)


def reflect(port):
    """The stranger has one server prove to another: it passes on the server's own proof, and the greeting itself."""
    with Client(port) as client:
        greeting = client.read(GREETING)
        nonce = os.urandom(32)
        client.socket.sendall(nonce + proof(b"server", TOKEN, greeting, nonce))
        refused = client.read(VERDICT)[:1] == b"\0"
    with Client(port) as client:
        client.socket.sendall(client.read(GREETING)[8:])
        return refused, client.read(VERDICT)[:1] == b"\0"


def test_the_proof_of_a_server_does_not_pass_for_that_of_a_client():
    assert attack(reflect) == (True, True)


# ---- with the token, and wrongly


IMPOSSIBLE = {
    "a frame of 4 GiB": struct.pack("<I", (1 << 32) - 1) + b"x",
    "a frame that is just too long": struct.pack("<I", 13 + 1024 + MAX_VALUE + 1) + b"x",
    "an empty frame": struct.pack("<I", 0),
    "a key of 4 GiB": struct.pack("<IBqI", 13, GET, 0, (1 << 32) - 1),
    "a key beyond its frame": struct.pack("<IBqI", 14, GET, 0, 1025) + b"x",
    "a key that is too long": request(GET, b"k" * 1025),
    "a value that is too long": request(SET, b"key", 0, b"v" * (MAX_VALUE + 1)),
    "a negative timeout": request(GET, b"secret", -1),
    "a zero byte": request(GET, b"sec\0ret"),
    "an unknown operation": request(99, b"secret"),
}


def say_what_cannot_be(port):
    ends = {}
    for kind, data in IMPOSSIBLE.items():
        with Client(port) as client:
            assert client.prove()
            client.socket.sendall(data)
            ends[kind] = client.read(1)  # an answer, or the end
    return ends


def test_what_cannot_be_ends_the_connection_without_an_answer():
    assert attack(say_what_cannot_be) == dict.fromkeys(IMPOSSIBLE, b"")


def announce(port):
    """Fifty clients that announce the longest request and send a byte of it: what the server's process grows by."""
    pid = server_of(port)
    clients = [Client(port) for _ in range(50)]
    before = resident_bytes(pid)
    for client in clients:
        assert client.prove()
        client.socket.sendall(struct.pack("<I", 13 + 1024 + MAX_VALUE) + b"\1")
    with Client(port) as other:  # served after those above
        assert other.prove()
    grown = resident_bytes(pid) - before
    for client in clients:
        client.socket.close()
    return grown


def server_of(port):
    wanted = {line.split()[9] for line in listeners() if int(line.split()[1].rpartition(":")[2], 16) == port}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if any(link == f"socket:[{inode}]" for link in links for inode in wanted):
            return int(pid)
    raise AssertionError(f"nobody listens on port {port}")


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_is_taken_for_what_came_and_not_for_what_was_announced():
    assert attack(announce) < 50 * MAX_VALUE // 10


def half_open(port):
    """Clients that end their side at every point of the conversation."""
    for data in (b"", b"\0" * 63):
        with Client(port) as client:
            client.socket.sendall(data)
            client.socket.shutdown(socket.SHUT_WR)
            assert client.hung_up()
    for data in (b"", b"\1", request(GET, b"secret")[:-1], request(WAIT, b"never", 1 << 40)):
        with Client(port) as client:
            assert client.prove()
            client.socket.sendall(data)
            client.socket.shutdown(socket.SHUT_WR)
            assert client.hung_up()
    return True


def test_half_open_connections_are_closed():
    assert attack(half_open) is True


def trickle(port):
    """A request byte by byte, from many at once, which all are answered in the end."""
    clients = [Client(port) for _ in range(20)]
    for client in clients:
        assert client.prove()
    for byte in request(GET, b"secret"):
        for client in clients:
            client.socket.sendall(bytes([byte]))
    answers = {client.read(4 + 12 + 4)[16:] for client in clients}
    for client in clients:
        client.socket.close()
    return answers


def test_slow_writers_hold_up_nobody():
    assert attack(trickle) == {b"kept"}


# ---- too many


def crowd(port, count):
    """Connections that say nothing. True when one with the token gets its turn all the same."""
    guests = [Client(port) for _ in range(count)]
    with Client(port) as client:
        proved = client.prove()
    for guest in guests:
        guest.socket.close()
    return proved


def test_a_crowd_without_the_token_does_not_keep_out_who_has_it():
    assert attack(crowd, 500) is True


def use_up_descriptors(port):
    """More clients than the server's process may have descriptors: some are not served, and the others are."""
    clients = {client.socket: client for client in [Client(port) for _ in range(200)]}
    waiting, served = set(clients), []
    while greeted := select.select(waiting, [], [], 0.5)[0]:
        served += [clients[each].prove() for each in greeted]
        waiting.difference_update(greeted)
    for each in clients:
        each.close()
    return len(served), all(served)


def test_more_clients_than_descriptors_are_not_served_and_disturb_nobody():
    served, right = attack(use_up_descriptors, files=100)
    assert right
    assert 10 < served < 100


# ---- where it listens


def listeners():
    lines = []
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        if path.exists():
            lines += [line for line in path.read_text().splitlines()[1:] if line.split()[3] == "0A"]
    return lines


def serve_at(rank, world_size, address):
    store = TCPStore.serve(address, token=TOKEN)
    own = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd") if is_socket(fd)}
    return store.port, [line.split()[1] for line in listeners() if line.split()[9] in own]


def is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:[")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("address", "form"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F")])
def test_a_server_listens_on_the_address_that_was_asked_for_and_no_other(address, form):
    [(port, places)] = run_ranks(serve_at, 1, address)
    assert places == [f"{form}:{port:04X}"]


def world_without_sockets(rank, world_size):
    before = listeners()
    world = world_of(rank, world_size)
    world.create_group("g", range(world_size)).barrier()
    own = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd") if is_socket(fd)}
    found = [line for line in listeners() if line not in before and line.split()[9] in own]
    world.finalize()
    return found


def test_ranks_themselves_listen_on_no_network():
    assert run_ranks(world_without_sockets, 2) == [[], []]
