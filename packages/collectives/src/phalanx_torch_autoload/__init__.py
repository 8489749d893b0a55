"""Lets torch.distributed find the backend `phalanx` in processes that never import phalanx.

`import torch` imports this module by the entry point of this distribution in the group `torch.backends`. So it imports
only modules that torch has imported, none of this project, and it is not in the namespace package `phalanx`: it works
even if that is damaged. Its name sorts after that of the distribution's metadata, so that pip, which removes in the
order of names, never leaves the entry point behind without the module.

The import itself makes the name known. Torch also calls the object that the entry point names. That is `__dir__`, which
every module has: a folder without this file is a namespace package to Python, and so does no harm.

This module uses private parts of torch itself, not through a file `_torch_compat.py`, because it must stay alone. Read
in torch 2.13 and 2.14.
"""

import sys
from typing import Any

__all__ = ["autoload", "register"]

NAME = "phalanx"
KEY = NAME.upper()  # under which torch keeps what belongs to the name
DEVICES = ["cpu", "cuda"]


class _WhenLookedUp:
    """The value of torch.distributed.Backend.PHALANX until it is looked up, as Backend("phalanx") does.

    Up to torch 2.13, a registered plug-in takes the default back end from every group that is made by "cpu:gloo".
    Programs that do not use us must not notice us: torch has the plug-in from the first look at the name on.
    """

    def __get__(self, instance: object, owner: Any) -> str:
        setattr(owner, KEY, NAME)
        owner.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        return NAME


def autoload() -> None:
    """Make the name known, if torch.distributed has been imported. Never raises; does nothing the second time."""
    try:
        c10d = sys.modules.get("torch.distributed.distributed_c10d")  # torch.nn imports it, unless torch lacks it
        if c10d is not None and KEY not in vars(c10d.Backend):
            c10d.Backend.backend_capability[NAME] = DEVICES  # what torch reads before it looks up the name
            c10d.Backend.backend_list.append(NAME)
            setattr(c10d.Backend, KEY, _WhenLookedUp())
    except Exception:
        # A torch that has changed must still be imported. What names the back end then gets torch's own error, and
        # test_backends_torch_compat.py fails.
        pass


def register() -> None:
    """Register the back end at once, as importing phalanx.collectives does.

    It is also the entry point in the group `torch.distributed.backends` of torch 2.14.
    """
    autoload()
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        getattr(c10d.Backend, KEY, None)  # looked up: see _WhenLookedUp


def _create(options: Any, backend_options: Any) -> Any:
    """Make the backend of a new group. Torch calls it for each."""
    try:
        from phalanx.collectives._c10d._make import create
    except Exception as error:
        raise ImportError(
            f"backend '{NAME}': phalanx.collectives cannot be imported: {error}. It needs the distributions "
            "phalanx-collectives and phalanx-core, whole and of one version; install both again"
        ) from error
    return create(options, backend_options)


autoload()
