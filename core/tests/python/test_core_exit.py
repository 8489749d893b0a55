"""The end of the interpreter: no crash, no hang, and no words on stderr, whatever is still under way."""

import subprocess
import sys

import pytest

START = """
import builtins, sys, threading, time
from phalanx import core
rank, store = int(sys.argv[1]), core.FileStore(sys.argv[2])
world = core.World(rank, 2, store, timeout_ms=20_000)
group = world.create_group("g", range(2))
memory = world.alloc(4096)
symm = group.rendezvous(memory)
values = bytearray(64)

def start():
    work = group.all_reduce(values, values, dtype="uint8", blocking=False)
    store.set(f"started by {rank}", b"")
    store.wait([f"started by {1 - rank}"], 20_000)  # a rank that has left cannot be called with
    return work
"""

PROGRAMS = {
    "work that nobody waits for": "work = start()",
    "work in a cycle of garbage": "start.self, start.all = start, (world, group, memory, symm, start())",
    "everything kept by a module that goes last": "builtins.kept = world, group, memory, symm, store, start()",
    "views of peers' memory kept to the end": "builtins.kept = symm.buffer(0), symm.buffer(1)",
    "a log function": "core.set_log(print, 10)",
    "sys.exit": "work = start(); sys.exit(0)",
    "a thread that uses the group after the main thread": """
def late():
    time.sleep(0.3)
    group.barrier()

threading.Thread(target=late).start()
""",
    "a daemon thread that waits for a store": """
threading.Thread(target=lambda: store.get("never set", 60_000), daemon=True).start()
time.sleep(0.2)
""",
}


def run(program, folder):
    words = [sys.executable, "-c", START + program]
    ranks = [
        subprocess.Popen([*words, str(rank), str(folder / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("what", PROGRAMS)
def test_an_interpreter_ends_in_silence_with(what, tmp_path):
    assert run(PROGRAMS[what], tmp_path) == [("", 0), ("", 0)]


def test_an_exception_is_all_that_a_program_says_that_it_ends(tmp_path):
    for said, status in run("work = start()\nraise ValueError('mine')", tmp_path):
        assert status == 1
        assert said.rstrip().endswith("ValueError: mine") and said.count("Traceback") == 1
