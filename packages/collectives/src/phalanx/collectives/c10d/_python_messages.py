"""Messages between two ranks, of the backend in Python. As messages.cpp."""

from typing import Any

import torch

from phalanx.collectives.c10d._python_base import Tensors, checked
from phalanx.collectives.c10d._python_collectives import Collectives
from phalanx.collectives.c10d._python_stream import AnyWork
from phalanx.collectives.c10d._python_tensors import Buffers, elements_of, only
from phalanx.collectives.c10d._python_work import Work, fail
from phalanx.core import ANY_RANK, PhalanxError


class Messages(Collectives):
    """The messages of a process group in Python."""

    @checked
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> AnyWork:
        return self._message("send", tensors, peer, tag)

    @checked
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> AnyWork:
        return self._message("recv", tensors, peer, tag)

    @checked
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AnyWork:
        return self._message("recv_anysource", tensors, ANY_RANK, tag)

    def _message(self, what: str, tensors: Tensors, peer: int, tag: int) -> AnyWork:
        tensor = only(tensors, what)
        if tag < 0:
            raise ValueError(f"{what}: the tag {tag} is negative")
        if peer < 0 and what != "recv_anysource":
            raise ValueError(f"{what}: {peer} is no rank")
        if peer >= self._count:
            raise ValueError(f"{what}: rank {peer} is not in the group, whose size is {self._count}")
        if not tensor.is_cpu:
            return self._message_of_gpu(what, tensor, peer, tag)
        self._thread.core_was_called = True
        timeout_ms = self._timeout_ms
        group = self._engine.group(timeout_ms, what)
        self._engine.sweep()
        buffers, (count, dtype) = Buffers(tensors), elements_of(tensor)
        work = Work(self._engine, what, buffers, timeout_ms, self._sequence, receives=what != "send")
        data = buffers.readable(tensor) if what == "send" else buffers.writable(tensor)
        call: Any = group.send if what == "send" else group.recv
        more = {"tag": tag, "timeout_ms": timeout_ms, "blocking": False, **self._kept(buffers)}
        try:
            made = call(data, peer, count, dtype, **more)
        except PhalanxError as error:
            fail(what, error)
        self._begin(work, made)
        return work

    def _message_of_gpu(self, what: str, tensor: torch.Tensor, peer: int, tag: int) -> AnyWork:
        """On a stream of its own for each rank and direction, so that what is computed meanwhile does not wait."""
        if what == "recv_anysource":
            raise NotImplementedError(f"{what}: a receive into memory of a GPU names the rank it is from")
        buffers, (count, dtype) = Buffers([tensor]), elements_of(tensor)
        data = buffers.readable(tensor) if what == "send" else buffers.writable(tensor)

        def call(group: Any, more: dict[str, Any]) -> None:
            there = {key: more[key] for key in ("timeout_ms", "device", "stream")}
            (group.send if what == "send" else group.recv)(data, peer, count, dtype, tag=tag, **there)
            buffers.used_on(torch.cuda.current_stream(tensor.device))

        with self._beside.stream(tensor.device, (what, peer)):
            return self._put_on_stream(what, None, buffers, call, tensor.device)
