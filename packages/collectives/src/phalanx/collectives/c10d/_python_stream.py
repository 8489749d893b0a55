"""Works of the backend in Python that are on the stream of a GPU. As Work::put_on in work.cpp."""

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives._streams import Mark
from phalanx.collectives.c10d import _torch_compat
from phalanx.collectives.c10d._python_work import Engine, Work


class StreamWork(_torch_compat.WorkBase):  # type: ignore[misc]
    """What was put on the current stream. A wait for it lets the current stream wait, and the host too if it is a
    barrier. What goes wrong on the stream is raised by a later call on the group.

    Args:
        engine: Of the group.
        what: Torch's name of the call.
        outputs: What it writes.
        device: Whose stream it is.
        sequence: Its number in the group.
        mark: Where it has ended; None is where the current stream is.
    """

    def __init__(
        self,
        engine: Engine,
        what: str,
        outputs: Sequence[torch.Tensor],
        device: torch.device,
        sequence: int,
        mark: Any = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._what = what
        self._outputs = list(outputs)
        self._device = device
        self._sequence = sequence
        self._mark: Any = Mark(device) if mark is None else mark
        self._future: Any = None

    def wait(self, timeout: Any = None) -> bool:
        self._mark.wait()
        if self._what == "barrier":
            self._mark.synchronize()
            self._engine.check(self._what)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._mark.query())

    def is_success(self) -> bool:
        return bool(self._mark.query())

    def exception(self) -> Exception | None:
        return None

    def result(self) -> list[Any]:
        return self._outputs

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank

    def abort(self) -> None:
        self._engine.abort("a work was aborted")

    def get_future(self) -> Any:
        if self._future is None:
            self._future = _torch_compat.new_future(self._device)
            with torch.cuda.stream(self._mark.stream):  # whoever uses the value waits for this stream
                self._future.set_result(self._outputs)
        return self._future

    def get_future_result(self) -> Any:
        return self.get_future().then(lambda done: 0)  # of c10d::WorkResult

    def _get_sequencenumber(self) -> int:
        return self._sequence


AnyWork = Work | StreamWork
