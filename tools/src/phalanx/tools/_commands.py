"""The commands of this distribution. Its entry points `phalanx.commands` name these functions.

Nothing is imported before a command runs: `phalanx bench` works without torch.
"""

import importlib.util

from phalanx.core.commands import CommandError


def bench(argv: list[str]) -> int:
    """`phalanx bench`."""
    from phalanx.tools.bench._main import main

    return main(argv)


def demo(argv: list[str]) -> int:
    """`phalanx demo`."""
    _require("demo", "phalanx.dtensor")
    from phalanx.tools.demo import main

    return main(argv)


def trace(argv: list[str]) -> int:
    """`phalanx trace`."""
    from phalanx.tools.trace import main

    return main(argv)


def tune(argv: list[str]) -> int:
    """`phalanx tune`."""
    from phalanx.tools.tune._main import main

    return main(argv)


def verify(argv: list[str]) -> int:
    """`phalanx verify`."""
    _require("verify", "phalanx.dtensor", "expecttest", "numpy")
    from phalanx.tools.verify._main import main

    return main(argv)


def _require(command: str, *modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(
            f"needs {', '.join(missing)}: install phalanx-tools[{command}]; "
            f"from the sources of Phalanx: pip install './tools[{command}]'"
        )
