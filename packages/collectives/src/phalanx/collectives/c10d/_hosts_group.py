"""The process group on several hosts: the one in Python, with a Road in the place of the core's group."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

from phalanx.collectives import _registry
from phalanx.collectives._hosts import Places
from phalanx.collectives._hosts.connect import connect
from phalanx.collectives._torch_compat import PrefixStore
from phalanx.collectives.c10d._connect import Connection
from phalanx.collectives.c10d._hosts_mail import Mail
from phalanx.collectives.c10d._hosts_road import Road
from phalanx.collectives.c10d._python_base import Issue
from phalanx.collectives.c10d._python_group import PythonGroup
from phalanx.collectives.c10d._python_stream import StreamWork
from phalanx.collectives.c10d._python_tensors import Buffers
from phalanx.core import Group, PhalanxError, WaitTimeoutError


class HostsGroup(PythonGroup):
    """A process group of the backend `phalanx` on several hosts."""

    def _kept(self, buffers: Buffers) -> dict[str, Any]:
        # Whoever gives up a call lets go of its buffers. A thread, or a rank that is late, may still write them.
        return {"owner": buffers}

    def _put_on_stream(
        self, what: str, opts: Any, buffers: Buffers, call: Issue, device: torch.device, **extra: Any
    ) -> StreamWork:
        raise NotImplementedError(
            f"{what}: on several hosts the backend phalanx takes tensors of the CPU, and this one is on {device}; use "
            '"cpu:gloo,cuda:nccl" there, on which functional collectives of phalanx.collectives use the core'
        )

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
        inside, spanning = _registry.span(rank, self.name, self.ranks, places, store, timeout_ms, f"{self.name} (c10d)")
        timeout = timedelta(milliseconds=timeout_ms)
        try:
            connections = connect(PrefixStore("mail", store), self.position, self.ranks, timeout, self.name)
        except BaseException as error:
            inside.revoke(str(error))
            spanning.close()
            raise

        def mail(failed: Callable[[PhalanxError, bool], None]) -> Mail:
            return Mail(connections, self.name, self.ranks, self.position, failed)

        return Road(self.name, self.ranks, self.position, spanning, inside, mail, timeout_ms)

    def _let_go(self, group: Any) -> None:
        group.close()
