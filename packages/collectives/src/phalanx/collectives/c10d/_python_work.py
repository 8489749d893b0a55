"""Works of the backend in Python, and the threads that complete their futures. As work.cpp and engine.cpp."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist

from phalanx.collectives.c10d import _torch_compat
from phalanx.collectives.c10d._connect import Connection
from phalanx.collectives.c10d._python_tensors import Buffers
from phalanx.core import Group, InvalidArgumentError, PeerDeadError, PhalanxError, UnsupportedError
from phalanx.core import Work as CoreWork
from phalanx.core.timeouts import milliseconds

CHANNEL = 1  # see engine.h
_TELLING_MS = 10000  # what a refused call waits for ranks that have not met
_DRAIN_S = 5.0  # what close waits for peers
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.0005
_IDLE_THREADS = 2  # more end when they have nothing to do
_SWEPT = 8  # works that a call looks at, in case their owners dropped them


def named(what: str, text: str) -> str:
    """The text of an error of the core, which begins with the name of what was called through torch."""
    return text if text.startswith(what) else f"{what}: {text}"


def translated(what: str, error: PhalanxError) -> Exception:
    """An error of the core as torch.distributed has it."""
    if isinstance(error, InvalidArgumentError):
        return InvalidArgumentError(named(what, str(error)))
    if isinstance(error, UnsupportedError):
        return NotImplementedError(named(what, str(error)))
    return dist.DistBackendError(named(what, str(error)))


def fail(what: str, error: PhalanxError) -> NoReturn:
    """Raise an error of the core as torch.distributed has it."""
    raise translated(what, error) from error


class Work(_torch_compat.WorkBase):  # type: ignore[misc]
    """What was started. Complete when somebody waits or asks, or, once it has a future, by a thread of the engine.

    Args:
        engine: Of the group.
        what: Torch's name of the call.
        buffers: What it reads and writes.
        timeout_ms: Of its wait.
        sequence: Its number in the group.
        receives: Whether it completes only when a peer decides to send.
    """

    def __init__(
        self, engine: "Engine", what: str, buffers: Buffers, timeout_ms: int, sequence: int, receives: bool = False
    ) -> None:
        super().__init__()
        self._engine = engine
        self._what = what
        self._buffers = buffers
        self._timeout_ms = timeout_ms
        self._deadline = time.monotonic() + timeout_ms / 1000
        self._sequence = sequence
        self._receives = receives
        self._lock = threading.Lock()
        self._core: CoreWork | None = None
        self._error: Exception | None = None
        self._source = -1
        self._future: Any = None
        self._done = False

    def started(self, core: CoreWork) -> None:
        """Once, with what the core started."""
        self._core = core

    def completed(self) -> None:
        """Or it was complete at once."""
        self._settle(None)

    def _settle(self, error: PhalanxError | None) -> None:
        with self._lock:
            if self._done:
                return
            self._error = None if error is None else translated(self._what, error)
            if error is None:
                try:
                    self._buffers.finish()
                except Exception as problem:
                    self._error = problem
                if self._core is not None:
                    with suppress(PhalanxError):
                        self._source = self._core.source()
            self._core = None
            self._done = True
            future = self._future
        self._engine.remove(self)
        if future is not None:
            self._mark(future)

    def _mark(self, future: Any) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._buffers.outputs)

    def _ask(self, call: Callable[[CoreWork], bool | None]) -> bool:
        core = self._core
        if core is not None:
            try:
                if call(core) is False:
                    return False
            except PhalanxError as error:
                self._settle(error)
            else:
                self._settle(None)
        return self._done

    def is_over(self) -> bool:
        """Whether it is complete, successfully or not, or its time is over: then `poll` completes it."""
        core = self._core
        if core is None:
            return self._done
        try:
            return core.test() or time.monotonic() >= self._deadline
        except PhalanxError:
            return True

    def poll(self) -> bool:
        """Ask the core. Returns whether it is complete, successfully or not; then callbacks of its future have run."""
        if self._ask(lambda core: core.test()):
            return True
        return time.monotonic() >= self._deadline and self._ask(lambda core: core.expire(self._timeout_ms))

    def drain(self, until: float, failed: bool) -> None:
        """For the end of the group: wait until then, at most. `failed`: the group has failed, and so will this."""
        left_ms = 1000 if failed else int((until - time.monotonic()) * 1000)
        if failed or (left_ms > 0 and not self._receives):
            self._ask(lambda core: core.wait(left_ms))
        else:
            self._ask(lambda core: core.test())

    # ---- as torch.distributed.Work ------------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        limit_ms = milliseconds(timeout) if timeout else self._timeout_ms  # zero is torch's kNoTimeout
        self._ask(lambda core: core.wait(limit_ms))
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    @property
    def has_future(self) -> bool:
        """Whether a thread of the engine completes it, and runs the callbacks of the future."""
        return self._future is not None

    def is_completed(self) -> bool:
        return self._done or (not self.has_future and self.poll())

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self._done else None

    def result(self) -> list[Any]:
        return self._buffers.outputs

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def abort(self) -> None:
        self._engine.abort("a work was aborted")

    def get_future(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = _torch_compat.new_future()
            done = self._done
        if done:
            self._mark(self._future)
        else:
            self._engine.watch(self)
        return self._future

    def get_future_result(self) -> Any:
        return self.get_future().then(lambda done: 2 if self._error is not None else 0)  # numbers of c10d::WorkResult

    def _get_sequencenumber(self) -> int:
        return self._sequence


class Batch(_torch_compat.WorkBase):  # type: ignore[misc]
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Any]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        import torch

        return torch.futures.collect_all([work.get_future() for work in self._works])


class Engine:
    """What a group and its works share. After `close` it holds nothing of the core.

    Args:
        connection: Where the core's group comes from.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way: dict[int, Work] = {}
        # Threads that complete the futures of watched works. One of them at a time looks at the works; the others run
        # callbacks or are idle. So a callback may wait for another future, or take long, and holds up nobody.
        self._watched: list[Work] = []
        self._threads: list[threading.Thread] = []
        self._looking = self._called = False  # one of them looks; one will, because it was woken or begun
        self._idle = 0
        self._closed = False
        self._aborted = ""
        self._untold: list[str] = []  # refusals before the ranks met

    def group(self, timeout_ms: int, what: str) -> Group:
        """The core's group; meets the others at the first call.

        Raises:
            DistBackendError: They did not come, or this was closed.
        """
        if self._closed:
            end = f"aborted: {self._aborted}" if self._aborted else "destroyed"
            raise dist.DistBackendError(f"group '{self.connection.name}' was {end}. Make a new group.")
        try:
            group = self.connection.group(timeout_ms)
        except PhalanxError as error:
            fail(what, error)
        self._tell(group)
        return group

    def refuse(self, why: str, timeout_ms: int) -> None:
        """Stand for a collective whose arguments were wrong on this rank. As in engine.h. Raises nothing."""
        if self._closed or self._pid != os.getpid() or self.connection.spans_hosts:
            return
        with self._lock:
            self._untold.append(why)
        with suppress(PhalanxError):  # the caller raises what was wrong with the call
            self._tell(self.connection.group(min(timeout_ms, _TELLING_MS)))

    def _tell(self, group: Group) -> None:
        with self._lock:
            untold, self._untold = self._untold, []
        for why in untold:
            with suppress(PhalanxError):
                group.refuse(why, CHANNEL)

    def check(self, what: str) -> None:
        """Raise what has ended the group, if anything has, but for a peer that is gone: it may have gone after what is
        asked about, and the next call says so."""
        group = self.connection.known()
        error = None if group is None else group.error()
        if error is not None and not isinstance(error, PeerDeadError):
            fail(what, error)

    def add(self, work: Work) -> None:
        with self._lock:
            self._under_way[id(work)] = work

    def remove(self, work: Work) -> None:
        with self._lock:
            self._under_way.pop(id(work), None)

    def _works(self) -> list[Work]:
        with self._lock:
            return list(self._under_way.values())

    def sweep(self) -> None:
        """Let go of works that are complete, if nobody else asks for them."""
        looked_at = []
        with self._lock:
            for _ in range(min(_SWEPT, len(self._under_way))):  # in turn
                key = next(iter(self._under_way))
                self._under_way[key] = self._under_way.pop(key)
                looked_at.append(self._under_way[key])
        for work in looked_at:
            if not work.has_future:
                work.poll()

    def watch(self, work: Work) -> None:
        with self._lock:
            self._watched.append(work)
            self._ensure_looked_at()

    def _ensure_looked_at(self) -> None:
        """With the lock held: if nobody looks at the watched works, an idle thread does from now on, or a new one."""
        if self._looking or self._called or not self._watched:
            return
        self._called = True
        if self._idle:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._run, name="phalanx_futures", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        # The thread that finds a work complete lets another one look at the rest before it completes the future,
        # because that runs the callbacks of the user.
        while True:
            with self._lock:
                self._called = False
                while self._looking or not self._watched:
                    if self._closed or self._idle >= _IDLE_THREADS:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    self._called = False
                self._looking = True
            complete = self._look_for_complete()
            with self._lock:
                self._looking = False
                self._watched.remove(complete)
                self._ensure_looked_at()
            complete.poll()

    def _look_for_complete(self) -> Work:
        """Look at the watched works, and move them on, until one is complete. Waits for none of them: a wait would keep
        other threads from starting collectives."""
        pause = _SHORTEST_PAUSE_S
        while True:
            with self._lock:
                watched = list(self._watched)
            for work in watched:
                if work.is_over():
                    return work
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def abort(self, reason: str) -> None:
        """Every call that waits, in any thread and on any rank, ends with this reason. Then as close."""
        if self._pid != os.getpid():  # in a forked child, nothing
            return
        self._aborted = self._aborted or reason
        group = self.connection.known()
        if group is not None and not self._closed:
            group.revoke(reason)
        self.close()

    def close(self) -> None:
        """Complete what is under way, or fail it if peers take longer than some seconds. In a forked child, nothing."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + _DRAIN_S
        for work in self._works():
            work.drain(until, False)
        group = self.connection.known()
        if group is not None and (left := self._works()):
            # The core must not write their buffers any more when they are gone.
            group.revoke(f"a rank destroyed group '{self.connection.name}' while it had works under way")
            for work in left:
                work.drain(until, True)
        with self._lock:
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self.connection.close()
