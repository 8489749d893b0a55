"""The table of environment variables, warnings about them, and the default log."""

import logging
import os
import subprocess
import sys
from importlib import metadata

import pytest

from phalanx import core
from phalanx.core.environment import Variable, variables

ALONE = "from phalanx.core import World\nWorld(0, 1).finalize()\n"


def stderr_of(program, *words, **env):
    """What a new interpreter writes on stderr."""
    process = start(program, *words, **env)
    text = process.communicate(timeout=60)[1]
    assert process.returncode == 0, text
    return text


def start(program, *words, **env):
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **env},
    )


def test_the_table_has_a_complete_row_for_each_variable():
    rows = variables()
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert all(row.name.startswith("PHALANX_") and row.values and row.default for row in rows)
    assert all(row.meaning.endswith(".") for row in rows)
    assert Variable.internal.fget(rows[names.index("PHALANX_FIRST_COUNT")])
    tuning = rows[names.index("PHALANX_TUNING")]
    assert (tuning.reader, tuning.internal) == ("phalanx-core", False)


def test_a_program_without_logging_sees_warnings_on_stderr():
    text = stderr_of(ALONE, PHALANX_TUNNING="x")
    assert "PHALANX_TUNNING (did you mean PHALANX_TUNING?)" in text
    assert stderr_of(ALONE) == ""


def test_the_log_goes_to_the_logging_of_the_program():
    program = "import logging\nlogging.basicConfig(format='%(name)s %(levelname)s %(filename)s %(message)s')\n" + ALONE
    assert "phalanx.core WARNING world.cpp environment variables" in stderr_of(program, PHALANX_TUNNING="x")
    silent = "import logging\nlogging.getLogger('phalanx').setLevel(logging.ERROR)\n" + ALONE
    assert stderr_of(silent, PHALANX_TUNNING="x") == ""


def test_no_log_is_written_once_it_is_turned_off():
    assert stderr_of("from phalanx.core import set_log\nset_log(None)\n" + ALONE, PHALANX_TUNNING="x") == ""


ONE_RANK_TOO_FEW = """
import sys
from phalanx.core import FileStore, WaitTimeoutError, World
world = World(int(sys.argv[1]), 3, FileStore(sys.argv[2]), timeout_ms=2000)
try:
    world.create_group("tp", range(3))
except WaitTimeoutError as error:
    print("failed:", error, file=sys.stderr)
"""


def test_a_program_that_was_started_with_one_rank_too_few_says_which_rank_is_missing(tmp_path):
    ranks = [
        start(ONE_RANK_TOO_FEW, str(rank), str(tmp_path / "store"), PHALANX_WAIT_WARNING_S="0.1") for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        text = process.communicate(timeout=60)[1]
        assert process.returncode == 0, text
        assert f"rank {rank}: still waiting for rank 2 on group 'tp': group_create (" in text
        assert " of 2 s)" in text
        assert "rank 2, which has not made the same call. Is it running, and were enough processes started?" in text


def test_a_rank_that_waits_for_a_store_says_so():
    program = """
import sys
from phalanx.core import TCPStore, WaitTimeoutError
try:
    TCPStore.connect("127.0.0.1", 9, token=b"0123456789abcdef", timeout_ms=1000)
except WaitTimeoutError:
    pass
"""
    text = stderr_of(program, PHALANX_WAIT_WARNING_S="0.1")
    assert "store_tcp_connect: still waiting for the store at 127.0.0.1:9 (last: " in text


def test_the_version_is_that_of_the_distribution():
    try:
        expected = metadata.version("phalanx-core")
    except metadata.PackageNotFoundError:
        pytest.skip("phalanx-core is not installed")
    assert core.__version__ == expected
    assert "__version__" in dir(core)


def test_a_record_of_the_log_has_the_place_in_the_core(caplog):
    with caplog.at_level(logging.WARNING):
        core.set_log(logging.getLogger("somewhere"))
        try:
            from phalanx.core import _log

            _log.to_logger(logging.getLogger("somewhere"))(logging.WARNING, "core/src/a.cpp", 7, "100 % of it")
        finally:
            from phalanx.core._lib import ffi, lib

            _log.install(ffi, lib)
    (record,) = caplog.records
    assert (record.name, record.lineno, record.getMessage()) == ("somewhere", 7, "100 % of it")
