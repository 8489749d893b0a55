"""The commands of this distribution. Its entry points `phalanx.commands` name these functions.

Nothing is imported before a command runs: `phalanx bench` works without torch.
"""

import importlib.util
import sys


def bench(argv: list[str]) -> int:
    """`phalanx bench`."""
    from phalanx.tools.bench._main import main

    return main(argv)


def demo(argv: list[str]) -> int:
    """`phalanx demo`."""
    if not _has_all_of("demo", "phalanx.dtensor"):
        return 1
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
    if not _has_all_of("verify", "phalanx.dtensor", "expecttest", "numpy"):
        return 1
    from phalanx.tools.verify._main import main

    return main(argv)


def _has_all_of(command: str, *modules: str) -> bool:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"phalanx {command}: needs {', '.join(missing)}: install phalanx-tools[{command}]; "
            f"from the sources of Phalanx: pip install './tools[{command}]'",
            file=sys.stderr,
        )
    return not missing
