"""Interpreters that cannot register ops, for tests of what an import does then. Imports nothing of ours."""

import torch

__all__ = ["BROKEN"]


def _refuse(*_, **__):
    raise RuntimeError("this interpreter registers no ops")


def _no_libraries():  # as under torch::deploy
    torch.library.Library.__init__ = _refuse


def _no_library_at_all():
    del torch.library.Library


def _no_fake_kernels():  # some of the ops are registered by then
    torch.library.register_fake = _refuse


# What breaks this interpreter, and a pattern of the reason that is told.
BROKEN = {
    _no_libraries: "RuntimeError: this interpreter registers no ops",
    _no_library_at_all: "AttributeError: .*Library",
    _no_fake_kernels: "RuntimeError: this interpreter registers no ops",
}
