"""By which values a Group chooses its algorithms."""

import os

from phalanx.core._group_base import GroupBase
from phalanx.core._handle import c_timeout
from phalanx.core._lib import lib
from phalanx.core.errors import check
from phalanx.core.tuning import GpuTuning, Tuning, c_gpu_tuning, c_path, c_tuning, get_gpu_tuning, get_tuning


class Tunable(GroupBase):
    """The values for memory of the host, and those for GPUs."""

    def get_tuning(self) -> Tuning:
        """The values by which the group chooses its algorithms; those of its group rank 0. Not collective."""
        return get_tuning(self._handle.pointer)

    def set_tuning(self, tuning: Tuning, timeout_ms: int = 0) -> None:
        """Set the values by which the group chooses its algorithms. Collective; those of group rank 0 hold.

        Args:
            tuning: Zero means the built-in value, so `Tuning()` takes all back.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Raises:
            InvalidArgumentError: A value is out of range; raised on every rank alike.
        """
        check(lib.phx_group_set_tuning(self._handle.pointer, c_tuning(tuning), c_timeout(timeout_ms)))

    def save_tuning(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the group's values to the table, for later groups of this size on this host. Not collective.

        Args:
            path: Of the table; None is the one that new groups read: $PHALANX_TUNING, else phalanx/tuning in the
                user's cache directory.

        Raises:
            SystemCallError: It cannot be written.
        """
        check(lib.phx_group_save_tuning(self._handle.pointer, c_path(path)))

    def get_gpu_tuning(self) -> GpuTuning:
        """The values by which collectives on GPUs choose their kernels. Not collective.

        Until the first rendezvous of memory of GPUs, or the first collective on it, they are the built-in ones, unless
        others were set; then those of the table, if it has a row for group rank 0's GPU.
        """
        return get_gpu_tuning(self._handle.pointer)

    def set_gpu_tuning(self, tuning: GpuTuning, timeout_ms: int = 0) -> None:
        """Set the values by which collectives on GPUs choose their kernels. Collective; group rank 0's hold.

        Args:
            tuning: Zero means the built-in value, so `GpuTuning()` takes all back.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Raises:
            InvalidArgumentError: A value is out of range; raised on every rank alike.
        """
        check(lib.phx_group_set_gpu_tuning(self._handle.pointer, c_gpu_tuning(tuning), c_timeout(timeout_ms)))

    def save_gpu_tuning(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write those values to the table, for later groups of this size on such GPUs. Not collective.

        Args:
            path: As of save_tuning.

        Raises:
            InvalidArgumentError: The ranks have no memory of GPUs in common yet, so it is not known for which GPU.
            SystemCallError: It cannot be written.
        """
        check(lib.phx_group_save_gpu_tuning(self._handle.pointer, c_path(path)))
