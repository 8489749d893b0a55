"""What the demo can be told: the command line, and the same again for the processes that it starts."""

import argparse
import importlib.util
from dataclasses import dataclass

VOCABULARY_SIZE = 128  # ASCII
PLUGIN, PLUGIN_BACKEND = "phalanx.inductor_plugin", "phalanx"


@dataclass(frozen=True)
class Options:
    """Everything that a run depends on. All ranks get the same."""

    ranks: int = 2
    steps: int = 300
    seed: int = 0
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    batch: int = 8
    sequence: int = 128
    learning_rate: float = 3e-3
    checked_steps: int = 5
    rounds: int = 30
    text_bytes: int = 1_500_000
    gloo: bool = True
    pin: bool = True
    compile: str = ""  # a backend of torch.compile


_HELP = {
    "ranks": "processes that train one model together",
    "steps": "training steps",
    "seed": "of the first weights and of the choice of text",
    "layers": "blocks of attention and MLP",
    "hidden": "features of each character",
    "heads": "attention heads",
    "batch": "pieces of text in a step",
    "sequence": "characters of a piece",
    "learning_rate": "of AdamW",
    "checked_steps": "how many of the first steps are compared with one process",
    "rounds": "of the comparison with gloo",
    "text_bytes": "how much of the standard library's sources to read",
}


def parse(argv: list[str]) -> Options:
    """Read the command line; an impossible combination ends the program as argparse does.

    Args:
        argv: Arguments after the command's name.
    """
    parser = argparse.ArgumentParser(
        prog="phalanx demo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a small tensor-parallel transformer on the sources of the Python standard library, compare "
        "it with one process, and print what each collective cost beside gloo.",
    )
    default = Options()
    for name, text in _HELP.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, metavar="N", help=text)
    parser.add_argument("--no-gloo", dest="gloo", action="store_false", help="leave the comparison with gloo out")
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="do not give each rank a core of its own")
    parser.add_argument(
        "--compile",
        nargs="?",
        const=PLUGIN_BACKEND,
        default=argparse.SUPPRESS,
        metavar="BACKEND",
        help="run the model compiled, from step 2 on, by this backend of torch.compile; if none is named, by "
        f"{PLUGIN_BACKEND!r} of phalanx-inductor-plugin",
    )
    options = Options(**vars(parser.parse_args(argv)))
    if problem := _problem(options):
        parser.error(problem)
    return options


def _problem(options: Options) -> str | None:
    for name in ("ranks", "steps", "layers", "hidden", "heads", "batch", "sequence", "rounds", "text_bytes"):
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1"
    if not 0 < options.learning_rate < float("inf"):
        return f"--learning-rate is {options.learning_rate}; it must be a positive number"
    if options.checked_steps < 0 or options.seed < 0:
        return "--checked-steps and --seed must not be negative"
    if options.hidden % options.heads:
        return f"--hidden {options.hidden} cannot be divided among --heads {options.heads}: it must be a multiple of it"
    for name, amount in (
        ("--heads", options.heads),
        ("--sequence", options.sequence),
        ("the vocabulary of", VOCABULARY_SIZE),
    ):
        if amount % options.ranks:
            return f"{name} {amount} cannot be sharded over --ranks {options.ranks}: it must be a multiple of it"
    if options.compile == PLUGIN_BACKEND and importlib.util.find_spec(PLUGIN) is None:
        return (
            "--compile needs the package phalanx-inductor-plugin, which is not installed: there is no module "
            f"{PLUGIN}. Install it, or name a backend that is there: --compile inductor"
        )
    if options.compile:
        from torch.compiler import list_backends

        known = list_backends(exclude_tags=())
        if options.compile not in known:
            return f"--compile {options.compile}: torch.compile has no such backend; it has {', '.join(sorted(known))}"
    if options.text_bytes <= options.sequence:
        return f"--text-bytes {options.text_bytes} is not more than --sequence {options.sequence}"
    return None
