"""One exception class per status of the C core, with everything the core knows about the failure."""

from collections.abc import Callable
from typing import Any, NoReturn

from phalanx.core import _callbacks, interrupts

_CLASSES: dict[int, type["PhalanxError"]] = {}  # by status


class PhalanxError(RuntimeError):
    """A failed call of the core. The subclasses also derive from the builtin that fits.

    Attributes:
        status: A PHX_ERR_* number.
        status_name: Its name, such as "PHX_ERR_TIMEOUT".
        rank: The rank that reports, -1 when unknown.
        peer: The rank at fault, -1 when unknown or none.
        sequence: Number of the collective in its group, 0 when none.
        step: The round inside the collective.
        sys_errno: The errno of the system call that failed, 0 when none did.
        operation: What was called, such as "all_reduce".
        group: Name of the group, "" when none.
    """

    _status = -15

    def __init_subclass__(cls, status: int | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if status is not None:
            cls._status = status
            _CLASSES[status] = cls

    def __init__(
        self,
        text: str = "",
        *,
        status: int | None = None,
        rank: int = -1,
        peer: int = -1,
        sequence: int = 0,
        step: int = 0,
        sys_errno: int = 0,
        operation: str = "",
        group: str = "",
    ) -> None:
        super().__init__(text)
        self.status = type(self)._status if status is None else status
        self.rank = rank
        self.peer = peer
        self.sequence = sequence
        self.step = step
        self.sys_errno = sys_errno
        self.operation = operation
        self.group = group
        this: object = self
        if isinstance(this, OSError):
            this.errno = sys_errno or None

    @property
    def status_name(self) -> str:
        """Name of the status, such as "PHX_ERR_TIMEOUT"."""
        return _name_of(self.status, f"status {self.status}")

    def __str__(self) -> str:
        # OSError, a base of some subclasses, would print errno instead.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own would lose the fields; its errno is not in __dict__.
        state = dict(self.__dict__)
        this: object = self
        if isinstance(this, OSError):
            state["errno"] = this.errno
        return type(self), self.args, state


class InvalidArgumentError(PhalanxError, ValueError, status=-1):
    """An argument is wrong; nothing was sent, and the group works on."""


class UnsupportedError(PhalanxError, NotImplementedError, status=-2):
    """The call is right, but not something this build, host or group can do."""


class OutOfMemoryError(PhalanxError, MemoryError, status=-3):
    """Memory could not be allocated or mapped."""


class WaitTimeoutError(PhalanxError, TimeoutError, status=-4):
    """Peers did not come in time; the text names them."""


class PeerDeadError(PhalanxError, ConnectionError, status=-5):
    """A peer died or left; `peer` says which."""


class RevokedError(PhalanxError, status=-6):
    """An earlier failure put the ranks of the group out of step; the text gives the first cause."""


class MismatchError(PhalanxError, status=-7):
    """Ranks disagree about a call; the text gives both sides."""


class AlreadyExistsError(PhalanxError, status=-8):
    """What was to be made is there already."""


class NotFoundError(PhalanxError, LookupError, status=-9):
    """What was asked for is not there."""


class InUseError(PhalanxError, status=-10):
    """What was to be taken or dropped is still in use."""


class SystemCallError(PhalanxError, OSError, status=-11):
    """An operating system call failed; `sys_errno` says how."""


class DeviceError(PhalanxError, status=-12):
    """An accelerator or its driver failed."""


class AbiError(PhalanxError, status=-13):
    """The two sides were built from headers that do not fit."""


class AccessDeniedError(PhalanxError, PermissionError, status=-14):
    """The other side is another user, or gave a wrong token."""


class InternalError(PhalanxError, status=-15):
    """A defect of Phalanx: please report it."""


class WaitInterruptedError(PhalanxError, InterruptedError, status=-16):
    """A signal handler, such as that of Ctrl-C, has ended an earlier wait for the same work.

    The call that was interrupted raises what the handler raised: `KeyboardInterrupt` for Ctrl-C.
    """


def _name_of(status: int, otherwise: str) -> str:
    from phalanx.core._lib import ffi, lib

    name = str(ffi.string(lib.phx_status_name(status)).decode())
    return name if name.startswith("PHX_") else otherwise


def error_from_info(info: Any) -> PhalanxError:
    """Make the exception that a filled phx_error_info (or a pointer to one) describes."""
    from phalanx.core._lib import ffi

    def text(field: Any) -> str:
        return str(ffi.string(field).decode("utf-8", "replace"))

    cls = _CLASSES.get(info.status, PhalanxError)
    return cls(
        text(info.text),
        status=info.status,
        rank=info.rank,
        peer=info.peer,
        sequence=info.sequence,
        step=info.step,
        sys_errno=info.sys_errno,
        operation=text(info.operation),
        group=text(info.group),
    )


def error_from_status(status: int, text: str) -> PhalanxError:
    """Make the exception of a status of which only a text is known."""
    return _CLASSES.get(status, PhalanxError)(text, status=status)


def stored_error(get: Callable[[Any, Any], int], pointer: Any) -> PhalanxError | None:
    """What phx_group_get_error or phx_work_get_error says of a group or work; None while nothing has failed."""
    from phalanx.core._lib import new_struct

    info = new_struct("phx_error_info")
    return error_from_info(info) if found(get(pointer, info)) else None


def raise_last(status: int | None = None) -> NoReturn:
    """Raise this thread's last error, or what a signal handler raised while this thread waited.

    The exception of a Python callback that led to it becomes its cause.

    Args:
        status: What the call returned; None for calls that return a pointer.
    """
    from phalanx.core._lib import lib, new_struct

    interruption = interrupts.take()
    if interruption is not None:
        raise interruption
    info = new_struct("phx_error_info")
    known = lib.phx_last_error_info(info) == 0
    if status is None:
        status = int(info.status)
    if not known or info.status != status:
        name = _name_of(status, "an unknown status")
        raise error_from_status(status, f"the core returned {name} ({status}) without saying why")
    raise error_from_info(info) from _callbacks.take_exception(status)


def check(status: int) -> int:
    """Turn a status into an exception.

    Args:
        status: What a phx_* function returned on this thread, as its last call.

    Returns:
        The status when it is not an error: 0, or 1 for "not yet".

    Raises:
        PhalanxError: The subclass that fits the status.
        BaseException: What a signal handler raised while this thread waited, such as KeyboardInterrupt.

    Example:
        >>> check(lib.phx_world_check(world.pointer))
        0
    """
    if status < 0:
        raise_last(status)
    if interrupts.kept:  # what was waited for has come all the same
        interruption = interrupts.take()
        if interruption is not None:
            raise interruption
    return status


def found(status: int) -> bool:
    """`check` for a call that looks for something: whether it is there."""
    if status == NotFoundError._status:
        return False
    check(status)
    return True
