"""Exceptions: one class per status, each also the builtin that fits, with all that the core knows."""

import concurrent.futures
import copy
import multiprocessing
import pickle

import pytest

from phalanx.core import (
    AbiError,
    AccessDeniedError,
    AlreadyExistsError,
    DeviceError,
    InternalError,
    InUseError,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    OutOfMemoryError,
    PeerDeadError,
    PhalanxError,
    RevokedError,
    SystemCallError,
    UnsupportedError,
    WaitTimeoutError,
    check,
    ffi,
    lib,
)

# Written by hand from phalanx.h, and compared with the library below.
CLASSES = [
    (-1, "PHX_ERR_INVALID", InvalidArgumentError, ValueError),
    (-2, "PHX_ERR_UNSUPPORTED", UnsupportedError, NotImplementedError),
    (-3, "PHX_ERR_NO_MEMORY", OutOfMemoryError, MemoryError),
    (-4, "PHX_ERR_TIMEOUT", WaitTimeoutError, TimeoutError),
    (-5, "PHX_ERR_PEER_DEAD", PeerDeadError, ConnectionError),
    (-6, "PHX_ERR_REVOKED", RevokedError, RuntimeError),
    (-7, "PHX_ERR_MISMATCH", MismatchError, RuntimeError),
    (-8, "PHX_ERR_EXISTS", AlreadyExistsError, RuntimeError),
    (-9, "PHX_ERR_NOT_FOUND", NotFoundError, LookupError),
    (-10, "PHX_ERR_IN_USE", InUseError, RuntimeError),
    (-11, "PHX_ERR_SYSTEM", SystemCallError, OSError),
    (-12, "PHX_ERR_DEVICE", DeviceError, RuntimeError),
    (-13, "PHX_ERR_ABI", AbiError, RuntimeError),
    (-14, "PHX_ERR_PERMISSION", AccessDeniedError, PermissionError),
    (-15, "PHX_ERR_INTERNAL", InternalError, RuntimeError),
]
FIELDS = {
    "rank": 1,
    "peer": 2,
    "sequence": 17,
    "step": 3,
    "sys_errno": 4,
    "operation": "all_reduce",
    "group": "tp",
}


@pytest.mark.parametrize(("status", "name", "cls", "builtin"), CLASSES)
def test_each_status_has_a_class_that_is_also_the_builtin_that_fits(status, name, cls, builtin):
    assert ffi.string(lib.phx_status_name(status)).decode() == name
    error = cls("what happened", **FIELDS)
    assert isinstance(error, PhalanxError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, builtin)
    assert str(error) == "what happened"
    assert (error.status, error.status_name) == (status, name)
    assert {field: getattr(error, field) for field in FIELDS} == FIELDS


@pytest.mark.parametrize(("status", "name", "cls", "builtin"), CLASSES)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_survives_copying_and_pickling(status, name, cls, builtin, duplicate):
    error = cls("what happened", **FIELDS)
    error.add_note("and more")
    again = duplicate(error)
    assert type(again) is cls
    assert str(again) == "what happened"
    assert again.status_name == name
    assert {field: getattr(again, field) for field in FIELDS} == FIELDS
    assert again.__notes__ == ["and more"]
    if builtin in (OSError, PermissionError):
        assert again.errno == 4


def raise_in_child():
    raise PeerDeadError("rank 2 (pid 7) died", peer=2, group="tp")


def test_an_error_crosses_from_another_process():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        with pytest.raises(PeerDeadError, match=r"rank 2 \(pid 7\) died") as caught:
            pool.submit(raise_in_child).result(timeout=60)
    assert (caught.value.peer, caught.value.group) == (2, "tp")


def test_check_passes_what_is_no_error_and_raises_what_the_core_says():
    assert check(0) == 0
    assert check(1) == 1
    status = lib.phx_last_error_info(ffi.NULL)
    assert status == -1
    with pytest.raises(InvalidArgumentError) as caught:
        check(status)
    assert str(caught.value) == ffi.string(lib.phx_last_error()).decode()
    assert caught.value.operation != ""
    assert (caught.value.rank, caught.value.peer) == (-1, -1)


def test_a_status_that_the_core_did_not_explain_still_raises_its_class():
    lib.phx_last_error_info(ffi.NULL)  # the last error is now another one
    with pytest.raises(DeviceError, match="PHX_ERR_DEVICE"):
        check(-12)
    with pytest.raises(PhalanxError, match="-99"):
        check(-99)
