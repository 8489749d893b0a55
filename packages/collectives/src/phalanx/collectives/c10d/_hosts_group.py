"""The process group on several hosts: the one in Python, with a Road in the place of the core's group."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

from phalanx.collectives import _gpus, _registry, _torch_compat
from phalanx.collectives._hosts import Carrier, Places, span, span_on_gpus
from phalanx.collectives._hosts.connect import connect
from phalanx.collectives._torch_compat import PrefixStore
from phalanx.collectives.c10d._connect import Connection
from phalanx.collectives.c10d._hosts_gpus import GpuRoad, introduce
from phalanx.collectives.c10d._hosts_mail import Mail
from phalanx.collectives.c10d._hosts_messages import FarMessages
from phalanx.collectives.c10d._hosts_road import Road
from phalanx.collectives.c10d._hosts_words import MailWords
from phalanx.collectives.c10d._python_group import PythonGroup
from phalanx.collectives.c10d._python_stream import AnyWork, StreamWork
from phalanx.collectives.c10d._python_tensors import Buffers, elements_of
from phalanx.collectives.c10d._python_work import fail
from phalanx.core import Group, PhalanxError, UnsupportedError, WaitTimeoutError

_CARRIES = "nccl"  # what carries bytes of GPUs between hosts


class HostsGroup(PythonGroup):
    """A process group of the backend `phalanx` on several hosts."""

    def _kept(self, buffers: Buffers) -> dict[str, Any]:
        # Whoever gives up a call lets go of its buffers. A thread, or a rank that is late, may still write them.
        return {"owner": buffers}

    def _group_on(self, device: torch.device, group: Any, what: str) -> GpuRoad:
        if torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                f"{what} on group '{self._group_name}': a stream is being captured, and the group spans hosts. Capture "
                "what comes before and after it"
            )
        try:
            made: GpuRoad = group.on_gpus(device)
        except PhalanxError as error:
            fail(what, error)
        return made

    def _message_of_gpu(self, what: str, tensor: torch.Tensor, peer: int, tag: int) -> AnyWork:
        if what == "recv_anysource":
            return super()._message_of_gpu(what, tensor, peer, tag)  # which refuses it
        road = self._group_on(tensor.device, self._engine.group(self._timeout_ms, what), what)
        if road.is_here(peer):
            return super()._message_of_gpu(what, tensor, peer, tag)
        buffers, device = Buffers([tensor]), tensor.device
        with torch.cuda.device(device):
            data = buffers.readable(tensor) if what == "send" else buffers.writable(tensor)
            count, dtype = elements_of(tensor)
            moved = buffers.elements_at(data, count, dtype)
            try:
                message = road.message(what, peer, tag, moved, buffers, self._timeout_ms)
            except PhalanxError as error:
                fail(what, error)
            work = StreamWork(self._engine, what, [tensor], device, self._sequence, message)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def shutdown(self) -> None:
        road: Any = self._engine.connection.known()
        if road is not None:
            road.stop_receiving()  # or it would be revoked for them, also for ranks that are not that far
        super().shutdown()


class HostsConnection(Connection):
    """As Connection, for ranks on several hosts."""

    def _make(self, rank: _registry.Rank, store: Any, timeout_ms: int) -> Group:
        try:
            road = self._connect(rank, store, timeout_ms)
        except WaitTimeoutError as error:  # some ranks may have all they need, and do not come again
            raise PhalanxError(str(error), rank=error.rank, peer=error.peer, group=self.name) from None
        return cast(Group, road)  # it has the calls that the group in Python makes

    def _connect(self, rank: _registry.Rank, store: Any, timeout_ms: int) -> Road:
        places = Places(self.hosts, self.position)
        # A name of its own: functional collectives may make groups of the same ranks at the same time.
        inside, spanning = span(rank.world(), self.name, self.ranks, places, store, timeout_ms, f"{self.name} (c10d)")
        timeout = timedelta(milliseconds=timeout_ms)
        try:
            connections = connect(PrefixStore("mail", store), self.position, self.ranks, timeout, self.name)
        except BaseException as error:
            inside.revoke(str(error))
            spanning.close()
            raise

        def mail(failed: Callable[[PhalanxError, bool], None]) -> Mail:
            return Mail(connections, self.name, self.ranks, self.position, failed)

        def on_gpus(road: Road, mail: Mail, device: torch.device) -> GpuRoad:
            return self._on_gpus(road, mail, device, PrefixStore("gpus", store), places, inside, timeout_ms)

        given = self.name, self.ranks, self.position, spanning, inside, mail, timeout_ms
        return Road(*given, make_gpu_road=on_gpus)

    def _on_gpus(
        self,
        road: Road,
        mail: Mail,
        device: torch.device,
        store: Any,
        places: Places,
        inside: Group,
        timeout_ms: int,
    ) -> GpuRoad:
        """What the group has for GPUs. Collective: its ranks meet again."""
        refusal = _gpus.refusal(device) or _torch_compat.lacks_backend(_CARRIES)
        answer = self._meeting(store, timeout_ms).hold(refusal)
        if answer.refusal:
            raise UnsupportedError(
                f"on several hosts tensors of GPUs need the core on each GPU, and {_CARRIES} between the hosts. "
                f"{answer.refusal[0].upper()}{answer.refusal[1:]}",
                group=self.name,
            )
        own, timeout = PrefixStore(answer.token, store), timedelta(milliseconds=timeout_ms)
        spanning = span_on_gpus(self.name, self.ranks, places, inside, _CARRIES, own, timeout_ms)
        carriers: list[Carrier] = []
        try:
            for traffic in ("exchanges", "messages"):
                words = MailWords(mail, self.name, self.ranks, self.position, timeout)
                between = PrefixStore(traffic, own)
                backend = _torch_compat.make_backend(_CARRIES, between, self.position, len(self.ranks), timeout)
                carriers.append(Carrier(backend, words, self.ranks, self.name, timeout))
                introduce(carriers[-1], self.position, len(self.ranks), device)
        except RuntimeError as error:
            spanning.close()
            for carrier in carriers:
                carrier.close()
            if isinstance(error, PhalanxError):
                raise
            text = f"group '{self.name}': no {_CARRIES} between its ranks: {error}"
            raise PhalanxError(text, group=self.name) from None
        return GpuRoad(road, spanning, carriers[0], FarMessages(carriers[1], words, self.position))

    def _let_go(self, group: Any) -> None:
        group.close()
