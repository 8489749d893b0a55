"""What a process group on several hosts has in the place of the core's group: the same calls, with addresses.

Reductions, gathers to all and broadcasts run one after another in a thread. The others are made of messages. For
tensors of GPUs there is something of its own, made at the first call for one.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives.c10d._hosts_base import BaseRoad
from phalanx.collectives.c10d._hosts_calls import Blocks, Calls
from phalanx.collectives.c10d._hosts_gpus import GpuRoad
from phalanx.collectives.c10d._hosts_mail import Mail
from phalanx.collectives.c10d._hosts_pending import Joined, Pending
from phalanx.collectives.c10d._hosts_tensors import as_dtype, memory_at, memory_of, name_of, tensor_at
from phalanx.core import DType, PhalanxError, UnsupportedError, WaitTimeoutError


class Road(BaseRoad, Calls):
    """A group on several hosts, with the calls of the core's group that the group in Python makes.

    Args:
        As of BaseRoad; and
        make_gpu_road: Makes what it has for GPUs, of itself and its messages. Raises as `on_gpus`.
    """

    def __init__(self, *args: Any, make_gpu_road: Callable[["Road", Mail, torch.device], GpuRoad]) -> None:
        super().__init__(*args)
        self.make_gpu_road = make_gpu_road
        self._deciding = threading.Lock()
        self._on_gpus: GpuRoad | None = None
        self._refused = ""

    def _at(self, address: int, count: int, kind: DType, owner: Any) -> torch.Tensor:
        return tensor_at(address, count, kind, owner)

    def _exchange(
        self,
        call: str,
        what: str,
        sent: Blocks,
        got: Blocks,
        kind: DType,
        *,
        timeout_ms: int,
        blocking: bool,
        channel: int = 0,
        owner: Any = None,
    ) -> Pending | None:
        number = self.next_exchange(what)
        if self._position in sent and self._position in got:
            got[self._position].copy_(sent[self._position])

        def about(block: torch.Tensor) -> str:
            return f"{call}({name_of(kind)}, {block.numel()}) #{number}"

        parts = []
        for each, block in got.items():
            if each != self._position:
                memory = memory_of(block)
                parts.append(self._mail.receive(what, each, -number, about(block), memory, owner, timeout_ms))
        for each, block in sent.items():
            if each != self._position:
                memory = memory_of(block)
                parts.append(self._mail.send(what, each, -number, about(block), memory, owner, timeout_ms))
        joined = Joined(what, parts, owner, timeout_ms, self.late)
        if not blocking:
            return joined
        joined.wait(timeout_ms)
        return None

    # ---- messages -----------------------------------------------------------------------------------

    def send(
        self, data: int, peer: int, count: int, dtype: Any, *, tag: int, timeout_ms: int, owner: Any = None, **_: Any
    ) -> Pending:
        self._check("send")
        kind = as_dtype(dtype)
        memory = memory_at(data, count * kind.itemsize, owner)
        return self._mail.send("send", peer, tag, f"{name_of(kind)}, {count}", memory, owner, timeout_ms)

    def recv(
        self, data: int, peer: int, count: int, dtype: Any, *, tag: int, timeout_ms: int, owner: Any = None, **_: Any
    ) -> Pending:
        self._check("recv")
        kind = as_dtype(dtype)
        memory = memory_at(data, count * kind.itemsize, owner)
        return self._mail.receive("recv", peer, tag, f"{name_of(kind)}, {count}", memory, owner, timeout_ms)

    # ---- tensors of GPUs ----------------------------------------------------------------------------

    def on_gpus(self, device: torch.device) -> GpuRoad:
        """What takes the calls for tensors of GPUs. Collective the first time.

        Raises:
            UnsupportedError: A rank cannot do it; raised on all of them, by every call.
            WaitTimeoutError: Ranks did not come in time; the text names them. It may be tried again.
            PhalanxError: It failed, and so has the group.
        """
        with self._deciding:
            if self._refused:
                raise UnsupportedError(self._refused, group=self._name)
            if self._on_gpus is None:
                self.check("the first call for a GPU")
                try:
                    made = self.make_gpu_road(self, self._mail, device)
                except WaitTimeoutError:  # nothing has been sent: a late rank may still come
                    raise
                except UnsupportedError as refused:
                    self._refused = str(refused)
                    raise
                except PhalanxError as error:
                    self.fail(error)
                    raise
                self._on_gpus = self._beside = made
                if self._failure is not None:  # meanwhile
                    made.fail(self._failure)
            return self._on_gpus
