"""The library that registers the ops of `torch.ops.phalanx`. Nothing here imports torch."""

import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.core import interrupts
from phalanx.core._lib import ffi, lib, library_path, load_ffi, not_loaded, open_library
from phalanx.core.errors import PhalanxError, check, error_from_status

EVERY_CONTEXT = 2**64 - 1  # PHXT_EVERY_CONTEXT
ABI_VERSION = 0  # of the phalanx_torch.h that this binding was written for


class TorchOps(NamedTuple):
    """The phxt_* functions.

    Attributes:
        ffi: For the types of phalanx_torch.h. The types of phalanx.h are the same as in `phalanx.core.ffi`.
        lib: Holds the functions of phalanx_torch.h.
        path: The path of the library, for callers that load it by its name.
    """

    ffi: Any
    lib: Any
    path: Path

    def last_error(self) -> PhalanxError | None:
        """What the last op or phxt_* call that failed on this thread failed with, or None."""
        status = int(self.lib.phxt_last_status())
        if status >= 0:
            return None
        return error_from_status(status, _text(self.lib.phxt_last_error()))

    def explain(self, error: BaseException) -> BaseException:
        """The exception to raise for one that torch raised for an op on this thread just now.

        Args:
            error: A RuntimeError or ValueError of torch, which has a text only.

        Returns:
            What a signal handler raised while the op waited; a PhalanxError with all that the core knows where the
            error is one of the op; or `error` itself.
        """
        interruption = interrupts.take()
        if interruption is not None:
            return interruption
        text = str(error)
        if self.lib.phxt_last_status() >= 0 or _text(self.lib.phxt_last_error()) != text:
            return error
        if _text(lib.phx_last_error()) == text:
            try:
                check(int(self.lib.phxt_last_status()))
            except PhalanxError as known:
                return known.with_traceback(None)
        return self.last_error() or error

    def check(self, status: int) -> int:
        """Turn the status of a phxt_* function into an exception.

        Args:
            status: What the function returned on this thread, as its last call.

        Returns:
            The status when it is not an error.

        Raises:
            PhalanxError: The subclass that fits the status.
        """
        if status < 0:
            raise self.last_error() or error_from_status(status, f"the torch ops returned status {status}")
        return status


def _text(pointer: Any) -> str:
    return bytes(ffi.string(pointer)).decode("utf-8", "replace")


_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def load_torch_ops() -> TorchOps:
    """Load libphalanx_torch.so, which registers the ops. A later call returns the same.

    The caller must have imported torch: the library uses the torch that is loaded. It is looked
    for in the folder of libphalanx.so.0. Thread-safe; not collective.

    Returns:
        ffi and lib for the phxt_* functions.

    Raises:
        ImportError: torch has not been imported, or the library is missing or does not fit it.
    """
    with _lock:
        return _load()


@cache
def _load() -> TorchOps:
    if "torch" not in sys.modules:
        raise ImportError("phalanx.core: load_torch_ops() needs torch; import torch before calling it", name="torch")
    path = library_path.with_name("libphalanx_torch.so")
    if not path.is_file():
        raise not_loaded(f"no {path}; reinstall phalanx-core, or build with PHX_BUILD_TORCH=ON", path)
    torch_ffi = load_ffi("phalanx.core._abi_torch", "torch/phalanx_torch.h", base=ffi)
    lib = open_library(torch_ffi, path)
    version = int(lib.phxt_abi_version())
    if version != ABI_VERSION:
        text = f"{path} has ABI version {version}, this binding needs {ABI_VERSION}"
        raise not_loaded(f"{text}; they come from different builds: reinstall phalanx-core", path)
    reason = lib.phxt_load_error()
    if reason != ffi.NULL:
        advice = "this version of phalanx-core may not fit the installed torch"
        raise not_loaded(f"{path}: {_text(reason)}; {advice}", path)
    if interrupts.slots() is not None:
        raise_object = ctypes.cast(ctypes.pythonapi.PyErr_SetObject, ctypes.c_void_p).value
        lib.phxt_set_interrupted(torch_ffi.cast("phxt_raise", raise_object), interrupts.slots())
    return TorchOps(torch_ffi, lib, path)
