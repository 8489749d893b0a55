"""What the demo can be told: the command line, and the same again for the processes that it starts."""

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.commands import Parser, number_from
from phalanx.tools._arguments import positive_number

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
    "ranks": ("N", "number of processes that train one model together"),
    "steps": ("N", "number of training steps"),
    "checked_steps": ("N", "number of first steps that are compared with one process"),
    "seed": ("N", "random seed of the first weights and of the choice of text"),
    "layers": ("N", "number of blocks of attention and MLP"),
    "hidden": ("N", "features of each character"),
    "heads": ("N", "attention heads"),
    "batch": ("N", "sequences per batch"),
    "sequence": ("N", "characters of a sequence"),
    "learning_rate": ("RATE", "learning rate of AdamW"),
    "text_bytes": ("BYTES", "how much of the sources of the standard library to read"),
    "rounds": ("N", "rounds of the comparison with gloo"),
}


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx demo`."""
    made = Parser(
        prog="phalanx demo",
        description="Train a small tensor-parallel transformer on the sources of the Python standard library, compare "
        "it with one process, and print what each collective takes with Phalanx and with gloo. The exit status is 1 if "
        "a rank fails or differs from one process.",
    )
    default = Options()
    for name, (metavar, text) in _HELP.items():
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        made.add_argument(
            option,
            type=_TYPES.get(name, number_from(1)),
            default=value,
            metavar=metavar,
            help=f"{text} (default {value})",
        )
    made.add_argument("--no-gloo", dest="gloo", action="store_false", help="leave out the comparison with gloo")
    made.add_argument("--no-pin", dest="pin", action="store_false", help="do not give each rank a core of its own")
    made.add_argument(
        "--compile",
        nargs="?",
        const=PLUGIN_BACKEND,
        default="",
        metavar="BACKEND",
        help="compile the model from step 2 on with this backend of torch.compile; without a name with "
        f"{PLUGIN_BACKEND!r} of phalanx-inductor-plugin",
    )
    return made


_TYPES: dict[str, Callable[[str], float]] = {
    "checked_steps": number_from(0),
    "seed": number_from(0),
    "learning_rate": positive_number,
}


def parse(argv: list[str]) -> Options:
    """Read the command line; an impossible combination ends the program as argparse does.

    Args:
        argv: Arguments after the command's name.
    """
    made = parser()
    options = Options(**vars(made.parse_args(argv)))
    if problem := _problem(options):
        made.error(problem)
    return options


def _problem(options: Options) -> str | None:
    if options.hidden % options.heads:
        return f"--hidden ({options.hidden}) must be divisible by --heads ({options.heads})"
    for name, amount in (
        ("--heads", options.heads),
        ("--sequence", options.sequence),
        ("the size of the vocabulary", VOCABULARY_SIZE),
    ):
        if amount % options.ranks:
            return f"{name} ({amount}) must be divisible by --ranks ({options.ranks})"
    if options.compile == PLUGIN_BACKEND and importlib.util.find_spec(PLUGIN) is None:
        return (
            "--compile needs phalanx-inductor-plugin, which is not installed. Install it, or name another backend: "
            "--compile inductor"
        )
    if options.compile:
        from torch.compiler import list_backends

        if options.compile not in list_backends(exclude_tags=()):
            known = ", ".join(sorted(list_backends()))
            return f"--compile: unknown backend {options.compile!r} (torch.compile has {known}, and some for debugging)"
    if options.text_bytes <= options.sequence:
        return f"--text-bytes ({options.text_bytes}) must be larger than --sequence ({options.sequence})"
    return None
