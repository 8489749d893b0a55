#!/usr/bin/env python3
"""Writes the corpora from which the fuzz targets start: core/fuzz/seeds.py. What they mean, the targets say."""

import random
import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SET, GET, WAIT, ADD, REMOVE = range(1, 6)


def piece(data: bytes) -> bytes:
    return struct.pack("<H", len(data)) + data


def request(op: int, key: bytes, number: int = 0, value: bytes = b"") -> bytes:
    body = struct.pack("<BqI", op, number, len(key)) + key + value
    return struct.pack("<I", len(body)) + body


def reply(status: int, number: int = 0, payload: bytes = b"") -> bytes:
    body = struct.pack("<iq", status, number) + payload
    return struct.pack("<I", len(body)) + body


REQUESTS = {
    "set": request(SET, b"key", value=b"new"),
    "get": request(GET, b"key"),
    "wait": request(WAIT, b"late", 1 << 62),
    "add": request(ADD, b"counter", -(1 << 63)),
    "remove": request(REMOVE, b"key"),
    "endless": struct.pack("<I", 0xFFFFFFFF) + b"key",
}


def store_connection() -> dict[str, bytes]:
    knows, send, outside = b"\1", b"\0", b"\7\1"
    seeds = {name: knows + send + piece(data) for name, data in REQUESTS.items()}
    seeds["pipelined"] = knows + send + piece(b"".join(REQUESTS[name] for name in ("set", "add", "remove", "get")))
    seeds["in_pieces"] = knows + b"".join(send + piece(bytes([byte])) for byte in REQUESTS["get"])
    seeds["parked"] = knows + send + piece(REQUESTS["wait"] + REQUESTS["get"]) + outside
    seeds["refused"] = b"\0" + piece(b"x" * 64)
    return seeds


def store_server() -> dict[str, bytes]:
    receive, reset, leave, outside, stranger, member = 0, 4, 8, 12, 16, 144  # each plus the number of a client
    seeds = {name: bytes([member]) + piece(data) + bytes([receive]) for name, data in REQUESTS.items()}
    seeds["strangers"] = b"".join(bytes([stranger + i]) + piece(b"x" * 16 * i) for i in range(4))
    seeds["parked_and_gone"] = bytes([member]) + piece(REQUESTS["wait"]) + bytes([leave, outside])
    seeds["two"] = b"".join(bytes([member + i]) + piece(REQUESTS["add"]) for i in range(2)) + bytes([reset])
    return seeds


def store_client() -> dict[str, bytes]:
    good = reply(0, 7, b"value")
    stranger, member = 0x20, 0x51  # answers of a connection in the upper half, whether it knows the token below
    seeds = {f"calls_{first}": bytes([first, member]) + b"".join(piece(good) for _ in range(5)) for first in range(5)}
    seeds["errors"] = bytes([0, member]) + b"".join(piece(reply(-status, 0, b"why")) for status in range(1, 6))
    seeds["in_pieces"] = bytes([0, 0xF1]) + b"".join(piece(good[i : i + 3]) for i in range(0, len(good), 3))
    seeds["endless"] = bytes([1, member]) + piece(struct.pack("<I", 0xFFFFFFFF)) + piece(b"x")
    seeds["greeting"] = bytes([0, stranger]) + piece(b"PHXTCPS1" + bytes(64)) + piece(b"\1" + bytes(32))
    return seeds


def store_file() -> dict[str, bytes]:
    def record(kind: int, key: bytes, value: bytes) -> bytes:  # its checksums are put right by the target
        return struct.pack("<IIIII", kind, len(key) - 1, len(value), 0, 0) + key + value

    log = bytes(16) + record(0, b"key", b"value") + record(0, b"counter", b"41") + record(1, b"key", b"")
    seeds = {"log": b"\1" + piece(log), "empty": b"\0" + piece(b""), "broken": b"\0" + piece(b"PHXFILE1" + bytes(40))}
    seeds["appended"] = seeds["log"] + b"\2\5hello\2" + b"\1\3abc\0\x20\0"
    return seeds


def tuning() -> dict[str, bytes]:
    row = b"host=H ranks=2 cores=2 one_shot_bytes=512 chunk_bytes=131072 streaming_bytes=4194304 push_bytes=16384\n"
    return {
        "row": row,
        "others": row.replace(b"ranks=2", b"ranks=3") + row.replace(b"host=H", b"host=0") + b"# a remark",
        "signs": b"host=H ranks=2 one_shot_bytes=-1 chunk_bytes=+4096 push_bytes=18446744073709551616",
        "gpus": b"gpu=G ranks=2 shared=0 line_bytes=1024 two_shot_bytes=65536 copy_bytes=4096 thread_bytes=64\n"
        b"gpu=G ranks=2 shared=1 line_bytes=-1 thread_bytes=17\n" + row,
        "zeros": b"host=H ranks=2 one_shot_bytes=0 chunk_bytes=000 push_bytes= streaming_bytes",
    }


def programs(name: str, count: int, size: int) -> dict[str, bytes]:
    """For targets that make a program of whatever bytes there are."""
    draw = random.Random(name)
    return {f"program_{i}": draw.randbytes(size) for i in range(count)}


def windows() -> dict[str, bytes]:
    """Programs of fuzz_c_api.cpp that make a window of a block of 200 bytes and call each of its functions."""
    create, put, get, wait, signals, flush, release = 0, 3, 5, 6, 7, 8, 9
    allocate = bytes([0, 3, 0, 0, 0, 1, 200, 0, 0, 0, 0, 0])
    calls = {create: bytes([0, 0, 0, 2, 0, 0, 0]), put: b"\1", signals: b"\0"}

    def call(function: int) -> bytes:  # of rank 0, 16 bytes at offset 0
        return bytes([0, 4, 0, 0, 0, 1, 0, 0, 0, 13, 0, 2, 0, 16, 1, 0, function]) + calls.get(function, b"")

    body = b"".join(map(call, (create, put, get, signals, wait, flush, wait, release, get)))
    return {f"windows_{ranks}": bytes([ranks % 2, 0, 0]) + allocate + body for ranks in (1, 2)}


def group() -> dict[str, bytes]:
    seeds = {}
    for number, calls in enumerate((b"\x10\x32", b"\x43\x21", b"\x31\x04")):  # of tuning, rendezvous, agree, split, ...
        for rank in range(2):
            for dials in range(2):
                seeds[f"good_{number}{rank}{dials}"] = calls + bytes([rank, dials])
    start = seeds["good_000"] + b"\0\0"  # record and handshake as they should be
    seeds["memory"] = start + b"\2\x11\x04data\0" + b"\0\2\x52\0\0"
    seeds["revoked_without_error"] = start + b"\x80\1\1\4\0\3\0\0\0\0\0"
    seeds["left"] = start + b"\x80\2\0\0\0\0"
    return seeds | {name: start + seed for name, seed in programs("group", 6, 96).items()}


def main() -> None:
    corpora = {
        "store_connection": store_connection(),
        "store_server": store_server(),
        "store_client": store_client(),
        "store_file": store_file(),
        "tuning": tuning(),
        "link": programs("link", 8, 160),
        "group": group(),
        "c_api": {**programs("c_api", 12, 200), **windows()},
        "collectives": programs("collectives", 12, 200),
    }
    for target, seeds in corpora.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, seed in seeds.items():
            (CORPUS / target / name).write_bytes(seed)


if __name__ == "__main__":
    main()
