"""The collectives of a group that spans hosts, on tensors of GPUs: put on the current stream, which the host does not
wait for.

Within a host the core does the work on the GPU, between the hosts NCCL carries bytes (see carrier.py). What reductions
make of them is computed on every host from the same bytes in the same order, as it is for tensors of the CPU.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives._hosts.carrier import Carrier
from phalanx.collectives._hosts.places import Places
from phalanx.collectives._hosts.spanning import Spanning
from phalanx.collectives._streams import where
from phalanx.core import Group, MismatchError, PhalanxError, UnsupportedError


class GpuSpanning(Spanning):
    """As Spanning, for tensors of GPUs (and of the CPU, which the host waits for).

    Args:
        name, places, inside, timeout_ms: As of Spanning.
        carrier: Of this rank's lane; None for a rank without one.

    Attributes:
        failed: Called in the carrier's thread with what ended a call that had returned.
    """

    def __init__(self, name: str, places: Places, inside: Group, carrier: Carrier | None, timeout_ms: int) -> None:
        super().__init__(name, places, inside, carrier, timeout_ms)
        self._carrier = carrier
        self._unsaid: PhalanxError | None = None
        self._failing = threading.Lock()
        self.failed: Callable[[PhalanxError], None] = lambda error: None
        if carrier is not None:
            carrier.failed = self._failed_later
            carrier.check = self.check

    def run(self, op: str, tensor: torch.Tensor, *args: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """As Spanning.run. A failure that is noticed after a call is raised by the next one.

        Raises:
            UnsupportedError: The stream is being captured: what crosses between hosts cannot be replayed.
        """
        unsaid = self._take_unsaid()
        if unsaid is not None:
            raise unsaid
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{op} on group '{self._name}': a stream is being captured, and the group spans hosts. Capture what "
                "comes before and after it",
                operation=op,
                group=self._name,
            )
        try:
            return super().run(op, tensor, *args, out=out)
        except PhalanxError:
            self._take_unsaid()  # the thread saw the same
            raise

    def _take_unsaid(self) -> PhalanxError | None:
        with self._failing:
            unsaid, self._unsaid = self._unsaid, None
        return unsaid

    def _where(self, tensor: torch.Tensor) -> dict[str, Any]:
        return {} if tensor.is_cpu else where(tensor.device)

    def check(self) -> None:
        """Raise what has gone wrong within the host."""
        error = self.inside.error()
        if error is not None:
            raise error

    def _failed_later(self, error: PhalanxError) -> None:
        """In the carrier's thread: of a call that has returned."""
        broken = self._carrier is not None and self._carrier.is_broken
        error = (self.heard() if broken else None) or error
        with self._failing:
            if self._failure is not None:
                return
            self._unsaid = error
        self._fail(error)
        self.failed(error)

    def _fail(self, error: PhalanxError) -> None:
        super()._fail(error)
        if self._carrier is not None and isinstance(error, MismatchError):
            self._carrier.abort()  # or streams wait for what the others do not send

    def end(self, error: PhalanxError) -> None:
        """The group has failed, which others are told by other means. Streams go on; later calls raise."""
        with self._failing:
            self._failure = self._failure or error
        if self._carrier is not None:
            self._carrier.abort()
        self.close()

    def drain(self, until: float) -> None:
        """Let the host wait until streams have ended what crosses between the hosts, or until then."""
        if self._carrier is not None:
            self._carrier.drain(until)
