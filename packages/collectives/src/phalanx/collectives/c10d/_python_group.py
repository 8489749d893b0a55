"""The backend as a process group in Python, for where there is no compiler, and for several hosts. As backend.cpp.

Torch 2.13 lets no Python class be a Backend; a ProcessGroup can be one.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.c10d._python_base import Tensors, checked
from phalanx.collectives.c10d._python_messages import Messages
from phalanx.collectives.c10d._python_stream import AnyWork, StreamWork
from phalanx.collectives.c10d._python_tensors import Buffers, check_tensor, elements_of
from phalanx.collectives.c10d._torch_compat import UNSET, options
from phalanx.core.timeouts import milliseconds, timed_out

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_DELAY_S = 2.0  # what an answer may take that was given in time


class PythonGroup(Messages):
    """A process group of the backend `phalanx`: exchanges, barriers, messages, and the collectives."""

    # ---- exchanges ----------------------------------------------------------------------------------

    @checked
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> AnyWork:
        what, opts = "all_to_all_single", opts or options.AllToAllOptions()
        check_tensor(output, what)
        check_tensor(tensor, what, output)
        out_counts = self._split_counts(output, output_splits, "output")
        in_counts = self._split_counts(tensor, input_splits, "input")
        buffers = Buffers([output])
        out = buffers.writable(output)
        source = buffers.apart(buffers.readable(tensor), tensor.nbytes, out, output.nbytes)
        dtype = elements_of(tensor).dtype
        return self._issue(
            what,
            opts,
            buffers,
            lambda group, more: group.all_to_all_v(source, in_counts, out, out_counts, dtype, **more),
        )

    alltoall_base = all_to_all_single

    def _split_counts(self, tensor: torch.Tensor, splits: Sequence[int], side: str) -> list[int]:
        what = "all_to_all_single"
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        given = list(splits)
        if not given:
            if rows % self._count:
                raise ValueError(f"{what}: dim 0 of the {side} ({rows}) is no multiple of the group size {self._count}")
            given = [rows // self._count] * self._count
        self._check_list(given, what)
        if min(given) < 0:
            raise ValueError(f"{what}: a split of the {side} is negative")
        if sum(given) != rows:
            raise ValueError(f"{what}: the splits of the {side} add up to {sum(given)}, and its dim 0 is {rows}")
        per_row = tensor.numel() // rows if rows else 0
        return [elements_of(tensor, split * per_row).numel for split in given]

    @checked
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        what, opts = "all_to_all", opts or options.AllToAllOptions()
        for tensors in (outputs, inputs):
            self._check_list(tensors, what)
            for each in tensors:
                check_tensor(each, what, outputs[0])
        out_counts = [elements_of(each).numel for each in outputs]
        in_counts = [elements_of(each).numel for each in inputs]
        buffers = Buffers(outputs)
        out, dtype = buffers.all_writable(outputs), elements_of(outputs[0]).dtype
        in_bytes, out_bytes = (sum(each.nbytes for each in tensors) for tensors in (inputs, outputs))
        source = buffers.apart(buffers.all_readable(inputs), in_bytes, out, out_bytes)
        return self._issue(
            what,
            opts,
            buffers,
            lambda group, more: group.all_to_all_v(source, in_counts, out, out_counts, dtype, **more),
        )

    # ---- barriers -----------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> AnyWork:
        opts = opts or options.BarrierOptions()
        if opts.device is not None and opts.device.type == "cuda":
            return self._barrier_of_streams(opts)
        buffers = Buffers()
        data = buffers.writable(torch.zeros(1, dtype=torch.uint8), read_too=True)
        return self._issue(
            "barrier", opts, buffers, lambda group, more: group.all_reduce(data, data, 1, "uint8", "sum", **more)
        )

    def _barrier_of_streams(self, opts: Any) -> StreamWork:
        index = torch.cuda.current_device() if opts.device.index is None else opts.device.index
        device = torch.device("cuda", index)

        def call(group: Any, more: dict[str, Any]) -> None:
            group.barrier(more["timeout_ms"], device=more["device"], stream=more["stream"])

        return self._put_on_stream("barrier", opts, Buffers(), call, device)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Through the store, so that the group is no worse for a rank that does not come.

        The errors have the phrases of gloo's, which programs look for.
        """
        timeout_ms = self._timeout_ms if timeout is None or timeout == UNSET else milliseconds(timeout)
        over = timed_out(timeout_ms, self._timeout_ms)
        connection = self._engine.connection
        about, ranks = f"monitored_barrier on group '{connection.name}'", connection.ranks
        reached = (
            f"Rank {ranks[self._position]} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank {ranks[0]}: "
        )

        def failed(late: list[str]) -> str:
            names = f"Ranks {', '.join(late)}" if wait_all_ranks else f"Rank {late[0]}"
            return f"{names} failed to pass monitoredBarrier"

        try:
            self._engine.group(timeout_ms, "monitored_barrier")
        except dist.DistBackendError as error:  # the ranks have not met
            late = re.search(r" still waits for rank\(s\) ([\d, ]+) to ", str(error))  # see _meeting.py
            if late is None:
                raise
            about = f"Rank {ranks[0]} timed out in monitoredBarrier: {failed(late[1].split(', '))}: "
            raise dist.DistBackendError(f"{reached if self._position else about}{error}") from error
        everything = f"monitored_barrier/{connection.token}/"
        number, self._monitored = self._monitored, self._monitored + 1
        base = f"{everything}{number}/"
        deadline = time.monotonic() + timeout_ms / 1000

        def came(key: str, until: float) -> bool:
            pause_s = _FIRST_PAUSE_S
            while not self._store.check([base + key]):
                if time.monotonic() >= until:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            return True

        self._store.set(f"{base}{self._position}", "here")
        if self._position != 0:
            # Rank 0 answers when it has waited as long as it may.
            answer = f"{about}: {over}: rank {ranks[0]} did not reach or end it"
            if came("0", deadline) and came("answer", time.monotonic() + timeout_ms / 1000 + _DELAY_S):
                answer = bytes(self._store.get(f"{base}answer")).decode()
            if answer == "all":
                return
            raise dist.DistBackendError(reached + answer)
        missing: list[str] = []
        for position in range(1, self._count):
            if (wait_all_ranks or not missing) and not came(str(position), deadline):
                missing.append(str(ranks[position]))
        answer = f"{about}: {over}: {failed(missing)}" if missing else "all"
        self._store.set(f"{base}answer", answer)
        if missing:
            raise dist.DistBackendError(answer)
        with suppress(RuntimeError):  # not every store can
            for position in range(1, self._count):
                self._store.delete_key(f"{base}{position}")
            if number > 0:  # all have read them
                self._store.delete_key(f"{everything}{number - 1}/0")
                self._store.delete_key(f"{everything}{number - 1}/answer")
