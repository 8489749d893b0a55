"""Tests of clients run only when they are named: `pytest tests/clients`, which installs them, or `.ci/run clients`."""

from pathlib import Path

import pytest

import clients

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "measure the steps of each client over phalanx and over gloo, in turns, and write the times into this file"
    parser.addoption("--times", metavar="FILE", type=Path, help=text)
    text = "with --times: the steps that are measured go before all else on the machine (SCHED_RR), which needs root"
    parser.addoption("--realtime", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    clients.in_turns = config.getoption("--times", None) is not None
    clients.realtime = config.getoption("--realtime", False)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    named = [(config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(2400))  # pip, and several times the deadline of what is run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if clients.times:
        terminalreporter.section("times of steps")
        clients.print_times(config.getoption("--times"), terminalreporter.write_line)
