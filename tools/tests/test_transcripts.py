"""Every command as people and scripts run it: good input, bad input, Ctrl-C, a closed pipe, no terminal.

`python tools/tests/test_transcripts.py` prints the transcripts.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from flight_dumps import stuck, write

from terminals import closed_pipe, on_terminal, shown, without_terminal

TINY = ["--sizes", "256", "--rounds", "2", "--round-ms", "0.2", "--peers", "none", "--collectives", "all_reduce"]
SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--batch", "2", "--sequence", "16", "--rounds", "1"]
COMPILERS = {  # what they make is not loaded
    "quick-compiler": '#!/bin/sh\nfor word; do [ "$before" = -o ] && : > "$word"; before=$word; done\n',
    "slow-compiler": "#!/bin/sh\nsleep 1000\n",
}
GOOD = {  # by command; "DUMPS" and the others are made by `folder`
    "doctor": ["doctor"],
    "version": ["version"],
    "bench": ["bench", *TINY],
    "tune": ["tune", "--ranks", "2", "--seconds", "0.5", "--largest", "64k"],
    "trace": ["trace", "DUMPS"],
    "build": ["build"],
    "demo": ["demo", *SMALL, "--steps", "5", "--checked-steps", "1"],
    "verify": ["verify", "--op", "add", "--samples", "1"],
    "verify dtensor": ["verify", "dtensor", "--names", "add", "--samples", "1", "--placings", "1"],
}
BAD = {
    "": (["doctro"], "phalanx: there is no command 'doctro'; did you mean 'doctor'?"),
    "doctor": (["doctor", "--ranks", "none"], "expected a whole number of 1 or more, got 'none'"),
    "version": (["version", "--jason"], "Did you mean --json?"),
    "bench": (["bench", "--sizes", "1q"], "invalid size '1q'; examples: 4096, 4k, 1m"),
    "tune": (["tune", "--output", "/nonexistent/table"], "the folder /nonexistent does not exist"),
    "trace": (["trace", "EMPTY"], "not a flight-recorder dump (no field 'format')"),
    "build": (["build", "--forced"], "Did you mean --force?"),
    "demo": (["demo", "--heads", "4", "--ranks", "3"], "--heads (4) must be divisible by --ranks (3)"),
    "verify": (["verify", "--op", "nosuch"], "no rule or entry is called 'nosuch'"),
    "verify dtensor": (["verify", "dtensor", "--mesh", "two"], "expected a shape such as 3 or 2x2, got 'two'"),
}
LONG = {  # what takes long, and when to press Ctrl-C
    "doctor": (["doctor"], lambda text, processes: len(processes) == 3),
    "bench": (["bench", *TINY, "--rounds", "100000"], "1/1 all_reduce"),
    "tune": (["tune", "--ranks", "2", "--seconds", "100"], lambda text, processes: len(processes) > 2),
    "build": (["build", "--force"], "compiling c10d"),
    "demo": (["demo", *SMALL, "--steps", "100000"], "training"),
    "verify": (["verify"], "phalanx verify:"),
    "verify dtensor": (["verify", "dtensor"], lambda text, processes: len(processes) > 2),
}
HEAVY = ("build", "demo", "verify", "verify dtensor")  # they load torch


def commands(names):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in names]


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path)


def made(path):
    (path / "dumps").mkdir()
    write(path / "dumps", stuck())
    (path / "empty.json").write_text("{}")
    os.mkfifo(path / "fifo")
    for name, text in COMPILERS.items():
        (path / name).write_text(text)
        (path / name).chmod(0o700)
    return path


def words_of(words, folder):
    places = {"DUMPS": str(folder / "dumps"), "EMPTY": str(folder / "empty.json")}
    return [places.get(word, word) for word in words]


def variables(folder, name="", is_slow=False):
    native = str(folder / ("built" if name == "build" and not is_slow else "native"))
    compiler = str(folder / ("slow-compiler" if is_slow else "quick-compiler"))
    found = {"PHALANX_TUNING": str(folder / "tuning"), "PHALANX_NATIVE": native, "CXX": compiler}
    # The processes that doctor starts to try UCX load this, which takes until somebody writes.
    return found | ({"PHALANX_UCX": str(folder / "fifo")} if is_slow and name == "doctor" else {})


def nothing_left(ended):
    assert "Traceback" not in ended.text
    assert (ended.processes, ended.files) == ([], []), ended.text


@pytest.mark.parametrize("name", commands(GOOD))
def test_a_command_prints_its_result_on_a_terminal_and_without_one(folder, name):
    ended = on_terminal(*words_of(GOOD[name], folder), **variables(folder, name))
    nothing_left(ended)
    assert ended.status == 0, ended.text
    ended = without_terminal(*words_of(GOOD[name], folder), **variables(folder, name))
    nothing_left(ended)
    assert ended.status == 0 and ended.out
    assert "\x1b" not in ended.text and "\r" not in ended.text


@pytest.mark.parametrize("name", commands(BAD))
def test_bad_input_is_an_error_of_a_line_or_two(folder, name):
    words, text = BAD[name]
    ended = without_terminal(*words_of(words, folder), **variables(folder))
    nothing_left(ended)
    assert (ended.status, ended.out) == (2, "")
    assert text in ended.err and ended.err.startswith("phalanx") and len(ended.err.splitlines()) <= 2


@pytest.mark.parametrize("name", commands(LONG))
def test_ctrl_c_ends_a_command_and_all_that_it_started(folder, name):
    words, moment = LONG[name]
    ended = on_terminal(*words, ctrl_c=moment, **variables(folder, name, is_slow=True))
    nothing_left(ended)
    assert ended.status == 130, ended.text
    assert shown(ended.text).splitlines()[-1] == f"phalanx {words[0]}: interrupted"


def sleeps_with(path, process):
    """Whether a process has a file open and waits in the kernel."""
    with contextlib.suppress(OSError):  # it has ended
        opened = any(each.exists() and each.samefile(path) for each in Path(f"/proc/{process}/fd").iterdir())
        return opened and Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    return False


def test_ctrl_c_while_a_dump_is_read(folder):
    fifo = folder / "fifo"
    writers = []

    def is_read(text, processes):
        if not writers:
            try:
                writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody has begun to open it
                return False
        # Python would notice a signal only at the next one if it came between the opening and the first read.
        return any(sleeps_with(fifo, process) for process in processes)

    ended = on_terminal("trace", str(fifo), ctrl_c=is_read)
    os.close(*writers)
    nothing_left(ended)
    assert (ended.status, shown(ended.text)) == (130, "phalanx trace: interrupted\n")


@pytest.mark.parametrize("name", commands(name for name in GOOD if name not in ("version", "build")))
def test_a_reader_that_goes_away_ends_a_command_quietly(folder, name):
    ended = closed_pipe(*words_of(GOOD[name], folder), **variables(folder))
    nothing_left(ended)
    assert ended.status in (0, 141), ended.err  # 0: all was written before the reader went away


def test_colours_are_for_terminals(folder):
    words = words_of(GOOD["trace"], folder)
    assert "\x1b[31mverdict" in on_terminal(*words).out
    assert "\x1b" not in on_terminal(*words, NO_COLOR="1").out
    assert "\x1b" not in on_terminal(*words, TERM="dumb").out


def test_a_bar_is_for_terminals_and_takes_no_line_in_the_end(folder):
    ended = on_terminal(*words_of(GOOD["bench"], folder))
    assert "1/1 all_reduce" in ended.out and "left" in ended.out
    assert "left" not in shown(ended.out)
    err = without_terminal(*words_of(GOOD["bench"], folder)).err
    assert err.splitlines()[-1] == "phalanx bench: 1/1 all_reduce float32 256 bytes"


def test_an_interrupted_benchmark_keeps_what_it_has_measured(folder):
    path = folder / "result.json"
    words = ["bench", *TINY, "--collectives", "all_reduce,barrier", "--buffers", "user", "--json", str(path)]
    words += ["--rounds", "50", "--round-ms", "50"]
    ended = on_terminal(*words, ctrl_c="2/2 barrier", **variables(folder))
    nothing_left(ended)
    assert ended.status == 130
    text = shown(ended.text)
    assert "# all_reduce float32 sum" in text and "# interrupted: 1 of 2 rows were measured" in text
    assert f"phalanx bench: 1 of 2 rows were measured; {path} has them" in text
    result = json.loads(path.read_text())
    assert (result["complete"], result["rows_measured"], result["rows_planned"]) == (False, 1, 2)
    assert {row["collective"] for row in result["rows"]} == {"all_reduce"}


def transcripts():
    """Everything of the above, as it looks."""
    import tempfile

    kinds = (
        ("on a terminal", GOOD, lambda words, moment, **env: on_terminal(*words, **env)),
        ("bad input", BAD, lambda words, moment, **env: on_terminal(*words, **env)),
        ("Ctrl-C", LONG, lambda words, moment, **env: on_terminal(*words, ctrl_c=moment, **env)),
        ("closed pipe", GOOD, lambda words, moment, **env: closed_pipe(*words, **env)),
        ("no terminal", GOOD, lambda words, moment, **env: without_terminal(*words, **env)),
    )
    with tempfile.TemporaryDirectory() as place:
        path = made(Path(place))
        for kind, table, run in kinds:
            for name, row in table.items():
                words, moment = row if isinstance(row, tuple) else (row, None)
                moment = moment if kind == "Ctrl-C" else None
                words = words_of(words, path)
                ended = run(words, moment, **variables(path, "" if kind == "bad input" else name, moment is not None))
                print(f"=== {kind}: phalanx {' '.join(words)}".replace(place, "FOLDER"))
                print(shown(ended.out).rstrip("\n").replace(place, "FOLDER"))
                if ended.err:
                    print("--- standard error", shown(ended.err).rstrip("\n").replace(place, "FOLDER"), sep="\n")
                left = f", LEFT BEHIND {ended.processes} {ended.files}" if ended.processes or ended.files else ""
                print(f"--- exit status {ended.status}{left}\n", flush=True)


if __name__ == "__main__":
    transcripts()
