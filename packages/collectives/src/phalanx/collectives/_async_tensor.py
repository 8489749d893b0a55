"""AsyncCollectiveTensor: the result of a collective that may still be on its way."""

import copy
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from phalanx.collectives import _errors, _library, _native, _torch_compat
from phalanx.collectives._bootstrap import in_group_creation
from phalanx.core import UnsupportedError

log = logging.getLogger("phalanx.collectives")

_make = _torch_compat.make_wrapper


def wait_plain(tensor: torch.Tensor) -> None:
    """Wait for all work on the storage of a plain CPU tensor."""
    _wait_plain(tensor)


def _first_wait(tensor: torch.Tensor) -> None:
    global _wait_plain, needs_gradient
    compiled = _native.loaded()
    if compiled is not None:
        _wait_plain, needs_gradient = compiled.wait, compiled.needs_gradient
    else:
        _wait_plain = partial(_torch_compat.kernel_call(torch.ops.phalanx.wait_tensor.default), _torch_compat.CPU_KEY)
    _wait_plain(tensor)


_wait_plain: Callable[[torch.Tensor], Any] = _first_wait


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


# Whether what is made of a tensor now gets a gradient. (`requires_grad` of a subclass takes Python 0.1 us.)
needs_gradient: Callable[[torch.Tensor], bool] = _needs_gradient


def _wait(tensor: torch.Tensor) -> None:
    """Wait for all work on the storage of any tensor."""
    with torch.no_grad():
        torch.ops.phalanx.wait_tensor(tensor)


class AsyncCollectiveTensor(torch.Tensor):
    """A tensor that waits for its collective when it is used first.

    It has the sizes, strides, dtype and device of the result, and no memory of its own. Any operation on it waits, and
    works on (and gives) ordinary tensors; only views of it stay pending. If the collective failed, its error is raised
    at the first use, and at each later one. A result that is dropped without a use is waited for.

    As the class of this name in torch.distributed._functional_collectives.

    Args:
        elem: An ordinary tensor that a collective is writing.

    Attributes:
        elem: The ordinary tensor; not to be read before the wait.

    Example:
        >>> y = all_reduce(torch.ones(2), "sum", group)
        >>> type(y).__name__, y.completed, type(y + 1).__name__, y.completed
        ('AsyncCollectiveTensor', False, 'Tensor', True)
    """

    # True: complete. None: pending, elem is a plain CPU tensor. False: pending, elem is any tensor. A pending tensor:
    # this is a view of it. An exception: what the wait raised.
    __slots__ = ("_state", "elem")
    elem: torch.Tensor
    _state: Any

    __torch_function__ = _torch_compat.disabled_torch_function

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> "AsyncCollectiveTensor":
        if not _is_pending(elem):
            warnings.warn(
                "AsyncCollectiveTensor: no collective is pending on this tensor; it was waited for, or is not the "
                "result of a collective",
                stacklevel=2,
            )
        return wrap(elem)

    @property
    def completed(self) -> bool:
        """Whether a wait for it succeeded."""
        return self._state is True

    def trigger_wait(self) -> torch.Tensor:
        """Wait, if need be, and give the ordinary tensor. A later call returns at once.

        Raises:
            PhalanxError: The collective failed; the text names it, its group and its number.
        """
        state = self._state
        if state is True:
            return self.elem
        try:
            if state is None:
                _wait_plain(self.elem)
            elif state is False:
                _wait(self.elem)
            elif isinstance(state, AsyncCollectiveTensor):
                state.trigger_wait()
            else:
                raise state.with_traceback(None)
        except Exception as error:
            better = _errors.better(error)
            if isinstance(better, Exception):  # not Ctrl-C: the core then has an error of its own for the next wait
                self._state = better
            raise better from None
        self._state = True
        return self.elem

    wait = trigger_wait  # torch has both names

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        view = _views.get(func)
        if view is None:
            view = _views[func] = _torch_compat.is_view(func)
        if view and type(args[0]) is cls:
            state = args[0]._state
            if state is not True and not isinstance(state, BaseException):
                root = state if isinstance(state, AsyncCollectiveTensor) else args[0]
                return _as_views(func(args[0].elem, *_ready(args[1:]), **_ready(kwargs or {})), root)
        ready = [each.trigger_wait() if type(each) is cls else _ready(each) for each in args]
        return func(*ready, **_ready(kwargs)) if kwargs else func(*ready)

    def __del__(self) -> None:
        state = getattr(self, "_state", True)
        if state is True or (state is not None and state is not False) or sys.is_finalizing():
            return
        if in_group_creation():  # a garbage collection in a callback of the core
            return
        try:
            self.trigger_wait()
        except UnsupportedError:  # this is a forked child, and the collective is its parent's
            return
        except Exception as error:  # nobody is there to catch it; the group raises it at its next use
            log.warning("a collective failed whose result was dropped: %s", error)

    # ---- what reads memory without an operation -----------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        self._refuse_gradient(not force)
        return self.trigger_wait().numpy(force=force)

    def tolist(self) -> Any:
        return self.trigger_wait().tolist()

    def data_ptr(self) -> int:
        return self.trigger_wait().data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_gradient(True)
        return self.trigger_wait().__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.elem.__dlpack_device__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.trigger_wait()
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.trigger_wait(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AsyncCollectiveTensor({self.trigger_wait()})"

    def _refuse_gradient(self, refuse: bool) -> None:
        if refuse and self.requires_grad:  # as an ordinary tensor does
            raise RuntimeError("Can't export memory of a tensor that requires grad. Use tensor.detach() first.")

    # ---- torch.compile ------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Any:
        return wrap(inner["elem"])

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected_type: type | None = None) -> Any:
        return self.trigger_wait() if expected_type is torch.Tensor else None


_views: dict[Any, bool] = {}  # by aten op


def _ready(value: Any) -> Any:
    """The same arguments with every pending tensor waited for."""
    kind = type(value)
    if kind is AsyncCollectiveTensor:
        return value.trigger_wait()
    if isinstance(value, (list, tuple)):
        if not any(isinstance(each, (torch.Tensor, list, tuple)) for each in value):
            return value
        return [_ready(each) for each in value] if isinstance(value, list) else tuple(_ready(each) for each in value)
    if kind is dict:
        return {key: _ready(each) for key, each in value.items()}
    return value


def _as_views(result: Any, root: AsyncCollectiveTensor) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result, root)
    return type(result)(_as_views(each, root) for each in result)


def _is_pending(elem: torch.Tensor) -> bool:
    if _torch_compat.is_tracing() or _torch_compat.registered_work_count():
        return True
    ops = _library.loaded()
    storage = ops.ffi.cast("void *", elem.untyped_storage().data_ptr())
    return bool(ops.lib.phxt_pending_has(storage))


def start(elem: torch.Tensor) -> AsyncCollectiveTensor:
    """Wrap a contiguous CPU tensor that starts at the beginning of its storage: the result of a native op."""
    made: AsyncCollectiveTensor = _make(AsyncCollectiveTensor, elem.size(), None, None, None, elem.dtype)
    made.elem = elem
    made._state = None
    return made


def wrap(elem: torch.Tensor, state: AsyncCollectiveTensor | Literal[False] = False) -> AsyncCollectiveTensor:
    """Wrap any tensor that is still being written, as a view of a pending one if that is given."""
    made: AsyncCollectiveTensor = _make(
        AsyncCollectiveTensor,
        elem.size(),
        strides=elem.stride(),
        storage_offset=elem.storage_offset(),
        dtype=elem.dtype,
        layout=elem.layout,
        device=elem.device,
        requires_grad=elem.requires_grad,
    )
    made.elem = elem
    made._state = state
    return made


class WaitHandle(AsyncCollectiveTensor):
    """The state that pending results share: as views of one tensor, they wait together."""

    __slots__ = ("settle",)
    settle: Callable[[], Any]

    @staticmethod
    def of(settle: Callable[[], Any]) -> "WaitHandle":
        """The handle of results that are there when `settle` returns."""
        elem = torch.empty(0)
        made: WaitHandle = _make(WaitHandle, elem.size(), None, None, None, elem.dtype)
        made.elem, made.settle, made._state = elem, settle, True
        return made

    def trigger_wait(self) -> torch.Tensor:
        self.settle()
        return self.elem
