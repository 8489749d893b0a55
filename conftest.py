"""Every test of this repository may use tests/support, which pyproject.toml puts on the path."""

import os
import signal

import pytest

os.environ.setdefault("PHALANX_NATIVE", "")  # tests do not depend on what `phalanx build` left in a cache
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell, as CI does
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start inherits it
pytest_plugins = ["ranks"]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All tests run in two processes, each of which takes whole files: many tests wait. Named files run in one."""
    in_worker = hasattr(config, "workerinput")
    if in_worker or config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.usepdb:
        return
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"
        config.option.loadscopereorder = False  # files with few tests would come last, and these are the long ones
