"""One exception class per status of the C core, with everything the core knows about the failure."""

from typing import Any, NoReturn

from phalanx.core import _callbacks, interrupts


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

    status: int
    rank: int
    peer: int
    sequence: int
    step: int
    sys_errno: int
    operation: str
    group: str

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
        return _NAMES.get(self.status, f"status {self.status}")

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


class InvalidArgumentError(PhalanxError, ValueError):
    """An argument is wrong; nothing was sent, and the group works on."""

    _status = -1


class UnsupportedError(PhalanxError, NotImplementedError):
    """The call is right, but not something this build, host or group can do."""

    _status = -2


class OutOfMemoryError(PhalanxError, MemoryError):
    """Memory could not be allocated or mapped."""

    _status = -3


class WaitTimeoutError(PhalanxError, TimeoutError):
    """Peers did not come in time; the text names them."""

    _status = -4


class PeerDeadError(PhalanxError, ConnectionError):
    """A peer died or left; `peer` says which."""

    _status = -5


class RevokedError(PhalanxError):
    """An earlier failure put the ranks of the group out of step; the text gives the first cause."""

    _status = -6


class MismatchError(PhalanxError):
    """Ranks disagree about a call; the text gives both sides."""

    _status = -7


class AlreadyExistsError(PhalanxError):
    """What was to be made is there already."""

    _status = -8


class NotFoundError(PhalanxError, LookupError):
    """What was asked for is not there."""

    _status = -9


class InUseError(PhalanxError):
    """What was to be taken or dropped is still in use."""

    _status = -10


class SystemCallError(PhalanxError, OSError):
    """An operating system call failed; `sys_errno` says how."""

    _status = -11


class DeviceError(PhalanxError):
    """An accelerator or its driver failed."""

    _status = -12


class AbiError(PhalanxError):
    """The two sides were built from headers that do not fit."""

    _status = -13


class AccessDeniedError(PhalanxError, PermissionError):
    """The other side is another user, or gave a wrong token."""

    _status = -14


class InternalError(PhalanxError):
    """A defect of Phalanx: please report it."""

    _status = -15


class WaitInterruptedError(PhalanxError, InterruptedError):
    """A signal handler, such as that of Ctrl-C, has ended an earlier wait for the same work.

    The call that was interrupted raises what the handler raised: `KeyboardInterrupt` for Ctrl-C.
    """

    _status = -16


_NAMES = {
    0: "PHX_OK",
    1: "PHX_IN_PROGRESS",
    -1: "PHX_ERR_INVALID",
    -2: "PHX_ERR_UNSUPPORTED",
    -3: "PHX_ERR_NO_MEMORY",
    -4: "PHX_ERR_TIMEOUT",
    -5: "PHX_ERR_PEER_DEAD",
    -6: "PHX_ERR_REVOKED",
    -7: "PHX_ERR_MISMATCH",
    -8: "PHX_ERR_EXISTS",
    -9: "PHX_ERR_NOT_FOUND",
    -10: "PHX_ERR_IN_USE",
    -11: "PHX_ERR_SYSTEM",
    -12: "PHX_ERR_DEVICE",
    -13: "PHX_ERR_ABI",
    -14: "PHX_ERR_PERMISSION",
    -15: "PHX_ERR_INTERNAL",
    -16: "PHX_ERR_INTERRUPTED",
}

_CLASSES: dict[int, type[PhalanxError]] = {
    cls._status: cls
    for cls in (
        InvalidArgumentError,
        UnsupportedError,
        OutOfMemoryError,
        WaitTimeoutError,
        PeerDeadError,
        RevokedError,
        MismatchError,
        AlreadyExistsError,
        NotFoundError,
        InUseError,
        SystemCallError,
        DeviceError,
        AbiError,
        AccessDeniedError,
        InternalError,
        WaitInterruptedError,
    )
}


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


def new_info() -> Any:
    """An empty phx_error_info with its struct_size set."""
    from phalanx.core._lib import ffi

    info = ffi.new("phx_error_info *")
    info.struct_size = ffi.sizeof("phx_error_info")
    return info


def raise_last(status: int | None = None) -> NoReturn:
    """Raise this thread's last error, or what a signal handler raised while this thread waited.

    The exception of a Python callback that led to it becomes its cause.

    Args:
        status: What the call returned; None for calls that return a pointer.
    """
    from phalanx.core._lib import lib

    interruption = interrupts.take()
    if interruption is not None:
        raise interruption
    info = new_info()
    known = lib.phx_last_error_info(info) == 0
    if status is None:
        status = int(info.status)
    if not known or info.status != status:
        name = _NAMES.get(status, "an unknown status")
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
